"""Importance matrices and covariances as tables: coverage, statistics, comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...pipeline.common.figures import duration, share_text, size_text
from ...pipeline.common.messages import perplexity_text
from .console import table

if TYPE_CHECKING:
    from ...imatrix.coverage import LayerCoverage
    from ...imatrix.statistics import ImatrixComparison
    from ...pipeline.collecting.forecast import CovarianceForecast
    from ...pipeline.covariance import CovarianceStatistics, MergedCovariance
    from ...pipeline.imatrix import ImatrixResult, ImatrixStatistics, MergedImatrix


def covariances_text(result: CovarianceStatistics) -> str:
    """A row per input, and per output whose gradients are there."""
    outputs = sum(one.side == "output" for one in result.inputs)
    rows = [
        (one.name, *([one.side] if outputs else []), len(one.tensors), one.columns, one.matrices, one.fewest, one.most,
         f"{one.effective_rank:.1f}", share_text(one.diagonal_share), f"{one.correlation:.3f}", share_text(one.damping, 2),
         one.too_few or "-")
        for one in result.inputs
    ]  # fmt: skip
    headings = (
        *(("tensor", "side") if outputs else ("input",)),
        "tensors",
        "columns",
        "matrices",
        "fewest",
        "most",
        "rank",
        "diagonal",
        "correlation",
        "damping",
        "too few",
    )
    origin = result.model
    texts = ", ".join(origin.datasets) or "not recorded"
    sides = f"{len(rows) - outputs} inputs" + (f", {outputs} outputs" if outputs else "")
    line = f"{sides}, {size_text(result.nbytes)}, {origin.chunk_count} chunks of {origin.chunk_size} tokens, text: {texts}"
    return f"{table(headings, rows)}\n\n{line}"


def merged_covariances_text(result: MergedCovariance) -> str:
    outputs = f" and of gradients at {result.outputs} outputs" if result.outputs else ""
    return f"{result.path}: covariances of {result.inputs} inputs{outputs}, {result.chunks} chunks"


_LISTED = 6  # names in a line of text


def computed_text(result: ImatrixResult) -> str:
    """The coverage, and a line of what was written; with dry_run what it takes."""
    if result.forecast is not None:
        return _forecast_text(result)
    entries, chunks = len(result.imatrix.entries), result.imatrix.chunk_count
    end = perplexity_text(result.figures.perplexity) if result.figures is not None else "finished already"
    line = f"{result.path}: {entries} entries, {chunks} chunks, {end}"
    return f"{coverage_text(result.layers)}\n\n{line}"


def _forecast_text(result: ImatrixResult) -> str:
    forecast = result.forecast
    assert forecast is not None
    covariance, n = forecast.covariance, forecast.windows
    lines = [f"{result.path}: {forecast.entries} entries, {size_text(forecast.file_bytes)}"]
    if covariance is not None:
        passes = f"{covariance.passes} passes" if covariance.passes > 1 else "one pass"
        more = f" and of gradients at {covariance.gradients.outputs} outputs" if covariance.gradients is not None else ""
        lines.append(
            f"{result.covariance}: covariances of {covariance.inputs} inputs{more}, {size_text(covariance.file_bytes)}; "
            f"{size_text(covariance.sums_bytes)} of memory for sums, in {passes} over the text"
        )
        lines += _gradient_lines(covariance)
        lines += [covariance.seen.remark] if covariance.seen is not None and covariance.seen.too_few else []
    if forecast.experts is not None:
        experts = forecast.experts
        lines.append(
            f"experts: each of {experts.experts} in a layer sees about {experts.tokens:,.0f} tokens ({experts.used} see each "
            f"token); {experts.wanted} are wanted at the least"
        )
    if forecast.memory_bytes is not None:
        lines.append(f"memory: {size_text(forecast.memory_bytes)} beside the model's weights")
    free = f", {size_text(forecast.disk_free)} free" if forecast.disk_free is not None else ""
    lines.append(f"disk: {size_text(forecast.disk_needed)} needed{free}")
    sums = f", {duration(forecast.sum_seconds)} for the sums" if covariance is not None else ""
    lines.append(f"time: about {duration(forecast.seconds)} for running {n} windows, {forecast.tokens:,} tokens{sums}")
    return "\n".join(lines)


def _gradient_lines(covariance: CovarianceForecast) -> list[str]:
    gradients = covariance.gradients
    if gradients is None:
        return []
    passes = f"{gradients.passes} of the passes" if gradients.passes > 1 else "one of the passes"
    sums, kept, working = (size_text(n) for n in (gradients.sums_bytes, gradients.kept_bytes, gradients.working_bytes))
    return [
        f"gradients in {passes}, {gradients.windows_at_once} windows at a time: {sums} of memory for sums, {kept} for values "
        f"between layers, {working} to work with",
    ]


def coverage_text(layers: Sequence[LayerCoverage]) -> str:
    """A row per layer."""
    import numpy as np

    from ...imatrix.entries import MIN_TOKENS

    rows = [
        (
            "-" if row.layer is None else row.layer,
            row.tensors,
            ", ".join(row.without_data) or "-",
            row.experts or None,
            len(row.unseen) if row.experts else None,
            len(row.undersampled) if row.experts else None,
            int(row.tokens.min()) if row.experts else None,
            int(np.median(row.tokens)) if row.experts else None,
        )
        for row in layers
    ]
    headings = (
        "layer",
        "tensors",
        "without data",
        "experts",
        "without tokens",
        f"under {MIN_TOKENS} tokens",
        "fewest tokens",
        "median tokens",
    )
    if not any(row[3] for row in rows):
        headings, rows = headings[:3], [row[:3] for row in rows]
    return table(headings, rows)


def merged_text(result: MergedImatrix) -> str:
    return f"{result.path}: {len(result.imatrix.entries)} entries, {result.imatrix.chunk_count} chunks"


def statistics_text(result: ImatrixStatistics, file: Path) -> str:
    """A row per entry, or how the other matrix differs."""
    if result.comparison is not None and result.other is not None:
        return _comparison_text(result.comparison, file, result.other)
    rows = [
        (e.name, e.columns, e.matrices, e.fewest, e.most, f"{e.sum:.4g}", share_text(e.active), e.entropy,
         share_text(e.evenness), share_text(e.top_share), " ".join(f"{column}:{share_text(share)}" for column, share in e.top))
        for e in result.entries
    ]  # fmt: skip
    headings = ("name", "columns", "matrices", "fewest", "most", "sum", "active", "entropy", "even", "top ten", "top columns")
    parts = [table(headings, rows)]
    if result.similarity:
        ordered = sorted(result.similarity, key=lambda s: -1.0 if s.cosine is None else s.cosine)
        parts.append(table(("tensor", "layer", "cosine with the layer before"), [(s.kind, s.layer, s.cosine) for s in ordered]))
    imatrix = result.imatrix
    texts = ", ".join(imatrix.datasets) or "not recorded"
    counts = f"{len(result.entries)} entries, {imatrix.chunk_count} chunks of {imatrix.chunk_size} tokens"
    return "\n\n".join([*parts, f"{counts}, text: {texts}"])


def _comparison_text(comparison: ImatrixComparison, file: Path, other: Path) -> str:
    rows = [
        (d.name, _or_dash(d.cosine, ".6f"), _or_dash(d.ratio, ".4g"), _or_dash(d.relative, ".2e"))
        for d in comparison.differences
    ]
    parts = [table(("name", "cosine", "second / first", "relative difference"), rows)] if rows else []
    unmatched = {
        f"only in {file}": comparison.only_first,
        f"only in {other}": comparison.only_second,
        "of other widths": comparison.unlike,
    }
    parts += [f"{label}: {_listed(names)}" for label, names in unmatched.items() if names]
    cosines = [d.cosine for d in comparison.differences if d.cosine is not None]
    least = f"; cosine at least {min(cosines):.6f}, on average {sum(cosines) / len(cosines):.6f}" if cosines else ""
    return "\n\n".join([*parts, f"{len(comparison.differences)} entries in both{least}"])


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more (--json has all)" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
