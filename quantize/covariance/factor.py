"""The factors of H = U D U^T that error feedback needs, by our own kernels: the same bits on every processor."""

from __future__ import annotations

import numpy as np

from ...simd.compile import kernel
from ...simd.memory import aligned_empty
from .panels import WIDTH, add_products, padded


@kernel
def _factor_block(work, first, count, lowest, pivots):
    """Eliminates `count` columns of `work` (float32 [size, size]) from the last on, within these columns, rows above included.

    Column j of work becomes column j of U (its diagonal 1), pivots[j] = D_jj, no less than `lowest`.
    """
    column = np.empty(count, np.float32)
    for j in range(first + count - 1, first - 1, -1):
        pivot = max(work[j, j], lowest)
        pivots[j] = pivot
        inverse = np.float32(1) / pivot
        before = j - first
        for k in range(before):
            column[k] = work[first + k, j]
        for i in range(j):
            u = work[i, j] * inverse
            work[i, j] = u
            for k in range(max(0, i - first), before):
                work[i, first + k] -= u * column[k]
        work[j, j] = 1


@kernel
def _block_transposed(work, first, size, tile_panels):
    """tile_panels (float32 [panels * 64 * 64], flat): U[k, first + i] at panel k // 64, row i, column k % 64, for k < first."""
    for k in range(first):
        for i in range(64):
            tile_panels[(k // 64 * 64 + i) * 64 + k % 64] = work[k, first + i]


@kernel
def _update_above(work, flat, first, size, pivots, tile_panels):
    """work[:first, :first] -= U_block D_block U_block^T, for the panels on and right of the diagonal."""
    columns, factors, counts = np.empty(64 * 64, np.int32), np.empty(64 * 64, np.float32), np.full(64, 64, np.int32)
    for row in range(0, first, 64):
        for i in range(64):
            for j in range(64):
                columns[i * 64 + j] = j
                factors[i * 64 + j] = -(work[row + i, first + j] * pivots[first + j])
        add_products(columns, factors, counts, tile_panels, 64, 0, row // 64, first // 64, 64, size, flat[row * size :])


def factor(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32 [n, n], symmetric and positive definite -> U in panels (flat), upper triangular with a diagonal of ones, and the
    diagonal of D, float32 [size]."""
    n, size = len(matrix), padded(len(matrix))
    work = aligned_empty((size, size), np.float32)
    work[:n, :n], work[n:], work[:n, n:] = matrix, 0, 0
    np.fill_diagonal(work[n:, n:], 1)
    pivots, lowest = np.empty(size, np.float32), np.float32(1e-6 * max(float(np.diagonal(matrix).mean()), 1e-30))
    tile_panels = aligned_empty((size * WIDTH,), np.float32)
    for first in range(size - WIDTH, -1, -WIDTH):
        _factor_block(work, first, WIDTH, lowest, pivots)
        if first:
            _block_transposed(work, first, size, tile_panels)
            _update_above(work, work.reshape(-1), first, size, pivots, tile_panels)
    panels = aligned_empty((size // WIDTH, size, WIDTH), np.float32)
    for panel, first in zip(panels, range(0, size, WIDTH), strict=True):
        panel[:] = np.triu(work[:, first : first + WIDTH], -first)
    return panels.reshape(-1), pivots


@kernel
def multiply_blocks(triangle, pivots, size, width, out):
    """out (float32, flat, panels of `size` rows, zeros before) = U times the blocks D_SS U_SS^T of `width` columns each.

    Its entry (i, k) is the sum over j of U_ij D_jj U_kj, j of the block that k is in: see `prepared.FeedbackMatrix`.
    """
    for first in range(0, size, width):
        panel, column = first // 64 * size, first % 64
        for i in range(first + width):
            for k in range(width):
                total = np.float32(0)
                for j in range(k, width):
                    u = triangle[(panel + i) * 64 + column + j]
                    total += u * pivots[first + j] * triangle[(panel + first + k) * 64 + column + j]
                out[(panel + i) * 64 + column + k] = total
