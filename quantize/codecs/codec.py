"""`Codec`, the encoder and decoder of one tensor type, and what those of several families share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import numpy as np

from ...formats import MillError


class ItemEncoder(NamedTuple):
    """How a GPU encodes rows of a type.

    encode   as `Codec.encode`, with the same bytes, of rows that need no care, and with importance [n] or None. Only kernels
             with work items (`simd.cuda.work_items`) touch x and the result: both may stand for memory elsewhere
    guarded  elements of the blocks whose importance `guard_importance` looks at; 0: it is not called
    scaled   elements of the runs that `normalise_rows` scales by powers of two, and its exponents; None: it is not called
    """

    encode: Callable[[np.ndarray, np.ndarray | None], np.ndarray]
    guarded: int = 0
    scaled: tuple[int, tuple[int, int]] | None = None


@dataclass(frozen=True)
class Codec:
    """The encoder and decoder of one tensor type.

    encode         (x float32 [rows, n], importance) -> uint8 [rows, row_bytes]. importance: None, float32 [n] for all rows or
                   [rows, n]. x has at least one row and, unless `row_amax` is given, only finite values.
    decode         (q uint8 [rows, row_bytes], n) -> float32 [rows, n]
    row_amax       (q, n) -> float32 [rows], about the largest magnitude of each row: of a codec whose `encode` itself raises
                   NonFiniteError for NaN and infinity, so that x need not be scanned before
    rounds         every weight becomes the nearest of values among which 0 is: no row within the range of the type's scales is
                   farther from its weights than zeros are
    items          how a GPU encodes; None: not at all
    rounds_without_importance  the same where there is no importance, of values with a float16 scale and minimum

    All arrays are C-contiguous. A repacked type needs no codec: `pack` makes it from its base type. An interleaved type without
    a base (q8_k_r8), or whose repacking would take longer than encoding (q8_KV_r8), has a codec that is given whole groups of
    rows.
    """

    encode: Callable[[np.ndarray, np.ndarray | None], np.ndarray]
    decode: Callable[[np.ndarray, int], np.ndarray]
    row_amax: Callable[[np.ndarray, int], np.ndarray] | None = None
    rounds: bool = False
    rounds_without_importance: bool = False
    items: ItemEncoder | None = None


class NonFiniteError(MillError):
    """A weight is NaN or infinite. row, column: its place in the array that was to be encoded; value: the weight."""

    def __init__(self, row: int, column: int, value: float):
        super().__init__(f"the weight at row {row}, column {column} is {value}")
        self.row, self.column, self.value = row, column, value


def raise_nonfinite(x: np.ndarray) -> NoReturn:
    """Raises NonFiniteError for the first NaN or infinite value of [rows, columns]; there must be one."""
    row, column = map(int, np.argwhere(~np.isfinite(x))[0])
    raise NonFiniteError(row, column, float(x[row, column]))
