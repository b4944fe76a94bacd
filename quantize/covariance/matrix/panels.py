"""Symmetric and triangular matrices in panels of 64 columns, and the product of sparse rows with them.

A panel matrix of n rows is float32 [panels, n, 64] with n a multiple of 64: entry (i, k) is at [k // 64, i, k % 64]. What
one step of the product reads, 64 x 64, is 16 KiB in one piece, whatever n.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ....simd.compile import kernel
from ....simd.cuda.work_items import WorkItems
from ....simd.lanes import fma_lanes, load, splat, store
from ....simd.memory import aligned_empty
from ....simd.workers import Workers

WIDTH = 64


def padded(n: int) -> int:
    """The next multiple of the panels' width."""
    return -(-n // WIDTH) * WIDTH


def in_panels(matrix: np.ndarray) -> np.ndarray:
    """float32 [n, n] -> its panels, padded with zeros."""
    n, size = len(matrix), padded(len(matrix))
    panels = aligned_empty((size // WIDTH, size, WIDTH), np.float32)
    for panel, first in zip(panels, range(0, size, WIDTH), strict=True):
        width = min(WIDTH, n - first)
        panel[:n, :width] = matrix[:, first : first + width]
        panel[n:], panel[:, width:] = 0, 0
    return panels


def run_in_parts(workers: Workers, count: int, run: Callable[[int, int], object]) -> None:
    """Calls run(first, stop) for parts of range(count), which threads take one after the other."""
    step = -(-count // (4 * workers.count))
    workers.map(lambda first: run(first, min(first + step, count)), range(0, count, step))


def from_panels(panels: np.ndarray, size: int) -> np.ndarray:
    """float32, flat: panels of `size` rows -> float32 [size, size]."""
    return np.ascontiguousarray(panels.reshape(size // WIDTH, size, WIDTH).transpose(1, 0, 2)).reshape(size, size)


@kernel
def add_products(columns, factors, counts, panels, height, first, panel_from, panel_to, rows, size, g):
    """Adds sparse rows times rows first ... first + 63 of a panel matrix to the rows of g, panels panel_from ... panel_to - 1.

    columns, factors  [rows * 64]: entry i of a row is factors[64 * row + i] in column first + columns[64 * row + i]
    counts            [rows]: how many entries each row has
    panels, height    float32 [panels * height * 64], flat: panels of `height` rows; g: float32 [rows * size], flat

    Every element of g adds up its products in the order of the entries, in fused multiply-adds.
    """
    for panel in range(panel_from, panel_to):
        tile = (panel * height + first) * 64
        for row in range(rows):
            count = counts[row]
            if count == 0:
                continue
            at = row * size + panel * 64
            g0, g1, g2, g3 = load(g, at), load(g, at + 16), load(g, at + 32), load(g, at + 48)
            for i in range(row * 64, row * 64 + count):
                h = tile + columns[i] * 64
                factor = splat(factors[i])
                g0 = fma_lanes(factor, load(panels, h), g0)
                g1 = fma_lanes(factor, load(panels, h + 16), g1)
                g2 = fma_lanes(factor, load(panels, h + 32), g2)
                g3 = fma_lanes(factor, load(panels, h + 48), g3)
            store(g, at, g0)
            store(g, at + 16, g1)
            store(g, at + 32, g2)
            store(g, at + 48, g3)


@kernel(items=WorkItems(("g",), ("g",), shared_rows=("factors",), row_numbers=("tiles",)))
def add_tile_products(factors, tiles, g):
    """Adds rows times tiles of a panel matrix, as `add_products` does, where rows and tiles lie in blocks of 64 columns.

    factors: float32 [1, rows * 64]; tiles: float32 [panels, 64 * 64]; g: float32 [panels * rows / 2, 2 * 64], two rows at a
    time: what a GPU loads of a tile serves both
    """
    pairs = g.shape[0] // tiles.shape[0]
    flat, to = factors.reshape(-1), g.reshape(-1)
    for panel in range(tiles.shape[0]):
        tile = tiles[panel]
        for pair in range(pairs):
            at, row = (panel * pairs + pair) * 128, pair * 128
            a0, a1, a2, a3 = load(to, at), load(to, at + 16), load(to, at + 32), load(to, at + 48)
            b0, b1, b2, b3 = load(to, at + 64), load(to, at + 80), load(to, at + 96), load(to, at + 112)
            for i in range(64):
                if flat[row + i] != 0 or flat[row + 64 + i] != 0:
                    a, b = splat(flat[row + i]), splat(flat[row + 64 + i])
                    h0, h1 = load(tile, i * 64), load(tile, i * 64 + 16)
                    h2, h3 = load(tile, i * 64 + 32), load(tile, i * 64 + 48)
                    a0, a1, a2, a3 = fma_lanes(a, h0, a0), fma_lanes(a, h1, a1), fma_lanes(a, h2, a2), fma_lanes(a, h3, a3)
                    b0, b1, b2, b3 = fma_lanes(b, h0, b0), fma_lanes(b, h1, b1), fma_lanes(b, h2, b2), fma_lanes(b, h3, b3)
            store(to, at, a0)
            store(to, at + 16, a1)
            store(to, at + 32, a2)
            store(to, at + 48, a3)
            store(to, at + 64, b0)
            store(to, at + 80, b1)
            store(to, at + 96, b2)
            store(to, at + 112, b3)


@kernel
def multiply_rows(x, panels, size, g):
    """Adds x (float32 [rows, n]) times a panel matrix of `size` rows to g (float32 [rows * size], flat)."""
    rows = x.shape[0]
    columns, factors, counts = np.empty(rows * 64, np.int32), np.empty(rows * 64, np.float32), np.empty(rows, np.int32)
    for first in range(0, x.shape[1], 64):
        gather_nonzero(x, first, columns, factors, counts)
        add_products(columns, factors, counts, panels, size, first, 0, size // 64, rows, size, g)


@kernel
def gather_nonzero(x, first, columns, factors, counts):
    """The entries of columns first ... first + 63 of x that are not zero, as `add_products` takes them."""
    for row in range(x.shape[0]):
        count = 0
        for i in range(min(64, x.shape[1] - first)):
            value = x[row, first + i]
            if value != 0:
                columns[row * 64 + count] = i
                factors[row * 64 + count] = value
                count += 1
        counts[row] = count
