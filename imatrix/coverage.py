"""What an importance matrix covers of a model, by layer: tensors without data, experts with too few tokens or none."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..data_classes import dataclass
from ..formats import TensorSource
from ..quantize.recipes.type_selection import is_quantizable
from .entries import MIN_TOKENS, Imatrix, has_data

_LAYER = re.compile(r"blk\.(\d+)\.(.+?)(?:\.weight)?$")


def layer_and_role(name: str) -> tuple[int | None, str]:
    """The layer and role of a tensor: (3, 'ffn_up') for blk.3.ffn_up.weight, (None, 'output') for output.weight."""
    match = _LAYER.match(name)
    return (int(match[1]), match[2]) if match else (None, name.removesuffix(".weight"))


# Roles whose data are collected only if that is asked for, by these options of `imatrix`.
COLLECTED_ON_REQUEST = {"token_embd": "--process-embedding", "output": "--process-output"}


@dataclass(frozen=True)
class LayerCoverage:
    """The coverage of one layer, or of the tensors outside of all layers (layer is None).

    tensors       number of weight tensors; without_data: roles of those that have no data
    experts       per stack; 0 in a layer without experts
    unseen        numbers of the experts that saw no token
    undersampled  numbers of the experts that saw at least one token, but fewer than MIN_TOKENS
    tokens        int64 [experts]: seen by each expert, the minimum over the layer's stacks
    """

    layer: int | None
    tensors: int
    without_data: list[str]
    experts: int
    unseen: list[int]
    undersampled: list[int]
    tokens: np.ndarray


def coverage(imatrix: Imatrix, names: Iterable[str]) -> list[LayerCoverage]:
    """The coverage of the named tensors (those that will be quantised) by layer; tensors outside of layers come last."""
    layers: dict[int | None, list[str]] = {}
    for name in names:
        layers.setdefault(layer_and_role(name)[0], []).append(name)
    order = sorted(layers, key=lambda layer: (layer is None, layer or 0))
    return [_layer_coverage(imatrix, layer, layers[layer]) for layer in order]


def covered_layers(imatrix: Imatrix, source: TensorSource) -> list[LayerCoverage]:
    """The coverage of each layer's weight tensors, those outside of the layers too."""
    return coverage(imatrix, [tensor.name for tensor in source.tensors.values() if is_quantizable(tensor)])


def _layer_coverage(imatrix: Imatrix, layer: int | None, names: list[str]) -> LayerCoverage:
    stack_counts, without_data = [], []
    for name in names:
        entry = imatrix.entries.get(name)
        if entry is None or not has_data(*entry):
            without_data.append(layer_and_role(name)[1])
        if entry is not None and len(entry[1]) > 1 and "_exps" in name:
            stack_counts.append(entry[1])
    experts = max(map(len, stack_counts), default=0)
    of_largest = [counts for counts in stack_counts if len(counts) == experts]
    tokens = np.min(of_largest, axis=0) if of_largest else np.zeros(0, np.int64)
    unseen = np.flatnonzero(tokens == 0).tolist()
    undersampled = np.flatnonzero((tokens > 0) & (tokens < MIN_TOKENS)).tolist()
    return LayerCoverage(layer, len(names), without_data, len(tokens), unseen, undersampled, tokens)


def remarks(layers: Sequence[LayerCoverage]) -> list[str]:
    """What the user should know about the coverage and what quantisation does about it; empty if everything is covered."""
    unseen, undersampled = sum(len(row.unseen) for row in layers), sum(len(row.undersampled) for row in layers)
    lines = []
    if unseen or undersampled:
        lines.append(
            f"{unseen} experts saw no token and {undersampled} fewer than {MIN_TOKENS}: quantisation fills them up with the "
            "mean of their tensor's other experts; a longer or more varied text helps"
        )
    unseen_layers = [row for row in layers if row.experts and len(row.unseen) == row.experts]
    if unseen_layers:
        lines.append(
            f"no expert of layer {', '.join(str(row.layer) for row in unseen_layers)} saw a token: their tensors have no data"
        )
    missing = {role: n for role, n in _missing(layers).items() if role not in COLLECTED_ON_REQUEST}
    if missing:
        roles = ", ".join(role if n == 1 else f"{role} ({n} layers)" for role, n in missing.items())
        lines.append(f"without data: {roles}: quantised without importance")
    return lines


def usual_gaps(layers: Sequence[LayerCoverage]) -> str:
    """A note about the tensors that have data only on request, and have none; '' if there are none."""
    options = [f"{COLLECTED_ON_REQUEST[role]} for {role}" for role in _missing(layers) if role in COLLECTED_ON_REQUEST]
    return f"embeddings and output matrix are usually without data; to collect it: {', '.join(options)}" if options else ""


def _missing(layers: Sequence[LayerCoverage]) -> dict[str, int]:
    """Role of tensors without data -> in how many layers."""
    return dict(Counter(role for row in layers for role in row.without_data))


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
        "remarks": remarks(layers),
    }
