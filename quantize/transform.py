"""How a source tensor's rows become bytes of the target type: copy, repack, or decode and encode."""

from __future__ import annotations

import numpy as np

from ..formats import MillError, SourceTensor, TensorType, dims
from ..repack.rows import Produce, moved_rows
from .codec import NonFiniteError, encode


def producer(tensor: SourceTensor, target: TensorType, importance: np.ndarray | None) -> Produce:
    """(start, stop) -> uint8 [stop - start, row_bytes] of the target type.

    importance: float32 [matrices, columns] or None. The cheapest way that changes no bit is taken: a copy when the source holds
    the type already, a permutation between a type and its repacked twin. Raises MillError, naming the tensor, for a weight that
    is NaN or infinite.
    """
    if tensor.stored is not None and tensor.raw is not None:
        moved = moved_rows(tensor.raw, tensor.stored, target, tensor.shape[0])
        if moved is not None:
            return moved
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
