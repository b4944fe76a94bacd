"""What an imatrix knows about a model, layer by layer: tensors without data, experts with few tokens or none."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from .entries import FEW, Imatrix, has_data

_LAYER = re.compile(r"blk\.(\d+)\.(.+?)(?:\.weight)?$")


def place(name: str) -> tuple[int | None, str]:
    """(layer, kind) of a tensor: (3, 'ffn_up') for blk.3.ffn_up.weight; outside of the layers (None, 'output')."""
    match = _LAYER.match(name)
    return (int(match[1]), match[2]) if match else (None, name.removesuffix(".weight"))


@dataclass(frozen=True)
class LayerCoverage:
    """One layer (None: what lies outside of them).

    tensors, without    weight tensors, and the kinds of those that have no data
    experts             in a stack; 0 in a layer without
    none, few           numbers of the experts that saw no token, or less than FEW
    tokens              by expert, int64 [experts]: the fewest over the layer's stacks
    """

    layer: int | None
    tensors: int
    without: list[str]
    experts: int
    none: list[int]
    few: list[int]
    tokens: np.ndarray


def coverage(imatrix: Imatrix, names: Iterable[str]) -> list[LayerCoverage]:
    """For the tensors of a model that want data (all that are quantised), by layer; what lies outside comes last."""
    layers: dict[int | None, list[str]] = {}
    for name in names:
        layers.setdefault(place(name)[0], []).append(name)
    order = sorted(layers, key=lambda layer: (layer is None, layer or 0))
    return [_layer(imatrix, layer, layers[layer]) for layer in order]


def _layer(imatrix: Imatrix, layer: int | None, names: list[str]) -> LayerCoverage:
    stacks, without = [], []
    for name in names:
        entry = imatrix.entries.get(name)
        if entry is None or not has_data(*entry):
            without.append(place(name)[1])
        if entry is not None and len(entry[1]) > 1 and "_exps" in name:
            stacks.append(entry[1])
    widest = max(map(len, stacks), default=0)
    same = [counts for counts in stacks if len(counts) == widest]
    tokens = np.min(same, axis=0) if same else np.zeros(0, np.int64)
    none, few = np.flatnonzero(tokens == 0).tolist(), np.flatnonzero((tokens > 0) & (tokens < FEW)).tolist()
    return LayerCoverage(layer, len(names), without, len(tokens), none, few, tokens)


def remarks(found: list[LayerCoverage]) -> list[str]:
    """What of it people should know, and what quantisation will do; empty where all is well covered."""
    none, few = sum(len(row.none) for row in found), sum(len(row.few) for row in found)
    said = []
    if none or few:
        said.append(
            f"{none} experts saw no token and {few} fewer than {FEW}: quantisation fills them up with the mean of their "
            "tensor's other experts; a longer or more varied text helps"
        )
    bare = [row for row in found if row.experts and len(row.none) == row.experts]
    if bare:
        said.append(f"no expert of layer {', '.join(str(row.layer) for row in bare)} saw a token: their tensors have no data")
    missing: dict[str, int] = {}
    for row in found:
        for kind in row.without:
            missing[kind] = missing.get(kind, 0) + 1
    if missing:
        kinds = ", ".join(kind if n == 1 else f"{kind} ({n} layers)" for kind, n in missing.items())
        said.append(f"without data: {kinds}: quantised without importance")
    return said
