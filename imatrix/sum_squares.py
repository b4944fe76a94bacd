"""Kernels of collecting: squares of activations, added to sums per column."""

from __future__ import annotations

import numpy as np

from ..simd.compile import kernel
from ..simd.memory import view

TILE = 512  # columns whose sums stay in the L1 cache
LARGEST = 3.4028234e38  # of float32, which files hold


@kernel
def add_squares(address, offsets, head_step, sums, columns, width, heads):
    """sums[h, :width] += sums over rows of x^2: float64 sums [heads, columns] at an address, of which `width` are added to.

    x: float32; the columns of head h in row r are at address + offsets[r] + h * head_step (bytes). Row is added after row, as
    float64, which holds each square exactly: so sums do not depend on how rows come in calls, on how columns are divided, or
    on the processor. Returns whether all sums are numbers that float32 can hold.
    """
    rows, is_finite = len(offsets), True
    rows_by_eight = rows // 8 * 8
    for h in range(heads):
        for start in range(0, width, TILE):
            size = min(TILE, width - start)
            tile = view(sums + 8 * (h * columns + start), size, np.float64)
            first = address + h * head_step + 4 * start
            for r in range(0, rows_by_eight, 8):
                a, b = view(first + offsets[r], size, np.float32), view(first + offsets[r + 1], size, np.float32)
                c, d = view(first + offsets[r + 2], size, np.float32), view(first + offsets[r + 3], size, np.float32)
                e, f = view(first + offsets[r + 4], size, np.float32), view(first + offsets[r + 5], size, np.float32)
                g, i = view(first + offsets[r + 6], size, np.float32), view(first + offsets[r + 7], size, np.float32)
                for j in range(size):
                    total = tile[j] + np.float64(a[j]) * np.float64(a[j])
                    total += np.float64(b[j]) * np.float64(b[j])
                    total += np.float64(c[j]) * np.float64(c[j])
                    total += np.float64(d[j]) * np.float64(d[j])
                    total += np.float64(e[j]) * np.float64(e[j])
                    total += np.float64(f[j]) * np.float64(f[j])
                    total += np.float64(g[j]) * np.float64(g[j])
                    tile[j] = total + np.float64(i[j]) * np.float64(i[j])
            for r in range(rows_by_eight, rows):
                a = view(first + offsets[r], size, np.float32)
                for j in range(size):
                    tile[j] += np.float64(a[j]) * np.float64(a[j])
            for j in range(size):
                is_finite &= tile[j] <= LARGEST  # not of NaN
    return is_finite


@kernel
def add_runs(address, offsets, starts, counts, matrices, sums, columns):
    """As `add_squares` for each run k: counts[k] rows from starts[k] on are added to the sums of the matrix matrices[k]."""
    is_finite = True
    for k in range(len(starts)):
        rows = offsets[starts[k] : starts[k] + counts[k]]
        is_finite &= add_squares(address, rows, 0, sums + 8 * matrices[k] * columns, columns, columns, 1)
    return is_finite
