"""What an imatrix covers of a model, as text and as JSON."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...formats import TensorSource
from ...imatrix import Imatrix
from ...imatrix.coverage import LayerCoverage, coverage, remarks
from ...imatrix.entries import FEW
from ...quantize.recipes.type_selection import is_quantizable
from ..console import table


def covered_layers(imatrix: Imatrix, source: TensorSource) -> list[LayerCoverage]:
    return coverage(imatrix, [tensor.name for tensor in source.tensors.values() if is_quantizable(tensor)])


def coverage_text(imatrix: Imatrix, source: TensorSource) -> str:
    """A row per layer."""
    rows = [
        (
            "-" if row.layer is None else row.layer,
            row.tensors,
            ", ".join(row.without) or "-",
            row.experts or None,
            len(row.none) if row.experts else None,
            len(row.few) if row.experts else None,
            int(row.tokens.min()) if row.experts else None,
            int(np.median(row.tokens)) if row.experts else None,
        )
        for row in covered_layers(imatrix, source)
    ]
    headings = ("layer", "tensors", "without data", "experts", "no token", f"under {FEW}", "fewest", "median")
    if not any(row[3] for row in rows):
        headings, rows = headings[:3], [row[:3] for row in rows]
    return table(headings, rows)


def coverage_json(imatrix: Imatrix, source: TensorSource) -> dict[str, Any]:
    found = covered_layers(imatrix, source)
    return {
        "starved_experts": imatrix.starved(),
        "sparse_experts": imatrix.sparse(),
        "coverage": [
            {
                "layer": row.layer,
                "tensors": row.tensors,
                "without": row.without,
                "experts": row.experts,
                "none": row.none,
                "few": row.few,
                "tokens": row.tokens.tolist(),
            }
            for row in found
        ],
        "remarks": remarks(found),
    }
