"""The report of a run as Markdown, and the rows of the tables that all reports share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..common.formatting import gib

COMPARISON = ("model", "size", "bits/weight", "perplexity", "KL divergence", "same top token")


def comparison(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """The baseline's row and the result's, under COMPARISON."""
    v = found["validation"]
    error = f" +/- {v['error']:.4f}" if v.get("error") is not None else ""
    return [
        (v["baseline"], gib(v["baseline_bytes"]), f"{v['baseline_bits']:.3f}", f"{v['baseline_perplexity']:.4f}", "", ""),
        (
            "result",
            gib(found["total_bytes"]),
            f"{found['bits_per_weight']:.3f}",
            f"{v['perplexity']:.4f}{error}",
            f"{v['kld_mean']:.5f}",
            f"{v['top1_agreement']:.2f} %",
        ),
    ]


def ratio(v: dict[str, Any]) -> str:
    error = v.get("ratio_error")  # a single prediction has none
    return f"{v['ratio']:.4f}" + (f" +/- {error:.4f}" if error is not None else "")


def measured(v: dict[str, Any]) -> str:
    """What the figures of a validation were measured on, and those that its table leaves out."""
    return (
        f"{v['chunks']} windows of {v['n_ctx']} tokens, {v['tokens_scored']} predictions scored. "
        f"Perplexity ratio {ratio(v)}; "
        f"KL divergence: median {v['kld_median']:.5f}, 99 % {v['kld_p99']:.5f}, maximum {v['kld_max']:.4f}."
    )


def type_rows(found: dict[str, Any]) -> list[tuple[object, ...]]:
    total = found["total_bytes"]
    return [(n, t["tensors"], gib(t["nbytes"]), f"{t['nbytes'] / total:.1%}") for n, t in found["types"].items()]


def role_rows(found: dict[str, Any]) -> list[tuple[object, ...]]:
    total = found["total_bytes"]
    return [
        (role, ", ".join(types), gib(sum(types.values())), f"{sum(types.values()) / total:.1%}")
        for role, types in found["roles"].items()
    ]


def error_rows(found: dict[str, Any]) -> list[tuple[object, ...]]:
    """For each type that changes weights: tensors, mean and largest relative error of their samples."""
    rows = []
    for name in found["types"]:
        errors = [t["error"] for t in found["table"] if t["type"] == name and t["error"]]
        if errors:
            rows.append((name, len(errors), f"{sum(errors) / len(errors):.5f}", f"{max(errors):.5f}"))
    return rows


def search_rows(found: dict[str, Any]) -> list[tuple[object, ...]]:
    """Under SEARCH: what the search was asked for and predicted, against what was measured of the file."""
    s, v = found["search"], found["validation"]
    asked = {unit: f"at most {s['asked'][unit]:,}" if s["asked"][unit] is not None else "" for unit in s["asked"]}
    divergence = f"{s['predicted_damage']:.5f}" if s["kld_mean"] is not None else ""  # without a text it is something else
    rows: list[tuple[object, ...]] = [
        ("bytes of the file", asked["size"], f"{s['file_bytes']:,}", f"{found['quantized_file_bytes']:,}"),
        ("bits per weight", asked["bits"], f"{s['bits_per_weight']:.3f}", f"{found['bits_per_weight']:.3f}"),
    ]
    if s["kld_mean"] is not None:
        error = f" +/- {s['kld_error']:.5f}" if s["kld_error"] is not None else ""
        rows.append((f"KL divergence, {s['text']}", asked["divergence"], divergence, f"{s['kld_mean']:.5f}{error}"))
    if v is not None and (s["kld_mean"] is None or v["dataset"] != s["text"]):
        rows.append((f"KL divergence, {v['dataset']}", "", divergence, f"{v['kld_mean']:.5f}"))
    return rows


def search_line(found: dict[str, Any]) -> str:
    """How the types were found, in a sentence."""
    s = found["search"]
    imatrix = "with" if s["imatrix"] else "without"
    how = f"sensitivity measured on {s['text']}" if s["text"] else "relative errors of all tensors counting alike"
    return f"Types of {s['tensors']} tensors were searched for, {imatrix} an imatrix, {how}: {Path(s['path']).name}."


FAILED = "The result is beyond the limits that the recipe sets:"  # above found["failures"]
SEARCH = ("", "asked for", "predicted", "measured")
TYPES, ROLES = ("type", "tensors", "size", "share"), ("role", "types", "size", "share")
ERRORS = ("type", "tensors", "mean error", "largest")


def report_text(found: dict[str, Any]) -> str:
    """The Markdown report."""
    lines = [f"# {found['recipe']}", "", f"Made {found['made']} by ggufmill {found['version']} on {found['machine']}."]
    lines += ["", f"- {found['source']}", *(f"- result: `{Path(f).name}`" for f in found["files"])]
    if found["imatrix"]:
        lines.append(f"- imatrix: `{Path(found['imatrix']).name}`, {found['imatrix_entries']} entries")
    if found["failures"]:
        lines[1:1] = ["", f"**{FAILED}**", "", *(f"- {failure}" for failure in found["failures"])]
    v = found["validation"]
    if found["search"] is not None:
        lines += ["", "## Search", "", search_line(found), "", *markdown(SEARCH, search_rows(found))]
    if v is not None:
        lines += ["", "## Validation", "", *markdown(COMPARISON, comparison(found)), "", measured(v)]
        if v.get("layers"):
            rows = [(e["layer"], f"{e['relative']:.5f}", f"{e['worst']:.5f}", f"{e['cosine']:.6f}") for e in v["layers"]]
            lines += ["", "Outputs of the layers against those of the baseline, on the first window:", ""]
            lines += markdown(("layer", "relative error", "worst token", "cosine"), rows)
        for label, text in v.get("texts", {}).items():
            lines += ["", f"Text from {label}:", "", *(f"    {line}" for line in text.splitlines())]
    lines += ["", "## Types", "", *markdown(TYPES, type_rows(found)), "", *markdown(ROLES, role_rows(found))]
    lines += ["", f"{found['tensors']} tensors, {found['bits_per_weight']:.3f} bits per weight, {found['file_bytes']:,} bytes."]
    if error_rows(found):
        lines += ["", "Relative error of the weights, on samples of every tensor read back from the file:", ""]
        lines += markdown(ERRORS, error_rows(found))
    if found["coverage"] is not None:
        lines += ["", "## Imatrix", "", coverage_line(found), *(f"- {r}" for r in found["coverage"]["remarks"])]
    if found["warnings"]:
        lines += ["", "## Warnings", "", *(f"- {w}" for w in found["warnings"])]
    lines += ["", "## Time", "", *markdown(("stage", "seconds"), [(s, f"{t:.1f}") for s, t in found["seconds"].items()])]
    lines += ["", "## Recipe", "", "```toml", recipe_shown(found), "```", ""]
    if found["search"] is not None:
        lines += ["The rules that were found:", "", "```", found["search"]["recipe"].rstrip(), "```", ""]
    return "\n".join(lines)


def recipe_shown(found: dict[str, Any]) -> str:
    """The recipe as others may read it: of local paths only the names."""
    from ...quantize.recipes.recipe import strip_folders

    return strip_folders(found["rules"].rstrip())


def texts_shown(found: dict[str, Any]) -> str:
    """What the imatrix is from, without the folders of whoever made it."""
    names = (Path(text).name if Path(text).is_absolute() else text for text in found["imatrix_texts"])
    return ", ".join(names) or "an unnamed text"


def coverage_line(found: dict[str, Any]) -> str:
    layers = found["coverage"]["layers"]
    tensors, without = sum(row["tensors"] for row in layers), sum(len(row["without"]) for row in layers)
    tokens = f"{found['imatrix_tokens']:,} tokens of {texts_shown(found)}"
    return f"{tensors - without} of {tensors} weight tensors have data, from {tokens}."


def markdown(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """The lines of a table; a bar in a cell is escaped."""
    return [
        "| " + " | ".join(headings) + " |",
        "|" + "---|" * len(headings),
        *("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows),
    ]
