"""Leaving layers out of a model: the ones behind them move up, names and metadata with them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np

from ..formats import PlanError, SourceTensor, TensorSource

_BLOCK = re.compile(r"^blk\.(\d+)\.")
_LEADING = "leading_dense_block_count"


def parse_layers(text: str) -> list[int]:
    """'3,7-9' -> [3, 7, 8, 9]. Raises PlanError for what is no list of layers."""
    layers: set[int] = set()
    for part in text.split(","):
        ends = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if ends is None or int(ends[2] or ends[1]) < int(ends[1]) or int(ends[2] or ends[1]) > 100_000:
            raise PlanError(f"{text!r} is no list of layers; write for example 20,22-25")
        layers.update(range(int(ends[1]), int(ends[2] or ends[1]) + 1))
    return sorted(layers)


def pruned(source: TensorSource, layers: Collection[int]) -> tuple[TensorSource, dict[str, str]]:
    """The source without these layers, and new name -> name in the source, of every tensor that is left.

    Keys with a value per layer lose those of the layers left out. Raises PlanError for a layer that the model does not have,
    and for all of them.
    """
    key = f"{source.architecture}.block_count"
    count = int(source.metadata.get(key, 0))
    wrong = sorted(set(layers) - set(range(count)))
    if wrong or len(set(layers)) >= count:
        what = f"layer {wrong[0]} is not there" if wrong else "no layer would be left"
        raise PlanError(f"--prune-layers: {what}; {source.path} has layers 0 to {count - 1}")
    kept = [layer for layer in range(count) if layer not in layers]
    place = {old: new for new, old in enumerate(kept)}
    names: dict[str, str] = {}
    tensors: dict[str, SourceTensor] = {}
    for name, tensor in source.tensors.items():
        block = _BLOCK.match(name)
        new = name
        if block is not None:
            if int(block[1]) not in place:
                continue
            new = f"blk.{place[int(block[1])]}.{name[block.end() :]}"
        names[new] = name
        tensors[new] = replace(tensor, name=new)
    metadata = {
        k: _without(v, count, kept) if k.startswith(f"{source.architecture}.") else v for k, v in source.metadata.items()
    }
    metadata[key] = np.uint32(len(kept))
    leading = f"{source.architecture}.{_LEADING}"
    if leading in metadata:
        metadata[leading] = np.uint32(sum(layer < int(metadata[leading]) for layer in kept))
    identity = hashlib.sha256(f"{source.identity} without {sorted(layers)}".encode()).hexdigest()
    note = f"{len(set(layers))} of {count} layers are left out; those behind them move up"
    return replace(source, tensors=tensors, metadata=metadata, identity=identity, notes=[*source.notes, note]), names


def _without(value: Any, count: int, kept: list[int]) -> Any:
    """A list with a value per layer, cut down to the layers that are kept."""
    if isinstance(value, list) and len(value) == count:
        return [value[layer] for layer in kept]
    if isinstance(value, np.ndarray) and value.shape == (count,):
        return value[kept]
    return value
