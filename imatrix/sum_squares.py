"""Kernels of collecting: squares of activations, summed per column."""

from __future__ import annotations

import numpy as np

from ..simd.compile import kernel
from ..simd.memory import view

TILE = 512  # columns whose sums stay in the L1 cache


@kernel
def sum_squares(address, offsets, head_step, sums):
    """sums[h, :] = sums over rows of x^2: float64 sums [heads, columns].

    x: float32; the columns of head h in row r are at address + offsets[r] + h * head_step (bytes). Eight squares are added as
    float32, these sums as float64, in an order that does not depend on the processor or on how columns are divided.
    """
    (heads, columns), rows = sums.shape, len(offsets)
    rows_by_eight = rows // 8 * 8
    for h in range(heads):
        for start in range(0, columns, TILE):
            size = min(TILE, columns - start)
            tile = sums[h, start : start + size]
            tile[:] = 0.0
            first = address + h * head_step + 4 * start
            for r in range(0, rows_by_eight, 8):
                a, b = view(first + offsets[r], size, np.float32), view(first + offsets[r + 1], size, np.float32)
                c, d = view(first + offsets[r + 2], size, np.float32), view(first + offsets[r + 3], size, np.float32)
                e, f = view(first + offsets[r + 4], size, np.float32), view(first + offsets[r + 5], size, np.float32)
                g, i = view(first + offsets[r + 6], size, np.float32), view(first + offsets[r + 7], size, np.float32)
                for j in range(size):
                    first_four = (a[j] * a[j] + b[j] * b[j]) + (c[j] * c[j] + d[j] * d[j])
                    last_four = (e[j] * e[j] + f[j] * f[j]) + (g[j] * g[j] + i[j] * i[j])
                    tile[j] += np.float64(first_four + last_four)
            for r in range(rows_by_eight, rows):
                a = view(first + offsets[r], size, np.float32)
                for j in range(size):
                    tile[j] += np.float64(a[j] * a[j])


@kernel
def sum_runs(address, offsets, starts, counts, sums):
    """sums[k, :] = `sum_squares` of counts[k] rows from starts[k] on, for each run k: float64 sums [runs, columns]."""
    for k in range(len(starts)):
        sum_squares(address, offsets[starts[k] : starts[k] + counts[k]], 0, sums[k : k + 1])
