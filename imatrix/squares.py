"""The inner loop of collecting: squares of activations, summed per column."""

from __future__ import annotations

import numpy as np

from ..formats.kernels import kernel
from ..runtime.kernels.team import view

TILE = 512  # columns whose sums stay in the first-level cache


@kernel
def sum_squares(address, row_step, rows, head_step, sums):
    """sums[h, :] = sums over `rows` rows of x^2: float64 sums [heads, columns].

    x: float32, head h's columns of row r at address + r * row_step + h * head_step (bytes). Eight squares are added as float32,
    then as float64, in one order whatever the machine and the run of columns.
    """
    heads, columns = sums.shape
    eights = rows // 8 * 8
    for h in range(heads):
        for start in range(0, columns, TILE):
            size = min(TILE, columns - start)
            part = sums[h, start : start + size]
            part[:] = 0.0
            first = address + h * head_step + 4 * start
            for r in range(0, eights, 8):
                at = first + r * row_step
                a, b = view(at, size, np.float32), view(at + row_step, size, np.float32)
                c, d = view(at + 2 * row_step, size, np.float32), view(at + 3 * row_step, size, np.float32)
                e, f = view(at + 4 * row_step, size, np.float32), view(at + 5 * row_step, size, np.float32)
                g, i = view(at + 6 * row_step, size, np.float32), view(at + 7 * row_step, size, np.float32)
                for j in range(size):
                    four = (a[j] * a[j] + b[j] * b[j]) + (c[j] * c[j] + d[j] * d[j])
                    more = (e[j] * e[j] + f[j] * f[j]) + (g[j] * g[j] + i[j] * i[j])
                    part[j] += np.float64(four + more)
            for r in range(eights, rows):
                a = view(first + r * row_step, size, np.float32)
                for j in range(size):
                    part[j] += np.float64(a[j] * a[j])
