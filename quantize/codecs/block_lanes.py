"""Sixteen blocks of a float32 matrix transposed to lanes, so that a kernel works on sixteen blocks at a time.

A matrix [rows, n] is a sequence of blocks of `size` elements, counted through all rows. In an array of lanes, float32
[16 * size], element i of the sixteen blocks lies at [16 * i ... 16 * i + 15], one lane per block. Lanes beyond the last block
hold zeros; encoders compute them along with the others and drop them.
"""

from __future__ import annotations

import numpy as np

from ...simd.compile import kernel
from ...simd.cuda.work_items import WorkItems
from ...simd.lanes import LANES, fma_lanes, load, splat, sqrt_lanes, store, transpose_runs


@kernel
def transpose_blocks(x, first, size, out):
    """Blocks first ... first + 15 of the matrix x as an array of lanes `out`."""
    flat, starts = x.reshape(-1), np.empty(LANES, np.int64)
    count = min(LANES, flat.size // size - first)
    for lane in range(count):
        starts[lane] = (first + lane) * size
    _gather_runs(flat, starts, count, size, out)


@kernel
def _gather_runs(flat, starts, count, size, out):
    """The `size` elements from each of the first `count` starts on as lanes, with zeros in the other lanes."""
    if LANES > 1 and count == LANES and size % LANES == 0:  # one block is copied as it is
        for i in range(0, size, LANES):
            transpose_runs(flat, starts, i, out, LANES * i)
        return
    out[: LANES * size] = 0
    for lane in range(count):
        for i in range(size):
            out[LANES * i + lane] = flat[starts[lane] + i]


@kernel
def transpose_importance(importance, x, first, size, out):
    """The importance ([1, n] or [rows, n]) of blocks first ... first + 15 of x as an array of lanes `out`."""
    n, starts = x.shape[1], np.empty(LANES, np.int64)
    count = min(LANES, x.size // size - first)
    for lane in range(count):
        start = (first + lane) * size
        starts[lane] = (start // n) % importance.shape[0] * n + start % n
    _gather_runs(importance.reshape(-1), starts, count, size, out)


@kernel
def sum_of_squares(x, at, n):
    """Sums of squares of n elements of arrays of lanes, in element order, as lanes."""
    total = splat(0)
    for i in range(n):
        v = load(x, at + LANES * i)
        total = fma_lanes(v, v, total)
    return total


@kernel
def importance_weights(x, qw, at, n, sigma2, w):
    """w = qw * sqrt(sigma2 + x^2) for n elements of arrays of lanes: llama.cpp's weights with importance qw (quant_weights)."""
    for i in range(at, at + LANES * n, LANES):
        xi = load(x, i)
        store(w, i, load(qw, i) * sqrt_lanes(fma_lanes(xi, xi, sigma2)))


@kernel
def square_weights(x, at, n, w):
    """w = x^2 for n elements of arrays of lanes: the usual weights without importance."""
    for i in range(at, at + LANES * n, LANES):
        xi = load(x, i)
        store(w, i, xi * xi)


@kernel(items=WorkItems(("x",), ("out",), lanes=1))
def row_mean_squares(x, out):
    """Mean square of each row of x into out, float32 [rows], summed in element order, sixteen rows at a time."""
    rows, n = x.shape
    totals = np.empty(LANES, np.float32)
    tile, flat, starts = np.zeros(LANES * 32, np.float32), x.reshape(-1), np.empty(LANES, np.int64)
    for first in range(0, rows, LANES):
        count = min(LANES, rows - first)
        for lane in range(LANES):
            starts[lane] = (first + lane) * n
        total = splat(0)
        for start in range(0, n, 32):
            width = min(32, n - start)
            if LANES > 1 and count == LANES and width == 32:
                for i in range(0, width, LANES):
                    transpose_runs(flat, starts, start + i, tile, LANES * i)
            else:
                for lane in range(count):
                    for i in range(width):
                        tile[LANES * i + lane] = x[first + lane, start + i]
            for i in range(width):
                v = load(tile, LANES * i)
                total = fma_lanes(v, v, total)
        store(totals, 0, total)
        for lane in range(count):
            out[first + lane] = totals[lane] / np.float32(n)
