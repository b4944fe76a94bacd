"""The report of a run as Markdown, and the rows of the tables that all reports share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..common.messages import gib

COMPARISON = ("model", "size", "bits/weight", "perplexity", "KL divergence", "same top token")


def comparison(data: dict[str, Any]) -> list[tuple[str, ...]]:
    """Rows under COMPARISON: the baseline, the result."""
    v = data["validation"]
    error = f" ± {v['error']:.4f}" if v.get("error") is not None else ""
    return [
        (v["baseline"], gib(v["baseline_bytes"]), f"{v['baseline_bits']:.3f}", f"{v['baseline_perplexity']:.4f}", "", ""),
        (
            "result",
            gib(data["total_bytes"]),
            f"{data['bits_per_weight']:.3f}",
            f"{v['perplexity']:.4f}{error}",
            divergence(v),
            f"{v['top1_agreement']:.2f} %",
        ),
    ]


def stock_rows(data: dict[str, Any]) -> list[tuple[str, ...]]:
    """Rows under COMPARISON of the stock mixes that were measured without being written; of one of several files none."""
    return [] if data["label"] else [(f"stock {one['label']}", *comparison(one)[1][1:]) for one in data["stock"]]


def divergence(v: dict[str, Any]) -> str:
    """The mean KL divergence with its standard error; a single prediction has none."""
    error = v.get("kld_error")
    return f"{v['kld_mean']:.5f}" + (f" ± {error:.5f}" if error is not None else "")


def ratio(v: dict[str, Any]) -> str:
    error = v.get("ratio_error")  # a single prediction has none
    return f"{v['ratio']:.4f}" + (f" ± {error:.4f}" if error is not None else "")


def measured(v: dict[str, Any]) -> str:
    """What a validation was measured on, and the figures that its table leaves out."""
    drafts = "".join(
        f" Draft layer {number}: perplexity {draft['perplexity']:.4f}, drafts accepted {draft['top1_agreement']:.2f} %"
        f" (at temperature 0), {100 * draft['acceptance']:.2f} % (at 1)."
        for number, draft in enumerate(v.get("mtp") or [], 1)
    )
    confident = f", mean where the baseline is sure {v['kld_confident']:.5f}" if v.get("kld_confident") is not None else ""
    noise = f" Noise floor: {v['noise_floor']['kld_mean']:.5f}." if v.get("noise_floor") else ""
    figures = f"median {v['kld_median']:.5f}, 99 % {v['kld_p99']:.5f}, maximum {v['kld_max']:.4f}{confident}"
    return f"{measured_on(v)} Perplexity ratio {ratio(v)}; KL divergence: {figures}.{noise}{drafts}"


def measured_on(v: dict[str, Any]) -> str:
    """What a validation was measured on."""
    return f"{v['chunks']} windows of {v['n_ctx']} tokens, {v['tokens_scored']} predictions scored."


def type_rows(data: dict[str, Any]) -> list[tuple[object, ...]]:
    total = data["total_bytes"]
    return [(n, t["tensors"], gib(t["nbytes"]), f"{t['nbytes'] / total:.1%}") for n, t in data["types"].items()]


def role_rows(data: dict[str, Any]) -> list[tuple[object, ...]]:
    total = data["total_bytes"]
    return [
        (role, ", ".join(types), gib(sum(types.values())), f"{sum(types.values()) / total:.1%}")
        for role, types in data["roles"].items()
    ]


def error_rows(data: dict[str, Any]) -> list[tuple[object, ...]]:
    """A row for each type that changes weights: tensors, mean and largest relative error of their samples."""
    rows = []
    for name in data["types"]:
        errors = [t["error"] for t in data["table"] if t["type"] == name and t["error"]]
        if errors:
            rows.append((name, len(errors), f"{sum(errors) / len(errors):.5f}", f"{max(errors):.5f}"))
    return rows


def search_rows(data: dict[str, Any]) -> list[tuple[object, ...]]:
    """Rows under SEARCH: what was asked for and predicted, and what was measured of the file."""
    s, v = data["search"], data["validation"]
    asked = {unit: f"at most {s['asked'][unit]:,}" if s["asked"][unit] is not None else "" for unit in s["asked"]}
    divergence = f"{s['predicted_damage']:.5f}" if s["kld_mean"] is not None else ""  # without a text it is something else
    rows: list[tuple[object, ...]] = [
        ("bytes of the file", asked["size"], f"{s['file_bytes']:,}", f"{data['quantized_file_bytes']:,}"),
        ("bits per weight", asked["bits"], f"{s['bits_per_weight']:.3f}", f"{data['bits_per_weight']:.3f}"),
    ]
    if s["kld_mean"] is not None:
        error = f" ± {s['kld_error']:.5f}" if s["kld_error"] is not None else ""
        rows.append((f"KL divergence, {s['text']}", asked["divergence"], divergence, f"{s['kld_mean']:.5f}{error}"))
    if v is not None and (s["kld_mean"] is None or v["dataset"] != s["text"]):
        rows.append((f"KL divergence, {v['dataset']}", "", divergence, f"{v['kld_mean']:.5f}"))
    return rows


def search_line(data: dict[str, Any]) -> str:
    """A sentence: how the types were chosen."""
    s = data["search"]
    imatrix = "with" if s["imatrix"] else "without"
    how = f"sensitivity measured on {s['text']}" if s["text"] else "relative errors of all tensors counting alike"
    return f"Types of {s['tensors']} tensors were searched for, {imatrix} an imatrix, {how}: {Path(s['path']).name}."


FAILED = "The result is beyond the limits that the recipe sets:"  # above the failures
SEARCH = ("", "asked for", "predicted", "measured")
TYPES, ROLES = ("type", "tensors", "size", "share"), ("role", "types", "size", "share")
ERRORS = ("type", "tensors", "mean error", "largest")


def report_text(data: dict[str, Any]) -> str:
    """The Markdown report."""
    lines = [f"# {data['recipe']}", "", f"Made {data['made']} by ggufmill {data['version']} on {data['machine']}."]
    lines += ["", f"- {data['source']}", *(f"- result: `{Path(f).name}`" for f in data["files"])]
    if data["imatrix"]:
        lines.append(f"- imatrix: `{Path(data['imatrix']).name}`, {data['imatrix_entries']} entries")
    if data["failures"]:
        lines[1:1] = ["", f"**{FAILED}**", "", *(f"- {failure}" for failure in data["failures"])]
    lines += report_parts(data)
    lines += ["", "## Time", "", *markdown(("stage", "seconds"), [(s, f"{t:.1f}") for s, t in data["seconds"].items()])]
    lines += ["", "## Recipe", "", "```toml", recipe_shown(data), "```", ""]
    if data["search"] is not None:
        lines += ["The rules that were found:", "", "```", data["search"]["recipe"].rstrip(), "```", ""]
    return "\n".join(lines)


def report_parts(data: dict[str, Any], level: str = "##") -> list[str]:
    """What the report tells of a file: search, validation, types, errors, imatrix, warnings. level: of the headings."""
    lines: list[str] = []
    v = data["validation"]
    if data["search"] is not None:
        lines += ["", f"{level} Search", "", search_line(data), "", *markdown(SEARCH, search_rows(data))]
    if v is not None:
        rows = [*comparison(data), *stock_rows(data)]
        lines += ["", f"{level} Validation", "", *markdown(COMPARISON, rows), "", measured(v)]
        if v.get("layers"):
            rows = [(e["layer"], f"{e['relative']:.5f}", f"{e['worst']:.5f}", f"{e['cosine']:.6f}") for e in v["layers"]]
            lines += ["", "Outputs of the layers against those of the baseline, on the first window:", ""]
            lines += markdown(("layer", "relative error", "worst token", "cosine"), rows)
        for one in v.get("texts", []):
            for label, text in ((v["baseline"], one["baseline"]), ("result", one["result"])):
                said = f"Text from {label} after `{' '.join(one['prompt'].split())}`:"
                lines += ["", said, "", *(f"    {line}" for line in text.splitlines())]
    lines += ["", f"{level} Types", "", *markdown(TYPES, type_rows(data)), "", *markdown(ROLES, role_rows(data))]
    lines += ["", f"{data['tensors']} tensors, {data['bits_per_weight']:.3f} bits per weight, {data['file_bytes']:,} bytes."]
    if error_rows(data):
        lines += ["", "Relative error of the weights, on samples of every tensor read back from the file:", ""]
        lines += markdown(ERRORS, error_rows(data))
    if data["coverage"] is not None:
        lines += ["", f"{level} Imatrix", "", coverage_line(data), *(f"- {r}" for r in data["coverage"]["remarks"])]
    if data["warnings"]:
        lines += ["", f"{level} Warnings", "", *(f"- {w}" for w in data["warnings"])]
    return lines


def recipe_shown(data: dict[str, Any]) -> str:
    """The recipe for publication: of local paths only the names."""
    from ...quantize.recipes.recipe import strip_folders

    return strip_folders(data["rules"].rstrip())


def texts_shown(data: dict[str, Any]) -> str:
    """The texts that the imatrix was computed from, by name."""
    names = (Path(text).name if Path(text).is_absolute() else text for text in data["imatrix_texts"])
    return ", ".join(names) or "an unnamed text"


def coverage_line(data: dict[str, Any]) -> str:
    layers = data["coverage"]["layers"]
    tensors, without = sum(row["tensors"] for row in layers), sum(len(row["without"]) for row in layers)
    tokens = f"{data['imatrix_tokens']:,} tokens of {texts_shown(data)}"
    return f"{tensors - without} of {tensors} weight tensors have data, from {tokens}."


def markdown(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """The lines of a table; a bar in a cell is escaped."""
    return [
        "| " + " | ".join(headings) + " |",
        "|" + "---|" * len(headings),
        *("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows),
    ]
