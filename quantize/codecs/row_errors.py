"""Whether encoded rows are nearer to their weights than zeros would be."""

from __future__ import annotations

import numpy as np

from ...simd.compile import kernel
from ...simd.lanes import LANES, fma_lanes, load, reduce_sum, splat

# Of the squares: rows that decode to zeros are not nearer, whatever rounding does to the sums of squares.
_NEARER = np.float32(1 - 2e-4)


@kernel
def _rows_not_nearer(x, y, amax, found):
    rows, n = x.shape
    for r in range(rows):
        inverse = np.float32(1) / amax[r] if amax[r] > 0 else np.float32(1)
        xr, yr = x[r], y[r]
        error1 = error2 = square1 = square2 = splat(0)
        for i in range(0, n, 2 * LANES):
            a, b = load(xr, i) * inverse, load(xr, i + LANES) * inverse
            c, d = load(yr, i) * inverse - a, load(yr, i + LANES) * inverse - b
            error1, error2 = fma_lanes(c, c, error1), fma_lanes(d, d, error2)
            square1, square2 = fma_lanes(a, a, square1), fma_lanes(b, b, square2)
        error, square = reduce_sum(error1 + error2), reduce_sum(square1 + square2)
        found[r] = not (error < _NEARER * square or (error == 0 and square == 0))  # NaN counts as well


def rows_not_nearer(x: np.ndarray, y: np.ndarray, amax: np.ndarray) -> np.ndarray:
    """The numbers of the rows for which |y - x| is not below |x|, to within 1e-4, or is not finite.

    x, y: float32 [rows, n], C-contiguous, n a multiple of 32; amax: float32 [rows], the largest magnitudes in x.
    """
    found = np.empty(len(x), np.bool_)
    _rows_not_nearer(x, y, amax, found)
    return np.flatnonzero(found)
