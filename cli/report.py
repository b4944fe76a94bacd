"""The report of a run: as JSON, as a Markdown file, and short for the terminal."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..formats.plan import Plan
from .console import gib, table

if TYPE_CHECKING:
    from ..imatrix import Imatrix
    from .pipeline import Run


def report_json(run: Run, plan: Plan, imatrix: Imatrix | None, validation: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "recipe": run.recipe.name,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "machine": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "source": run.settings(),
        "files": [str(f.path.resolve()) for f in plan.files],
        "imatrix": str(run.imatrix_path.resolve()) if run.imatrix_path is not None else None,
        "imatrix_entries": len(imatrix.entries) if imatrix is not None else 0,
        "imatrix_starved": imatrix.starved() if imatrix is not None else {},
        "report": str(run.folder.reports[1].resolve()),
        "tensors": len(plan.outputs),
        "total_bytes": plan.total_bytes,
        "file_bytes": plan.file_bytes,
        "bits_per_weight": plan.bits_per_weight,
        "types": {name: {"tensors": n, "nbytes": size} for name, (n, size) in plan.histogram().items()},
        "warnings": plan.warnings,
        "validation": validation,
        "seconds": run.seconds,
        "rules": run.recipe.text,
    }


def _comparison(found: dict[str, Any]) -> list[tuple[object, ...]]:
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


def _ratio(v: dict[str, Any]) -> str:
    error = v.get("ratio_error")  # a single prediction has none
    return f"{v['ratio']:.4f}" + (f" +/- {error:.4f}" if error is not None else "")


_HEADINGS = ("model", "size", "bits/weight", "perplexity", "KL divergence", "same top token")


def short_text(found: dict[str, Any]) -> str:
    """What a person reads in the terminal when the run is over."""
    parts = []
    v = found["validation"]
    if v is not None:
        parts.append(table(_HEADINGS, _comparison(found)))
        seen = f"perplexity over {v['chunks']} windows of {v['n_ctx']} tokens"
        parts.append(f"{seen}, ratio {_ratio(v)}")
        parts += [f"note: {note}" for note in v.get("notes", [])]
        parts += [f"{label}: {text!r}" for label, text in v.get("texts", {}).items()]
    else:
        parts.append(f"{gib(found['total_bytes'])}, {found['bits_per_weight']:.3f} bits per weight")
    places = [("model", f) for f in found["files"]] + [("imatrix", found["imatrix"])] * bool(found["imatrix"])
    parts.append("\n".join(f"{what:8} {where}" for what, where in [*places, ("report", found["report"])]))
    seconds = ", ".join(f"{stage} {s:.1f} s" for stage, s in found["seconds"].items())
    parts.append(seconds)
    return "\n\n".join(parts)


def report_text(found: dict[str, Any]) -> str:
    """The Markdown report."""
    lines = [f"# {found['recipe']}", "", f"Made {found['made']} by ggufmill {found['version']} on {found['machine']}."]
    lines += ["", f"- {found['source']}", *(f"- result: `{f}`" for f in found["files"])]
    if found["imatrix"]:
        lines.append(f"- imatrix: `{found['imatrix']}`, {found['imatrix_entries']} entries")
    v = found["validation"]
    if v is not None:
        lines += ["", "## Validation", "", *_markdown(_HEADINGS, _comparison(found)), ""]
        lines += [
            f"{v['chunks']} windows of {v['n_ctx']} tokens, {v['tokens_scored']} predictions scored. "
            f"Perplexity ratio {_ratio(v)}; "
            f"KL divergence: median {v['kld_median']:.5f}, 99 % {v['kld_p99']:.5f}, maximum {v['kld_max']:.4f}."
        ]
        for label, text in v.get("texts", {}).items():
            lines += ["", f"Text from {label}:", "", *(f"    {line}" for line in text.splitlines())]
    total = found["total_bytes"]
    types = [(n, t["tensors"], gib(t["nbytes"]), f"{t['nbytes'] / total:.1%}") for n, t in found["types"].items()]
    lines += ["", "## Types", "", *_markdown(("type", "tensors", "size", "share"), types)]
    lines += ["", f"{found['tensors']} tensors, {found['bits_per_weight']:.3f} bits per weight, {found['file_bytes']:,} bytes."]
    if found["warnings"]:
        lines += ["", "## Warnings", "", *(f"- {w}" for w in found["warnings"])]
    lines += ["", "## Time", "", *_markdown(("stage", "seconds"), [(s, f"{t:.1f}") for s, t in found["seconds"].items()])]
    lines += ["", "## Recipe", "", "```toml", found["rules"].rstrip(), "```", ""]
    return "\n".join(lines)


def _markdown(headings: tuple[str, ...], rows: list[tuple[object, ...]] | list[Any]) -> list[str]:
    return [
        "| " + " | ".join(headings) + " |",
        "|" + "---|" * len(headings),
        *("| " + " | ".join(map(str, row)) + " |" for row in rows),
    ]
