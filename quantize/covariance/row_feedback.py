"""Encoding rows whose errors are weighed together: error feedback from block to block of rows, then descent over all of them.

With A = L D L^T (`coupling`) the loss tr(A R H R^T) is the sum over blocks of rows B, from the last on, of the loss of B by
itself: its errors R_B plus what the rows after it, encoded already, leave it to make up for,

    T_B = L_BB^-T (sum over the rows k after B of L_kB R_k),    weighed by S = L_BB D_B L_BB^T,

S being the curvature of B when the rows before it may still move freely (block LDLQ as in QuIP#, arXiv 2402.04396, over rows).
So a block's own encoder gets W_B + T_B: it chooses scales for that, and rounds its codes with feedback and descent under S.
At last descent over all rows under A, which never raises the loss.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...simd.memory import aligned_empty
from .coupling import CoupledRows
from .matrix.panels import WIDTH, add_products, padded
from .matrix.prepared import DampedCovariance
from .refine import refine_damped, refinement_of, rows_of, taken_apart
from .values import is_scalar, value_table

_ROWS = 32  # of a block: of 16 to 64 the losses differ by 2 %, of a block of all rows by 10 to 20 %
# That is any use: three rounds of scales lose more than one on text that they have not seen (docs/curvature.md).
_MOST_EFFORT = 2
_TERNARY = 3  # values of a code: so coarse that what is fed back from row to row grows


def encode_coupled(
    x: np.ndarray,
    encode_rows: Callable[[np.ndarray], np.ndarray],
    type_name: str,
    damped: DampedCovariance,
    effort: int,
    coupled: CoupledRows,
) -> np.ndarray:
    """Rows float32 [rows, n] of a small loss tr(A R H R^T), R = x - decoded: uint8 [rows, row_bytes].

    encode_rows  the type's own encoder: float32 [any number of rows, n] -> uint8 [rows, row_bytes]
    coupled      of these rows; effort: 0 leaves out the feedback, 3 does what 2 does

    The bytes depend on nothing but the arguments.
    """
    effort = min(effort, _MOST_EFFORT)
    if not effort:
        q = encode_rows(x)
    elif is_scalar(type_name) and value_table(type_name).values.shape[1] <= _TERNARY:
        q = refine_damped(x, encode_rows(x), type_name, damped, effort)
    else:
        q = _with_feedback(x, encode_rows, type_name, damped, effort, coupled)
    refinement = refinement_of(x, q, type_name, damped, max(1, effort), coupled)
    before, out = refinement.errors(), q.copy()
    refinement.choose_codes()
    refinement.rows.write(out)
    return out if (refinement.errors() < before).all() else q


def _with_feedback(
    x: np.ndarray,
    encode_rows: Callable[[np.ndarray], np.ndarray],
    type_name: str,
    damped: DampedCovariance,
    effort: int,
    coupled: CoupledRows,
) -> np.ndarray:
    rows, n = x.shape
    errors, parts = _Errors(rows, n), list[np.ndarray]()
    for stop in range(rows, 0, -_ROWS):
        block = slice(max(0, stop - _ROWS), stop)
        target = x[block] + _solve_transposed(coupled.feedback.shares[block, block], errors.mixed(coupled, block))
        q = encode_rows(target)
        q = rows_of(refinement_of(target, q, type_name, damped, effort, _conditional(coupled, block)), q)
        errors.set(block, x[block] - taken_apart(q, type_name).values())
        parts.append(q)
    return np.concatenate(parts[::-1])


class _Errors:
    """What rows lose, in panels of 64 columns, and its sums over the rows after a block."""

    def __init__(self, rows: int, n: int):
        self._rows, self._n, self._height, self._size = rows, n, padded(rows), padded(n)
        self._panels = aligned_empty((self._size // WIDTH, self._height, WIDTH), np.float32)
        self._panels.fill(0)

    def set(self, block: slice, errors: np.ndarray) -> None:
        """errors: float32 [rows of the block, n]."""
        full = np.zeros((len(errors), self._size), np.float32)
        full[:, : self._n] = errors
        self._panels[:, block] = full.reshape(len(errors), -1, WIDTH).transpose(1, 0, 2)

    def mixed(self, coupled: CoupledRows, block: slice) -> np.ndarray:
        """The sum over the rows k after the block of L_kB R_k: float32 [rows of the block, n]."""
        shares, count = coupled.feedback.shares, block.stop - block.start
        out = np.zeros(count * self._size, np.float32)
        for first in range(block.stop // WIDTH * WIDTH, self._rows, WIDTH):
            after = range(max(first, block.stop), min(first + WIDTH, self._rows))
            columns, factors = np.empty((count, WIDTH), np.int32), np.empty((count, WIDTH), np.float32)
            columns[:, : len(after)] = np.arange(after.start - first, after.stop - first)
            factors[:, : len(after)] = shares[after.start : after.stop, block].T
            counts = np.full(count, len(after), np.int32)
            add_products(
                columns.reshape(-1), factors.reshape(-1), counts, self._panels.reshape(-1), self._height, first, 0,
                self._size // WIDTH, count, self._size, out,
            )  # fmt: skip
        return out.reshape(count, -1)[:, : self._n]


def _solve_transposed(lower: np.ndarray, y: np.ndarray) -> np.ndarray:
    """L^-T y for a lower triangle with ones on its diagonal; row by row, so that every processor rounds alike."""
    out = y.copy()
    for i in range(len(lower) - 2, -1, -1):
        for k in range(i + 1, len(lower)):
            out[i] -= lower[k, i] * out[k]
    return out


def _conditional(coupled: CoupledRows, block: slice) -> CoupledRows:
    """What couples the rows of a block when the rows before it may still move: S, whose factor is that of A."""
    lower = np.ascontiguousarray(coupled.feedback.shares[block, block])
    matrix = np.zeros(lower.shape)
    for k, pivot in enumerate(coupled.pivots[block].astype(np.float64)):
        column = lower[:, k].astype(np.float64)
        matrix += pivot * column * column[:, None]
    return CoupledRows.of(matrix.astype(np.float32), lower, coupled.pivots[block])
