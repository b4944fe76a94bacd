"""Rows times the inverse of a factored covariance, by our own kernels: the same bits on every processor."""

from __future__ import annotations

import numpy as np

from ....simd.compile import kernel
from ....simd.lanes import fma_lanes, load, splat, store
from .panels import add_products
from .prepared import DampedCovariance


def solve_rows(y: np.ndarray, damped: DampedCovariance) -> None:
    """y (float32 [rows * size], flat, zeros beyond the columns) becomes y H^-1.

    Takes columns^2 multiplications a row. A row's result does not depend on the others.
    """
    _solve(damped.triangle, damped.pivots, damped.size, len(y) // damped.size, y)


@kernel
def _solve(triangle, pivots, size, rows, y):
    """With H = U D U^T: y = v U^T from the last block of 64 columns on, then v D^-1 = t U from the first one on."""
    columns, factors, counts = np.empty(rows * 64, np.int32), np.empty(rows * 64, np.float32), np.empty(rows, np.int32)
    tile = np.empty(4096, np.float32)
    for row in range(rows):
        counts[row] = 64
        for i in range(64):
            columns[row * 64 + i] = i
    for first in range(size - 64, -1, -64):
        for panel in range(first // 64 + 1, size // 64):
            at = (panel * size + first) * 64
            for i in range(64):
                for j in range(64):
                    tile[i * 64 + j] = triangle[at + j * 64 + i]
            _negated(y, size, panel * 64, rows, factors)
            add_products(columns, factors, counts, tile, 64, 0, 0, 1, rows, size, y[first:])
        at = (first // 64 * size + first) * 64
        for i in range(64):
            for j in range(64):
                tile[i * 64 + j] = triangle[at + j * 64 + i] if j < i else np.float32(0)
        for row in range(rows):
            for i in range(63, -1, -1):
                _take(y, row * size + first, i, tile)
    for row in range(rows):
        for i in range(size):
            y[row * size + i] /= pivots[i]
    for first in range(0, size, 64):
        at = (first // 64 * size + first) * 64
        for i in range(64):
            for j in range(64):
                tile[i * 64 + j] = triangle[at + i * 64 + j] if j > i else np.float32(0)
        for row in range(rows):
            for i in range(64):
                _take(y, row * size + first, i, tile)
        _negated(y, size, first, rows, factors)
        add_products(columns, factors, counts, triangle, size, first, first // 64 + 1, size // 64, rows, size, y)


@kernel
def _take(y, at, i, tile):
    """Element i of 64 from `at` on is final: the others lose what it accounts for in theirs."""
    known = splat(-y[at + i])
    for k in range(0, 64, 16):
        store(y, at + k, fma_lanes(known, load(tile, i * 64 + k), load(y, at + k)))


@kernel
def _negated(y, size, first, rows, factors):
    """The columns first ... first + 63 of all rows, times -1, as `add_products` takes them."""
    for row in range(rows):
        for i in range(64):
            factors[row * 64 + i] = -y[row * size + first + i]
