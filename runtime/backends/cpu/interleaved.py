"""Weights interleaved in memory when a model is loaded: what `repack` does to a file, without writing one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ....formats import TYPES, SourceTensor, TensorSource, TensorType
from ....quantize import decode
from ....repack import pack
from ....simd.workers import Workers

_AS_THEY_ARE = ("token_embd.weight",)  # read a row at a time


def repacked(source: TensorSource, workers: Workers) -> tuple[TensorSource, int]:
    """The source with every matrix in the interleaved twin of its type, if that has one and whole groups of rows; and how many
    bytes of memory those take. All other tensors are read where they lie."""
    wanted = [tensor for tensor in source.tensors.values() if _twin(tensor) is not None]
    changed = {tensor.name: tensor for tensor in workers.map(_packed, wanted)}
    nbytes = sum(_type_of(tensor).nbytes(tensor.shape) for tensor in changed.values())
    return replace(source, tensors=source.tensors | changed), nbytes


def _type_of(tensor: SourceTensor) -> TensorType:
    assert tensor.stored is not None
    return tensor.stored


def _twin(tensor: SourceTensor) -> TensorType | None:
    kind = tensor.stored
    if tensor.raw is None or kind is None or kind.packed is None or len(tensor.shape) < 2 or tensor.name in _AS_THEY_ARE:
        return None
    twin = TYPES[kind.packed]
    return twin if tensor.shape[1] % twin.rows == 0 else None


def _packed(tensor: SourceTensor) -> SourceTensor:
    n, rows = tensor.shape[0], tensor.shape[1]
    assert tensor.raw is not None
    kind = _type_of(tensor)
    twin = TYPES[str(kind.packed)]
    out = np.empty((tensor.n_rows, twin.row_bytes(n)), np.uint8)
    for first in range(0, tensor.n_rows, rows):  # matrix by matrix: a stack of experts is large
        out[first : first + rows] = pack(np.ascontiguousarray(tensor.raw(first, first + rows)), twin.name, n)[0]
    return _in_memory(tensor, out, twin)


def _in_memory(tensor: SourceTensor, bytes_: np.ndarray, kind: TensorType) -> SourceTensor:
    def raw(start: int, stop: int) -> np.ndarray:
        return bytes_[start:stop]

    def read(start: int, stop: int) -> np.ndarray:
        low, high = start // kind.rows * kind.rows, -(-stop // kind.rows) * kind.rows  # whole groups
        return decode(bytes_[low:high], kind.name, tensor.shape[0])[start - low : stop - low]

    return replace(tensor, source_type=kind.name, read=read, raw=raw, stored=kind, mapped=bytes_)
