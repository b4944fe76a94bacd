"""Laying out safetensors files that are to be written: headers, offsets, and the index of several.

Only the layout is made here; `safetensors` (the module) says what a file looks like.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import prod

from ..data_classes import dataclass
from ..errors import PlanError
from .safetensors import DTYPES, MAX_HEADER

INDEX = "model.safetensors.index.json"
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I64": 8}  # of what is written


@dataclass(frozen=True)
class ShardTensor:
    """A tensor to write: dtype, a key of DTYPES; shape, outermost dimension first."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * _ITEM_BYTES[self.dtype]

    @property
    def words(self) -> str:
        """numpy's dtype of the stored words."""
        return DTYPES[self.dtype][0]


@dataclass(frozen=True)
class ShardLayout:
    """A file. header: its first bytes; offsets: of each tensor from the start of the file; size: in bytes."""

    name: str
    header: bytes
    tensors: tuple[ShardTensor, ...]
    offsets: tuple[int, ...]
    size: int


def lay_out(tensors: Sequence[ShardTensor], max_bytes: int) -> list[ShardLayout]:
    """Files of at most max_bytes of data each, but of one tensor at least, named as transformers names them.

    Raises PlanError for a header that readers would refuse."""
    groups: list[list[ShardTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if groups[-1] and filled + tensor.nbytes > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.nbytes
    names = [f"model-{n:05d}-of-{len(groups):05d}.safetensors" for n in range(1, len(groups) + 1)]
    names = ["model.safetensors"] if len(groups) == 1 else names
    return [_layout(name, group) for name, group in zip(names, groups, strict=True)]


def index_json(files: Sequence[ShardLayout]) -> str:
    """The index of several files."""
    weight_map = {tensor.name: file.name for file in files for tensor in file.tensors}
    total = sum(tensor.nbytes for file in files for tensor in file.tensors)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}, indent=2)


def _layout(name: str, tensors: list[ShardTensor]) -> ShardLayout:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins, at = [], 0
    for tensor in tensors:
        begins.append(at)
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise PlanError(f"{name}: a header of {len(text)} bytes, more than readers take; a smaller --max-shard-size splits it")
    start = 8 + len(text)
    header = len(text).to_bytes(8, "little") + text
    return ShardLayout(name, header, tuple(tensors), tuple(start + begin for begin in begins), start + at)
