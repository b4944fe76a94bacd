"""Covariances as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...pipeline.common.figures import share_text, size_text
from .console import table

if TYPE_CHECKING:
    from ...pipeline.covariance import CovarianceStatistics, MergedCovariance


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
