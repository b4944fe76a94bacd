"""The inner loop of collecting: squares of activations, summed per column."""

from __future__ import annotations

import numpy as np

from ..formats.kernels import kernel

TILE = 512  # columns whose sums stay in the first-level cache


@kernel
def add_squares(x, weight, sums, low, high):
    """sums[low:high] += weight * (sum over the rows of x^2): float32 x [rows, n], float64 sums [n], an integer weight.

    Sums run in float64 and row by row, whatever the machine and the run of columns. Returns whether all sums are finite.
    """
    part, finite = np.empty(TILE, np.float64), True
    for start in range(low, high, TILE):
        size = min(TILE, high - start)
        part[:size] = 0.0
        for r in range(x.shape[0]):
            row = x[r, start : start + size]
            for j in range(size):
                value = np.float64(row[j])
                part[j] += value * value
        for j in range(size):
            total = sums[start + j] + weight * part[j]
            sums[start + j] = total
            finite = finite and np.isfinite(total)
    return finite
