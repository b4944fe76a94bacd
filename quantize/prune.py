"""Removing layers from a model (--prune-layers): the layers after them are renumbered, names and metadata along with them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np

from ..formats import PlanError, SourceTensor, TensorSource
from ..formats.metadata_values import MAX_LAYERS, whole_number
from ..formats.string_array import StringArray
from ..jobs.shards import parse_ranges

_LAYER_PREFIX = re.compile(r"^blk\.(\d+)\.")
_DENSE_LAYERS_KEY = "leading_dense_block_count"
_DRAFT_LAYERS_KEY = "nextn_predict_layers"


def parse_layers(text: str) -> list[int]:
    """'3,7-9' -> [3, 7, 8, 9]. Raises PlanError for any other syntax."""
    return parse_ranges(text, "layers", "20,22-25")


def drop_layers(source: TensorSource, layers: Collection[int]) -> tuple[TensorSource, dict[str, str]]:
    """The source without these layers, and for each remaining tensor: new name -> name in the given source.

    Metadata arrays with one value per layer lose the values of the dropped layers. Raises PlanError for a layer that the model
    does not have, and if no layer would remain.
    """
    count_key = f"{source.architecture}.block_count"
    count = whole_number(source.metadata, count_key, maximum=MAX_LAYERS, path=source.path)
    missing = sorted(set(layers) - set(range(count)))
    if missing or len(set(layers)) >= count:
        problem = f"there is no layer {missing[0]}" if missing else "no layer would be left"
        raise PlanError(f"--prune-layers: {problem}; {source.path} has layers 0 to {count - 1}")
    remaining = [layer for layer in range(count) if layer not in layers]
    new_index = {old: new for new, old in enumerate(remaining)}
    old_names: dict[str, str] = {}
    tensors: dict[str, SourceTensor] = {}
    for name, tensor in source.tensors.items():
        prefix = _LAYER_PREFIX.match(name)
        new_name = name
        if prefix is not None:
            if int(prefix[1]) not in new_index:
                continue
            new_name = f"blk.{new_index[int(prefix[1])]}.{name[prefix.end() :]}"
        old_names[new_name] = name
        tensors[new_name] = replace(tensor, name=new_name)
    metadata = {
        key: _remaining_values(value, count, remaining) if key.startswith(f"{source.architecture}.") else value
        for key, value in source.metadata.items()
    }
    metadata[count_key] = np.uint32(len(remaining))
    dense_key = f"{source.architecture}.{_DENSE_LAYERS_KEY}"
    if dense_key in metadata:
        dense = whole_number(metadata, dense_key, path=source.path)
        metadata[dense_key] = np.uint32(sum(layer < dense for layer in remaining))
    draft_key = f"{source.architecture}.{_DRAFT_LAYERS_KEY}"
    if draft_key in metadata:
        draft = whole_number(metadata, draft_key, path=source.path)
        metadata[draft_key] = np.uint32(sum(layer >= count - draft for layer in remaining))
    identity = hashlib.sha256(f"{source.identity} without {sorted(layers)}".encode()).hexdigest()
    note = f"{len(set(layers))} of {count} layers are left out; those after them move up"
    return replace(source, tensors=tensors, metadata=metadata, identity=identity, notes=[*source.notes, note]), old_names


def draft_layers(source: TensorSource) -> range:
    """The numbers of the layers at a model's end that predict further tokens (multi-token prediction). Raises FormatError if
    the metadata has no numbers of layers."""
    keys = (f"{source.architecture}.{key}" for key in ("block_count", _DRAFT_LAYERS_KEY))
    count, draft = (whole_number(source.metadata, key, maximum=MAX_LAYERS, path=source.path) for key in keys)
    return range(count - draft, count) if 0 < draft < count else range(0)


def draft_layer_prefixes(source: TensorSource) -> tuple[str, ...]:
    """The prefix of the names of tensors in `draft_layers`: 'blk.61.'."""
    return tuple(f"blk.{layer}." for layer in draft_layers(source))


def drop_draft_layers(source: TensorSource) -> TensorSource:
    """The source without its draft layers, if it has any."""
    layers = draft_layers(source)
    return drop_layers(source, layers)[0] if layers else source


def _remaining_values(value: Any, count: int, remaining: list[int]) -> Any:
    """A metadata value with one entry per layer, cut to the remaining layers; any other value unchanged."""
    if isinstance(value, list | StringArray) and len(value) == count:
        return [value[layer] for layer in remaining]
    if isinstance(value, np.ndarray) and value.shape == (count,):
        return value[remaining]
    return value
