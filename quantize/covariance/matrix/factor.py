"""The factors of H = U D U^T that error feedback needs, by our own kernels: the same bits on every processor.

Blocks of 64 columns are eliminated from the last on. Every element has one order of sums, so that threads change nothing.
"""

from __future__ import annotations

import numpy as np

from ....simd.compile import kernel
from ....simd.lanes import fma_lanes, load, splat, store
from ....simd.memory import aligned_empty, sparse_zeros
from ....simd.target import target
from ....simd.workers import ALONE, Workers
from .panels import WIDTH, in_panels, padded, run_in_parts

_ROWS = 512  # that a thread takes at a time


def factor(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32 [n, n], symmetric and positive definite -> U in panels (flat), upper triangular with a diagonal of ones, and the
    diagonal of D, float32 [size]."""
    return factor_panels(in_panels(matrix).reshape(-1), len(matrix))


def factor_panels(
    panels: np.ndarray, n: int, order: np.ndarray | None = None, workers: Workers = ALONE
) -> tuple[np.ndarray, np.ndarray]:
    """As `factor`, of H in panels (float32, flat), the columns of each panel in this order (int64 [64]; None: as they are).

    Takes n^3 / 6 multiplications. Below the diagonal U takes no memory, so that it takes half of H's.
    """
    size, places = padded(n), np.arange(WIDTH) if order is None else order
    triangle = sparse_zeros(size * size)
    diagonal = np.empty(size, np.float32)
    run_in_parts(workers, size // WIDTH, lambda first, stop: _copy_upper(panels, size, places, first, stop, triangle, diagonal))
    for i in range(n, size):
        triangle[(i // WIDTH * size + i) * WIDTH + i % WIDTH] = 1
    pivots, lowest = np.empty(size, np.float32), np.float32(1e-6 * max(float(diagonal[:n].mean()), 1e-30))
    columns, inverses = np.empty((WIDTH, WIDTH), np.float32), np.empty(WIDTH, np.float32)
    update = _update_fours if target().lane_registers == 32 else _update_rows
    factors, tiles = aligned_empty((size * WIDTH,), np.float32), aligned_empty((size * WIDTH,), np.float32)
    for first in range(size - WIDTH, -1, -WIDTH):
        _eliminate_block(triangle, size, first, lowest, pivots, columns, inverses)
        step = (triangle, size, first, pivots, columns, inverses, factors, tiles)
        runs = [(at, min(at + _ROWS, first)) for at in range(0, first, _ROWS)]
        workers.map(lambda run, step=step: _eliminate_rows(*step, *run), runs, first * WIDTH * WIDTH)
        rest = [(panel, panel + 1) for panel in range(first // WIDTH - 1, -1, -1)]  # the longest first
        workers.map(lambda run: update(triangle, size, factors, tiles, *run), rest, first * first // 2 * WIDTH)
    return triangle, pivots


@kernel
def _copy_upper(panels, size, order, first, stop, triangle, diagonal):
    """The upper triangles of the panels first ... stop - 1, and their diagonals, rows and columns of a panel in this order."""
    for panel in range(first, stop):
        for row in range(64 * (panel + 1)):
            to, at = (panel * size + row) * 64, (panel * size + row // 64 * 64 + order[row % 64]) * 64
            for k in range(max(row - 64 * panel, 0), 64):
                triangle[to + k] = panels[at + order[k]]
        for k in range(64):
            diagonal[64 * panel + k] = triangle[(panel * size + 64 * panel + k) * 64 + k]


@kernel
def _eliminate_block(triangle, size, first, lowest, pivots, columns, inverses):
    """Eliminates the 64 columns from `first` on within their own rows, from the last on.

    Column j becomes that of U (its diagonal 1), pivots[j] = D_jj, no less than `lowest`; columns[j]: what it was before,
    inverses[j]: 1 / D_jj, for the rows above.
    """
    base = first * size + first * 64
    for j in range(63, -1, -1):
        pivot = max(triangle[base + j * 64 + j], lowest)
        pivots[first + j] = pivot
        inverse = np.float32(1) / pivot
        inverses[j] = inverse
        for k in range(j):
            columns[j, k] = triangle[base + k * 64 + j]
        for i in range(j):
            u = triangle[base + i * 64 + j] * inverse
            triangle[base + i * 64 + j] = u
            for k in range(i, j):
                triangle[base + i * 64 + k] -= u * columns[j, k]
        triangle[base + j * 64 + j] = 1


@kernel
def _eliminate_rows(triangle, size, first, pivots, columns, inverses, factors, tiles, start, stop):
    """The same in the rows start ... stop - 1 above. factors[64 * row + i]: -U D of column i; tiles: U transposed, U of row k
    and column i being at panel k // 64, row i, column k % 64."""
    for row in range(start, stop):
        at = first * size + row * 64
        for j in range(63, -1, -1):
            u = triangle[at + j] * inverses[j]
            triangle[at + j] = u
            for k in range(j):
                triangle[at + k] -= u * columns[j, k]
        for i in range(64):
            factors[row * 64 + i] = -(triangle[at + i] * pivots[first + i])
            tiles[(row // 64 * 64 + i) * 64 + row % 64] = triangle[at + i]


@kernel
def _store_row(row, at, v0, v1, v2, v3):
    store(row, at, v0)
    store(row, at + 16, v1)
    store(row, at + 32, v2)
    store(row, at + 48, v3)


@kernel
def _update_fours(triangle, size, factors, tiles, first, stop):
    """Adds factors times tiles to the panels first ... stop - 1, on and above the diagonal; four rows at a time."""
    for panel in range(first, stop):
        tile = panel * 4096
        for row in range(0, 64 * (panel + 1), 4):
            at, f = (panel * size + row) * 64, row * 64
            a0, a1, a2, a3 = load(triangle, at), load(triangle, at + 16), load(triangle, at + 32), load(triangle, at + 48)
            b0, b1, b2, b3 = load(triangle, at + 64), load(triangle, at + 80), load(triangle, at + 96), load(triangle, at + 112)
            c0, c1, c2, c3 = (
                load(triangle, at + 128),
                load(triangle, at + 144),
                load(triangle, at + 160),
                load(triangle, at + 176),
            )
            d0, d1, d2, d3 = (
                load(triangle, at + 192),
                load(triangle, at + 208),
                load(triangle, at + 224),
                load(triangle, at + 240),
            )
            for i in range(64):
                t = tile + i * 64
                t0, t1, t2, t3 = load(tiles, t), load(tiles, t + 16), load(tiles, t + 32), load(tiles, t + 48)
                s = splat(factors[f + i])
                a0, a1, a2, a3 = fma_lanes(s, t0, a0), fma_lanes(s, t1, a1), fma_lanes(s, t2, a2), fma_lanes(s, t3, a3)
                s = splat(factors[f + 64 + i])
                b0, b1, b2, b3 = fma_lanes(s, t0, b0), fma_lanes(s, t1, b1), fma_lanes(s, t2, b2), fma_lanes(s, t3, b3)
                s = splat(factors[f + 128 + i])
                c0, c1, c2, c3 = fma_lanes(s, t0, c0), fma_lanes(s, t1, c1), fma_lanes(s, t2, c2), fma_lanes(s, t3, c3)
                s = splat(factors[f + 192 + i])
                d0, d1, d2, d3 = fma_lanes(s, t0, d0), fma_lanes(s, t1, d1), fma_lanes(s, t2, d2), fma_lanes(s, t3, d3)
            _store_row(triangle, at, a0, a1, a2, a3)
            _store_row(triangle, at + 64, b0, b1, b2, b3)
            _store_row(triangle, at + 128, c0, c1, c2, c3)
            _store_row(triangle, at + 192, d0, d1, d2, d3)
        _clear_below(triangle, size, panel)


@kernel
def _update_rows(triangle, size, factors, tiles, first, stop):
    """As `_update_fours`, for processors with fewer registers: sixteen columns of four rows at a time."""
    for panel in range(first, stop):
        for row in range(0, 64 * (panel + 1), 4):
            f = row * 64
            for column in range(0, 64, 16):
                at, tile = (panel * size + row) * 64 + column, panel * 4096 + column
                a, b = load(triangle, at), load(triangle, at + 64)
                c, d = load(triangle, at + 128), load(triangle, at + 192)
                for i in range(64):
                    t = load(tiles, tile + i * 64)
                    a, b = fma_lanes(splat(factors[f + i]), t, a), fma_lanes(splat(factors[f + 64 + i]), t, b)
                    c, d = fma_lanes(splat(factors[f + 128 + i]), t, c), fma_lanes(splat(factors[f + 192 + i]), t, d)
                store(triangle, at, a)
                store(triangle, at + 64, b)
                store(triangle, at + 128, c)
                store(triangle, at + 192, d)
        _clear_below(triangle, size, panel)


@kernel
def _clear_below(triangle, size, panel):
    """Zeros below the diagonal of a panel, where updates of whole rows have written."""
    for i in range(64):
        for k in range(i):
            triangle[(panel * size + 64 * panel + i) * 64 + k] = 0


@kernel
def multiply_blocks(triangle, pivots, size, width, start, stop, out):
    """out (float32, flat, panels of `size` rows, zeros before) = U times the blocks D_SS U_SS^T of `width` columns each, of the
    columns start ... stop - 1.

    Its entry (i, k) is the sum over j of U_ij D_jj U_kj, j of the block that k is in: see `prepared.FeedbackMatrix`.
    """
    for first in range(start, stop, width):
        panel, column = first // 64 * size, first % 64
        for i in range(first + width):
            for k in range(width):
                total = np.float32(0)
                for j in range(k, width):
                    u = triangle[(panel + i) * 64 + column + j]
                    total += u * pivots[first + j] * triangle[(panel + first + k) * 64 + column + j]
                out[(panel + i) * 64 + column + k] = total
