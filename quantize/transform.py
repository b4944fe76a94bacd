"""How a source tensor's rows become bytes of the target type: copy, repack, or decode and encode."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..formats import MillError, SourceTensor, TensorType, dims
from ..repack import pack, unpack
from .codec import NonFiniteError, encode

Produce = Callable[[int, int], np.ndarray]


def producer(tensor: SourceTensor, target: TensorType, importance: np.ndarray | None) -> Produce:
    """(start, stop) -> uint8 [stop - start, row_bytes] of the target type.

    importance: float32 [matrices, columns] or None. The cheapest way that changes no bit is taken: a copy when the source holds
    the type already, a permutation between a type and its repacked twin. Raises MillError, naming the tensor, for a weight that
    is NaN or infinite.
    """
    stored, raw, n = tensor.stored, tensor.raw, tensor.shape[0]
    if stored is not None and raw is not None:
        if stored is target:
            return raw
        if target.base == stored.name:
            return lambda start, stop: pack(raw(start, stop), stored.name, n)[0]
        if stored.base == target.name:
            return _unpacker(raw, stored, n)
    _, rows, matrices = dims(tensor.shape)

    def produce(start: int, stop: int) -> np.ndarray:
        weights = importance[start // rows] if importance is not None else None
        try:
            return encode(tensor.read(start, stop), target.name, weights)
        except NonFiniteError as error:
            matrix, row = divmod(start + error.row, rows)
            where = f"row {row}, column {error.column}" + (f" of matrix {matrix}" if matrices > 1 else "")
            raise MillError(f"{tensor.name}: the weight at {where} is {error.value}; the source is damaged") from None

    return produce


def _unpacker(raw: Produce, stored: TensorType, n: int) -> Produce:
    group = stored.rows

    def produce(start: int, stop: int) -> np.ndarray:
        low, high = start // group * group, -(-stop // group) * group
        return unpack(raw(low, high), stored.name, n)[0][start - low : stop - low]

    return produce
