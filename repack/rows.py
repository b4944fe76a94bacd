"""Rows of one type as rows of another where only bits have to move."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..formats import TensorType
from .interleave import pack, unpack

Produce = Callable[[int, int], np.ndarray]


def moved_rows(raw: Produce, stored: TensorType, target: TensorType, n: int) -> Produce | None:
    """(start, stop) -> uint8 [stop - start, row_bytes] of `target`, from `raw` which gives the same of `stored`.

    n: row length. A copy between equal types, a permutation between a type and its interleaved twin; None when neither holds
    and the rows have to be decoded and encoded.
    """
    if stored is target:
        return raw
    if target.base == stored.name:
        return lambda start, stop: pack(raw(start, stop), target.name, n)[0]
    if stored.base != target.name:
        return None

    def undo(start: int, stop: int) -> np.ndarray:
        # The rows asked for need not be whole groups of the source: widen the run, then cut it.
        low, high = start // stored.rows * stored.rows, -(-stop // stored.rows) * stored.rows
        return unpack(raw(low, high), stored.name, n)[0][start - low : stop - low]

    return undo
