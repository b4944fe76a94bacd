"""Sixteen blocks of a float32 matrix brought side by side as lanes, and the weights of their errors.

A matrix [rows, n] is taken as one run of blocks of `size` elements, counted through all rows. What lies beyond the last
block is zeros: encoders work them out with the rest and drop them.
"""

from __future__ import annotations

import numpy as np

from ...simd.compile import kernel
from ...simd.lanes import LANES, fma_lanes, load, splat, sqrt_lanes, store


@kernel
def take_blocks(x, first, size, out):
    """Blocks first ... first + 15 of the matrix x as an array of lanes [LANES * size]."""
    flat = x.reshape(-1)
    count = min(LANES, flat.size // size - first)
    if count < LANES:
        out[: LANES * size] = 0
    for lane in range(count):
        start = (first + lane) * size
        for i in range(size):
            out[LANES * i + lane] = flat[start + i]


@kernel
def take_importance(importance, x, first, size, out):
    """The importance ([1, n] or [rows, n]) of blocks first ... first + 15 of x as an array of lanes."""
    n = x.shape[1]
    count = min(LANES, x.size // size - first)
    if count < LANES:
        out[: LANES * size] = 0
    for lane in range(count):
        start = (first + lane) * size
        v = importance[(start // n) % importance.shape[0]]
        column = start % n
        for i in range(size):
            out[LANES * i + lane] = v[column + i]


@kernel
def sum_of_squares(x, at, n):
    """Sums of the squares of n elements, in order, as lanes."""
    total = splat(0)
    for i in range(n):
        v = load(x, at + LANES * i)
        total = fma_lanes(v, v, total)
    return total


@kernel
def weigh_lanes(x, v, at, n, sigma2, w):
    """w = v * sqrt(sigma2 + x^2) for n elements (spec D.0)."""
    for i in range(at, at + LANES * n, LANES):
        xi = load(x, i)
        store(w, i, load(v, i) * sqrt_lanes(fma_lanes(xi, xi, sigma2)))


@kernel
def weigh_by_square(x, at, n, w):
    """w = x^2 for n elements: the usual weight where there is no importance."""
    for i in range(at, at + LANES * n, LANES):
        xi = load(x, i)
        store(w, i, xi * xi)


@kernel
def row_mean_squares(x, out):
    """Mean of the squares of each row of x, float32 [rows], summed in order; sixteen rows at a time to hide the latency."""
    rows, n = x.shape
    totals = np.empty(LANES, np.float32)
    part = np.zeros(LANES * 32, np.float32)
    for first in range(0, rows, LANES):
        count = min(LANES, rows - first)
        total = splat(0)
        for start in range(0, n, 32):
            width = min(32, n - start)
            for lane in range(count):
                for i in range(width):
                    part[LANES * i + lane] = x[first + lane, start + i]
            for i in range(width):
                v = load(part, LANES * i)
                total = fma_lanes(v, v, total)
        store(totals, 0, total)
        for lane in range(count):
            out[first + lane] = totals[lane] / np.float32(n)
