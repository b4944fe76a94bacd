"""Covariances as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...pipeline.common.messages import gib
from .console import table

if TYPE_CHECKING:
    from ...pipeline.covariance import CovarianceStatistics, MergedCovariance


def covariances_text(result: CovarianceStatistics) -> str:
    """A row per input."""
    rows = [
        (one.name, len(one.tensors), one.columns, one.matrices, one.fewest, one.most, f"{one.effective_rank:.1f}",
         f"{one.diagonal_share:.1%}", f"{one.correlation:.3f}", f"{one.damping:.2%}", one.too_few or "-")
        for one in result.inputs
    ]  # fmt: skip
    headings = (
        "input",
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
    line = f"{len(rows)} inputs, {gib(result.nbytes)}, {origin.chunk_count} chunks of {origin.chunk_size} tokens, text: {texts}"
    return f"{table(headings, rows)}\n\n{line}"


def merged_covariances_text(result: MergedCovariance) -> str:
    return f"{result.path}: covariances of {result.inputs} inputs, {result.chunks} chunks"
