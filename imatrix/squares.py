"""The inner loop of collecting: squares of activations, summed per column."""

from __future__ import annotations

import numpy as np

from ..formats.kernels import kernel

TILE = 512  # columns whose sums stay in the first-level cache


@kernel
def sum_squares(x, sums, low, high):
    """sums[low:high] = sums over the rows of x^2: float32 x [rows, n], float64 sums [n].

    In float64, four rows at a time, in one order whatever the machine and the run of columns.
    """
    rows = x.shape[0]
    fours = rows // 4 * 4
    for start in range(low, high, TILE):
        part = sums[start : min(start + TILE, high)]
        size = part.size
        part[:] = 0.0
        for r in range(0, fours, 4):
            a, b = x[r, start : start + size], x[r + 1, start : start + size]
            c, d = x[r + 2, start : start + size], x[r + 3, start : start + size]
            for j in range(size):
                v, w, y, z = np.float64(a[j]), np.float64(b[j]), np.float64(c[j]), np.float64(d[j])
                part[j] += (v * v + w * w) + (y * y + z * z)
        for r in range(fours, rows):
            a = x[r, start : start + size]
            for j in range(size):
                v = np.float64(a[j])
                part[j] += v * v
