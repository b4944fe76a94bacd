"""Importance as the kernels take it, and the guard for blocks whose importance or weights are negligible.

Kernels take importance (llama.cpp's quant_weights) as float32 of one row [1, n], valid for all rows, or of a row for each
[rows, n] (after the guard), and read `importance[r % importance.shape[0]]`. Without importance they are given NO_IMPORTANCE,
which has no rows. These arrays are read-only: writable ones would have every encoder compiled a second time.

See docs/formats/encoders.md (common pieces); sums run in element order with fused multiply-add, as there.
"""

from __future__ import annotations

import numpy as np

from ...simd.compile import kernel
from ...simd.scalar import fma

NO_IMPORTANCE = np.empty((0, 0), np.float32)
NO_IMPORTANCE.flags.writeable = False

# At most this mean square (of importance, weights, or their product): the block has no usable importance.
MIN_MEAN_SQUARE = 1e-18
_MIN_IMPORTANCE = np.float32(1e-9)


def importance_rows(importance: np.ndarray | None) -> np.ndarray:
    """float32 [n], [rows, n] or None -> float32 [1, n], [rows, n] or NO_IMPORTANCE: C-contiguous, read-only."""
    if importance is None:
        return NO_IMPORTANCE
    rows = np.ascontiguousarray(np.atleast_2d(importance), np.float32).view()
    rows.flags.writeable = False
    return rows


def guard_importance(x: np.ndarray, importance: np.ndarray | None, block: int) -> np.ndarray:
    """Importance that gives every block of every row some weight, for the encoders that ask for it.

    x: float32 [rows, n]; importance: float32 [n], [rows, n] or None; block: elements per block, 16 or 32, dividing n. Where the
    sum of qw^2, of x^2 or of qw * |x| over a block is negligible, all its qw become 1e-9. Returns [1, n] when no block needed
    it, else [rows, n]; NO_IMPORTANCE for None. See docs/formats/encoders.md (imatrix sanitising).
    """
    qw = importance_rows(importance)
    if qw is NO_IMPORTANCE or not _has_negligible(x, qw, block):
        return qw
    out = np.empty_like(x)
    _replace_negligible(x, qw, block, out)
    return importance_rows(out)


@kernel
def _is_negligible(x, qw, start, block):
    """Whether the sum of qw^2, of x^2 or of qw * |x| of a block is at most block * 1e-18."""
    limit = np.float32(block * MIN_MEAN_SQUARE)
    sum_ww = sum_xx = sum_wx = np.float32(0)
    for j in range(start, start + block):
        sum_ww = fma(qw[j], qw[j], sum_ww)
        sum_xx = fma(x[j], x[j], sum_xx)
        sum_wx = fma(qw[j], abs(x[j]), sum_wx)
        if sum_ww > limit and sum_xx > limit and sum_wx > limit:  # all terms are >= 0: the sums only grow
            return False
    return True


@kernel
def _has_negligible(x, importance, block):
    rows, n = x.shape
    for r in range(rows):
        qw = importance[r % importance.shape[0]]
        for start in range(0, n, block):
            if _is_negligible(x[r], qw, start, block):
                return True
    return False


@kernel
def _replace_negligible(x, importance, block, out):
    rows, n = x.shape
    for r in range(rows):
        qw = importance[r % importance.shape[0]]
        for start in range(0, n, block):
            negligible = _is_negligible(x[r], qw, start, block)
            for j in range(start, start + block):
                out[r, j] = _MIN_IMPORTANCE if negligible else qw[j]
