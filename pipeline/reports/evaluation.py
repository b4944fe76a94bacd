"""What `evaluate` found, as rows, as a Markdown table and as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from ...data_classes import dataclass
from ..common.figures import (
    BITS,
    DIVERGENCE,
    DIVERGENCE_DIGITS,
    PERPLEXITY,
    PERPLEXITY_DIGITS,
    SAME_TOP,
    SHARE_DIGITS,
    SIZE,
    bits_text,
    error_text,
    file_bytes_of,
    per_cent_text,
    size_text,
)
from ..judging.domains import DomainFigures
from ..judging.verdict import NoiseFloor, PairedTest
from .style import COLOURS, INK, new_axes, place_labels, save_figure, styled


@dataclass(frozen=True)
class EvaluationRow:
    """A model's figures; errors are standard errors.

    name               the file's name without .gguf, or a stock mix's
    kind               'model', 'stock' (a file type of the baseline, measured without a file) or 'joined' (measured by another
                       call)
    nbytes             of its file, or of the one that would be written; bits: per weight
    ratio              perplexity / the baseline's
    kld_missing        estimate of what kld lacks, of a baseline that keeps only its most probable tokens; else None
    kld_median, kld_p999  the median and the 99.9th percentile of the KL divergence
    kld_confident      the mean over predictions that the baseline is sure of (its first token has a probability of 0.5 or more)
    domains            figures of each text, where there are several
    tokens_per_second  of the windows scored; None for what was never written to a file
    """

    name: str
    kind: str
    nbytes: int
    bits: float
    perplexity: float
    error: float | None
    ratio: float
    ratio_error: float | None
    kld: float
    kld_error: float | None
    kld_missing: float | None
    kld_p999: float | None
    same_top: float
    same_top_error: float | None
    tokens_per_second: float | None
    kld_median: float | None = None
    kld_confident: float | None = None
    domains: list[DomainFigures] = field(default_factory=list)


def row_of(result: dict[str, Any], joined: bool, domains: Sequence[DomainFigures] = ()) -> EvaluationRow:
    """result: of a file of results; domains: its figures for each text."""
    about = result["about"]
    return EvaluationRow(
        name=str(about.get("stock") or Path(str(result.get("model"))).name.removesuffix(".gguf")),
        kind="stock" if about.get("stock") else "joined" if joined else "model",
        nbytes=file_bytes_of(about),
        bits=about["bits_per_weight"],
        perplexity=result["perplexity"],
        error=result.get("error"),
        ratio=result["perplexity"] / result["baseline_perplexity"],
        ratio_error=result.get("ratio_error"),
        kld=result["kld_mean"],
        kld_error=result.get("kld_error"),
        kld_missing=result.get("kld_missing"),
        kld_p999=(result.get("kld_percentiles") or {}).get("99.9"),
        same_top=result["top1_agreement"],
        same_top_error=result.get("top1_error"),
        tokens_per_second=result.get("tokens_per_second"),
        kld_median=result.get("kld_median"),
        kld_confident=result.get("kld_confident"),
        domains=list(domains),
    )


_HEADINGS = (
    "model",
    SIZE,
    BITS,
    PERPLEXITY,
    DIVERGENCE,
    "median",
    "confident",
    "99.9 %",
    SAME_TOP,
    "t/s",
)


def headings(rows: Sequence[EvaluationRow]) -> tuple[str, ...]:
    """What stands above `cells`; behind it a column of KL divergences for each text, if there are several."""
    return (*_HEADINGS, *(f"KLD {domain.name}" for domain in (rows[0].domains if rows else ())))


def cells(row: EvaluationRow) -> tuple[object, ...]:
    """The texts and numbers of a row under `headings`."""
    return (
        row.name,
        size_text(row.nbytes),
        bits_text(row.bits),
        error_text(row.perplexity, row.error, PERPLEXITY_DIGITS),
        error_text(row.kld, row.kld_error, DIVERGENCE_DIGITS)
        + ("" if row.kld_missing is None else f", lacks about {row.kld_missing:.6f}"),
        *("" if value is None else f"{value:.3g}" for value in (row.kld_median, row.kld_confident)),
        "" if row.kld_p999 is None else f"{row.kld_p999:.4f}",
        error_text(row.same_top, row.same_top_error, SHARE_DIGITS, " %"),
        "" if row.tokens_per_second is None else f"{row.tokens_per_second:.1f}",
        *(error_text(domain.kld, domain.kld_error, DIVERGENCE_DIGITS) for domain in row.domains),
    )


def judgement_lines(noise: NoiseFloor | None, comparisons: Sequence[PairedTest]) -> list[str]:
    """The noise floor and the paired tests, a line each."""
    lines = []
    if noise is not None:
        figures = [f"KL divergence {error_text(noise.kld_mean, noise.kld_error, DIVERGENCE_DIGITS)}"]
        figures += [f"median {noise.kld_median:.3g}"] if noise.kld_median is not None else []
        figures += [f"confident {noise.kld_confident:.3g}"] if noise.kld_confident is not None else []
        figures += [f"same top token {per_cent_text(noise.top1_agreement)}"]
        lines.append(f"Noise floor (the baseline with activations rounded to bf16): {', '.join(figures)}.")
    return [*lines, *(f"{comparison.sentence}." for comparison in comparisons)]


def evaluation_text(rows: Sequence[EvaluationRow], about: Sequence[str]) -> str:
    """A Markdown page: a table of the rows. about: lines before it, on text and baseline."""
    columns = headings(rows)
    lines = [*about, "", "| " + " | ".join(columns) + " |", "|---" + "|--:" * (len(columns) - 1) + "|"]
    lines += ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells(row)) + " |" for row in rows]
    return "\n".join(lines) + "\n"


# (heading, value and error of a row, logarithmic)
_PANELS = (
    ("KL divergence from the baseline, nats per token", "kld", "kld_error", True),
    ("perplexity / the baseline's", "ratio", "ratio_error", False),
    ("same most probable token, %", "same_top", "same_top_error", False),
    ("tokens per second", "tokens_per_second", None, False),
)
# marker, colour, label, colour of names
_KINDS = {
    "model": ("o", COLOURS[0], "models", COLOURS[0]),
    "joined": ("s", COLOURS[1], "measured by another call", COLOURS[1]),
    "stock": ("D", COLOURS[2], "stock mixes, not written", COLOURS[2]),
}


@styled
def plot_evaluation(rows: Sequence[EvaluationRow], baseline_perplexity: float, title: str, path: Path) -> None:
    """Figures over bits per weight, with error bars; stock mixes are joined by a line."""
    figure, axes = new_axes(2, 2, 12, 8.5)
    for panel, (heading, value, error, is_log) in zip(axes, _PANELS, strict=True):
        for kind, (marker, colour, label, _) in _KINDS.items():
            chosen = [row for row in rows if row.kind == kind and getattr(row, value) is not None]
            chosen.sort(key=lambda row: row.bits)
            if not chosen:
                continue
            values = [getattr(row, value) for row in chosen]
            errors = [getattr(row, error) or 0.0 if error else 0.0 for row in chosen]
            style = {
                "fmt": marker + ("-" if kind == "stock" and error else ""),
                "color": colour,
                "ms": 5,
                "lw": 1,
                "elinewidth": 1,
            }
            panel.errorbar([row.bits for row in chosen], values, errors if any(errors) else None, label=label, **style)
        panel.set(title=heading, xlabel="bits per weight")
        panel.margins(x=0.12, y=0.1)
        if is_log and all(getattr(row, value) > 0 for row in rows):
            panel.set_yscale("log")
    axes[0].plot([], [], linestyle="none", marker="_", color=INK, label="99.9th percentile")
    for row in rows:
        if row.kld_p999 is not None and row.kld_p999 > 0:
            axes[0].plot(row.bits, row.kld_p999, "_", color=_KINDS[row.kind][1], ms=7)
    axes[1].axhline(1, color=INK, linewidth=0.8, linestyle="--", label=f"baseline: {baseline_perplexity:.4f}")
    axes[3].set_ylim(0, 1.1 * max((row.tokens_per_second or 0.0 for row in rows), default=0.0) or 1.0)
    weights = [row.nbytes / row.bits for row in rows]
    if math.isclose(min(weights), max(weights), rel_tol=0.01):  # one axis of sizes fits all
        unit, name = (2**30, "GiB") if max(row.nbytes for row in rows) >= 2**30 else (2**20, "MiB")
        factor = weights[0] / unit
        for panel in axes:  # of all, so that their titles stay in line
            below = panel.secondary_xaxis(-0.2, functions=(lambda bits: bits * factor, lambda size: size / factor))
            below.set_xlabel(f"size, {name}")
    axes[1].legend()
    axes[0].legend()
    figure.suptitle(title, fontsize=11)
    figure.canvas.draw()
    line = sorted((row.bits, row.kld) for row in rows if row.kind == "stock")
    place_labels(axes[0], [(row.bits, row.kld, row.name, _KINDS[row.kind][3]) for row in rows], [line])
    save_figure(figure, path)
