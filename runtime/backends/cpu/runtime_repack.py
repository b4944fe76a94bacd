"""Runtime repacking (-rtr): weights are interleaved in memory when a model is loaded, as `repack` does it to a file."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from ....formats import TYPES, SourceTensor, TensorSource, TensorType
from ....quantize import decode
from ....quantize.tensor_scale import scaled_tensor
from ....repack import pack
from ....simd.workers import Workers

_SKIPPED = ("token_embd.weight",)  # read a row at a time


def repack_source(source: TensorSource, workers: Workers, only: Collection[str] | None = None) -> tuple[TensorSource, int]:
    """A source -> (the source with matrices in the interleaved form of their type, the bytes of memory that these take).

    A tensor is repacked if its type has an interleaved form and its rows are a multiple of the rows that this interleaves;
    all others stay in the file. only: names of those that may be; None: all.
    """
    tensors = [tensor for tensor in source.tensors.values() if only is None or tensor.name in only]
    matrices = [tensor for tensor in tensors if _interleaved_type(tensor) is not None]
    repacked = {tensor.name: tensor for tensor in workers.map(_repack, matrices)}
    nbytes = sum(_type_of(tensor).nbytes(tensor.shape) for tensor in repacked.values())
    return replace(source, tensors={**source.tensors, **repacked}), nbytes


def _type_of(tensor: SourceTensor) -> TensorType:
    assert tensor.stored is not None
    return tensor.stored


def _interleaved_type(tensor: SourceTensor) -> TensorType | None:
    stored = tensor.stored
    if tensor.raw is None or stored is None or stored.packed is None or len(tensor.shape) < 2 or tensor.name in _SKIPPED:
        return None
    packed_type = TYPES[stored.packed]
    return packed_type if tensor.shape[1] % packed_type.rows == 0 else None


def _repack(tensor: SourceTensor) -> SourceTensor:
    n, rows = tensor.shape[0], tensor.shape[1]
    assert tensor.raw is not None
    packed_type = TYPES[str(_type_of(tensor).packed)]
    out = np.empty((tensor.n_rows, packed_type.row_bytes(n)), np.uint8)
    for first in range(0, tensor.n_rows, rows):  # matrix by matrix: a stack of experts is large
        out[first : first + rows] = pack(np.ascontiguousarray(tensor.raw(first, first + rows)), packed_type.name, n)[0]
    return _in_memory(tensor, out, packed_type)


def _in_memory(tensor: SourceTensor, packed: np.ndarray, packed_type: TensorType) -> SourceTensor:
    """The tensor with its rows read from `packed`, uint8 [rows of all matrices, row bytes]."""

    def raw(start: int, stop: int) -> np.ndarray:
        return packed[start:stop]

    def read(start: int, stop: int) -> np.ndarray:
        rows = packed_type.rows  # per decoded group
        low, high = start // rows * rows, -(-stop // rows) * rows
        return decode(packed[low:high], packed_type.name, tensor.shape[0])[start - low : stop - low]

    packed_tensor = replace(tensor, source_type=packed_type.name, read=read, raw=raw, stored=packed_type, mapped=packed)
    return scaled_tensor(packed_tensor, tensor.scale)
