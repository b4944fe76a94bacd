"""How a source tensor's rows become bytes of the target type: copy, repack, or decode and encode."""

from __future__ import annotations

import numpy as np

from ..formats import MillError, SourceTensor, TensorType, dims
from ..formats.floats import all_finite
from ..repack.rows import Produce, moved_rows
from .codecs.registry import NonFiniteError, encode


def producer(
    tensor: SourceTensor, target: TensorType, importance: np.ndarray | None, replaced: list[tuple[str, int]] | None = None
) -> Produce:
    """(start, stop) -> uint8 [stop - start, row_bytes] of the target type.

    The cheapest way that changes no bit is taken: a copy when the source holds the type already, a permutation between a type
    and its repacked twin, bf16 at once where the source can give it. importance: float32 [matrices, columns] or None.
    replaced: takes (tensor name, how many) of weights that are NaN or infinite and were encoded as 0; None: such a weight
    raises MillError, naming tensor, row and column.
    """
    moved = None
    if tensor.stored is not None and tensor.raw is not None:
        moved = moved_rows(tensor.raw, tensor.stored, target, tensor.shape[0])
        if moved is not None and not target.is_float:
            return moved
    if target.name == "bf16" and tensor.narrow is not None:
        moved = tensor.narrow
    _, rows, matrices = dims(tensor.shape)

    def produce(start: int, stop: int) -> np.ndarray:
        if moved is not None:
            copied = moved(start, stop)
            if all_finite(copied, target.name):
                return copied
        weights = importance[start // rows] if importance is not None else None
        x = tensor.read(start, stop)
        try:
            return encode(x, target.name, weights)
        except NonFiniteError as error:
            if replaced is not None:
                broken = ~np.isfinite(x)
                replaced.append((tensor.name, int(broken.sum())))  # a list: chunks come from several threads
                return encode(np.where(broken, np.float32(0), x), target.name, weights)
            matrix, row = divmod(start + error.row, rows)
            where = f"row {row}, column {error.column}" + (f" of matrix {matrix}" if matrices > 1 else "")
            raise MillError(
                f"{tensor.name}: the weight at {where} is {error.value}: a damaged source (--allow-nonfinite writes 0 instead)"
            ) from None

    return produce
