"""The report of a run as Markdown, and the rows of the tables that all reports share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..common.figures import (
    BITS,
    DIVERGENCE,
    DIVERGENCE_DIGITS,
    PERPLEXITY,
    PERPLEXITY_DIGITS,
    SAME_TOP,
    SHARE_DIGITS,
    SIZE,
    bits_per_weight_text,
    bits_text,
    error_text,
    per_cent_text,
    share_text,
    size_text,
    windows_text,
)

COMPARISON = ("model", SIZE, BITS, PERPLEXITY, DIVERGENCE, SAME_TOP)


def comparison(data: dict[str, Any]) -> list[tuple[str, ...]]:
    """Rows under COMPARISON: the baseline, the result."""
    v = data["validation"]
    base = error_text(v["baseline_perplexity"], v.get("baseline_error"), PERPLEXITY_DIGITS)
    return [
        (v["baseline"], size_text(v["baseline_bytes"]), bits_text(v["baseline_bits"]), base, "", ""),
        (
            "result",
            size_text(data["file_bytes"]),
            bits_text(data["bits_per_weight"]),
            error_text(v["perplexity"], v.get("error"), PERPLEXITY_DIGITS),
            divergence(v),
            error_text(v["top1_agreement"], v.get("top1_error"), SHARE_DIGITS, " %"),
        ),
    ]


def stock_rows(data: dict[str, Any]) -> list[tuple[str, ...]]:
    """Rows under COMPARISON of the stock mixes that were measured without being written; of one of several files none."""
    return [] if data["label"] else [(f"stock {one['label']}", *comparison(one)[1][1:]) for one in data["stock"]]


def divergence(v: dict[str, Any]) -> str:
    """The mean KL divergence with its standard error; a single prediction has none."""
    return error_text(v["kld_mean"], v.get("kld_error"), DIVERGENCE_DIGITS)


def ratio(v: dict[str, Any]) -> str:
    return error_text(v["ratio"], v.get("ratio_error"), 4)


def measured(v: dict[str, Any]) -> str:
    """What a validation was measured on, and the figures that its table leaves out."""
    drafts = "".join(
        f" Draft layer {number}: perplexity {draft['perplexity']:.4f}, drafts accepted {per_cent_text(draft['top1_agreement'])}"
        f" (at temperature 0), {share_text(draft['acceptance'], 2)} (at 1)."
        for number, draft in enumerate(v.get("mtp") or [], 1)
    )
    confident = (
        f", mean where the baseline's top token has 50 % or more {v['kld_confident']:.5f}"
        if v.get("kld_confident") is not None
        else ""
    )
    noise = f" Noise floor: {v['noise_floor']['kld_mean']:.5f}." if v.get("noise_floor") else ""
    figures = f"median {v['kld_median']:.5f}, 99th percentile {v['kld_p99']:.5f}, maximum {v['kld_max']:.4f}{confident}"
    return f"{measured_on(v)} Perplexity ratio {ratio(v)}; KL divergence: {figures}.{noise}{drafts}"


def measured_on(v: dict[str, Any]) -> str:
    """What a validation was measured on."""
    return f"{windows_text(v['chunks'], v['n_ctx'], v['tokens_scored'])} scored."


def type_rows(data: dict[str, Any]) -> list[tuple[object, ...]]:
    total = data["total_bytes"]
    return [(n, t["tensors"], size_text(t["nbytes"]), share_text(t["nbytes"] / total)) for n, t in data["types"].items()]


def role_rows(data: dict[str, Any]) -> list[tuple[object, ...]]:
    total = data["total_bytes"]
    return [
        (role, ", ".join(types), size_text(sum(types.values())), share_text(sum(types.values()) / total))
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
        ("bits per weight", asked["bits"], bits_text(s["bits_per_weight"]), bits_text(data["bits_per_weight"])),
    ]
    if s["kld_mean"] is not None:
        measured = error_text(s["kld_mean"], s["kld_error"], DIVERGENCE_DIGITS)
        rows.append((f"KL divergence, {s['text']}", asked["divergence"], divergence, measured))
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
    lines += ["", f"{data['tensors']} tensors, {bits_per_weight_text(data['bits_per_weight'])}, {data['file_bytes']:,} bytes."]
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
