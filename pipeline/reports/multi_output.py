"""The reports of a run of several files: one table and plot of all, then what the report of one file has of each."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.figures import bits_text, size_text
from .html_page import failures_shown, page, sections, table
from .markdown import COMPARISON, FAILED, comparison, markdown, measured_on, recipe_shown, report_parts, stock_rows, texts_shown
from .size_plot import TITLE, size_plot

if TYPE_CHECKING:
    from ..stages.run import Run

# Keys of the report of one file that are the same for all
_SHARED = (
    *("recipe", "made", "version", "machine", "source", "source_name", "name", "architecture", "report", "card"),
    *("limits", "coverage", "stock"),
)
_IMATRIX = ("imatrix", "imatrix_entries", "imatrix_texts", "imatrix_tokens", "imatrix_starved", "coverage")


def multi_json(run: Run, reports: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of all files: `quants`, the report of each (`report_json`), and what they share."""
    first = reports[0]
    with_imatrix = next((one for one in reports if one["imatrix"]), first)
    return {
        "label": "",
        **{key: first[key] for key in _SHARED},
        **{key: with_imatrix[key] for key in _IMATRIX},
        "files": [file for one in reports for file in one["files"]],
        "file_bytes": sum(one["file_bytes"] for one in reports),
        "checksums": str(run.folder.checksums.resolve()),
        "failures": [f"{one['label']}: {failure}" for one in reports for failure in one["failures"]],
        "seconds": dict(run.cache.seconds),
        "rules": run.recipe.text,
        "quants": reports,
    }


def headings(data: dict[str, Any]) -> tuple[str, ...]:
    """The headings of the table of all files, without figures of quality where there was no validation."""
    return ("file", *COMPARISON[1 : 6 if data["quants"][0]["validation"] is not None else 3])


def rows(data: dict[str, Any]) -> list[tuple[str, ...]]:
    """A row under `headings` for each file, the first of those of a split."""
    made = []
    for one in data["quants"]:
        size, bits = size_text(one["file_bytes"]), bits_text(one["bits_per_weight"])
        quality = comparison(one)[1][3:] if one["validation"] is not None else ()
        of = f" (1 of {len(one['files'])})" if len(one["files"]) > 1 else ""
        made.append((Path(one["files"][0]).name + of, size, bits, *quality))
    return made


def baseline_row(data: dict[str, Any]) -> list[tuple[str, ...]]:
    """The baseline under `headings`; [] without a validation."""
    first = data["quants"][0]
    return [comparison(first)[0]] if first["validation"] is not None else []


def multi_text(data: dict[str, Any]) -> str:
    """The Markdown report."""
    text = [f"# {data['name']}: {len(data['quants'])} files", ""]
    if data["failures"]:
        text += [f"**{FAILED}**", "", *(f"- {failure}" for failure in data["failures"]), ""]
    text += [f"Made {data['made']} by ggufmill {data['version']} on {data['machine']}.", "", f"- {data['source']}"]
    if data["imatrix"]:
        text.append(f"- imatrix: `{Path(data['imatrix']).name}`, {data['imatrix_entries']} entries from {texts_shown(data)}")
    text += ["", *markdown(headings(data), [*baseline_row(data), *rows(data), *stock_rows(data)])]
    if data["quants"][0]["validation"] is not None:
        text += ["", measured_on(data["quants"][0]["validation"])]
    for one in data["quants"]:
        text += ["", f"## {one['label']}", "", *report_parts(one, "###")]
    text += ["", "## Time", "", *markdown(("stage", "seconds"), [(s, f"{t:.1f}") for s, t in data["seconds"].items()])]
    return "\n".join([*text, "", "## Recipe", "", "```toml", recipe_shown(data), "```", ""])


def multi_page(data: dict[str, Any]) -> str:
    """The report as one HTML page."""
    name = data["name"]
    body = [
        f"<h1>{escape(name)}</h1>",
        *failures_shown(data),
        f'<p class="soft">{escape(data["source"])}, {len(data["quants"])} files by the recipe {escape(data["recipe"])}. '
        f"Made {escape(data['made'])} by ggufmill {escape(data['version'])} on {escape(data['machine'])}.</p>",
        _plot(data),
        table(headings(data), [*baseline_row(data), *rows(data), *stock_rows(data)]),
    ]
    if data["quants"][0]["validation"] is not None:
        body.append(f"<p>{escape(measured_on(data['quants'][0]['validation']))}</p>")
    body += [
        f"<details><summary><b>{escape(one['label'])}</b></summary>{''.join(sections(one))}</details>" for one in data["quants"]
    ]
    body.append(f"<h2>Recipe</h2><pre>{escape(recipe_shown(data))}</pre>")
    return page(name, body)


def _plot(data: dict[str, Any]) -> str:
    """KL divergence over bits per weight of all files."""
    drawn = size_plot(data["quants"], data["stock"])
    return f'<div class="plots alone"><div class="plot"><h3>{TITLE}</h3>{drawn}</div></div>' if drawn else ""
