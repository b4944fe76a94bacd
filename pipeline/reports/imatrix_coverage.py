"""What an imatrix covers of a model, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...formats import TensorSource
from ...imatrix import Imatrix
from ...imatrix.coverage import LayerCoverage, coverage, remarks
from ...quantize.recipes.type_selection import is_quantizable


def covered_layers(imatrix: Imatrix, source: TensorSource) -> list[LayerCoverage]:
    """The coverage of each layer's weight tensors, those outside of the layers too."""
    return coverage(imatrix, [tensor.name for tensor in source.tensors.values() if is_quantizable(tensor)])


def coverage_json(imatrix: Imatrix, layers: Sequence[LayerCoverage]) -> dict[str, Any]:
    """starved_experts and sparse_experts by tensor, coverage by layer, and remarks."""
    return {
        "starved_experts": imatrix.unseen_experts(),
        "sparse_experts": imatrix.undersampled_experts(),
        "coverage": [
            {
                "layer": row.layer,
                "tensors": row.tensors,
                "without": row.without_data,
                "experts": row.experts,
                "none": row.unseen,
                "few": row.undersampled,
                "tokens": row.tokens.tolist(),
            }
            for row in layers
        ],
        "remarks": remarks(list(layers)),
    }
