"""Walsh-Hadamard transforms of runs of numbers, of powers of two each: the rotation of rows of the cache (cache_layout.py).

In natural order (Sylvester's) and divided by the square root of their size they are symmetric and orthogonal: a second one
undoes the first. Each number is a sum in the order of the fast transform, whatever the instruction set.
"""

from __future__ import annotations

import numpy as np

from .....simd.compile import kernel
from .....simd.lanes import LANES, hadamard_lanes, load, store
from .....simd.memory import view
from .task_kernel import CONSTANT, HEADS, INT, cell, head_of, reads, task_kernel, writes


@kernel
def _transform(x, out, start, size, scale):
    """out = the transform of x[start] ... x[start + size - 1], times scale; size: a power of two. out may be x."""
    step = 1
    if size < LANES:
        for i in range(start, start + size):
            out[i] = x[i] * scale
        while step < size:
            for first in range(start, start + size, 2 * step):
                for i in range(first, first + step):
                    a, b = out[i], out[i + step]
                    out[i], out[i + step] = a + b, a - b
            step *= 2
        return
    step = LANES
    if size >= 4 * LANES:  # four steps within lanes and two between them, in registers
        step = 4 * LANES
        for i in range(start, start + size, 4 * LANES):
            a, b = hadamard_lanes(load(x, i) * scale), hadamard_lanes(load(x, i + LANES) * scale)
            c, d = hadamard_lanes(load(x, i + 2 * LANES) * scale), hadamard_lanes(load(x, i + 3 * LANES) * scale)
            a, b, c, d = a + b, a - b, c + d, c - d
            store(out, i, a + c)
            store(out, i + LANES, b + d)
            store(out, i + 2 * LANES, a - c)
            store(out, i + 3 * LANES, b - d)
    else:
        for i in range(start, start + size, LANES):
            store(out, i, hadamard_lanes(load(x, i) * scale))
    while step < size:
        for first in range(start, start + size, 2 * step):
            for i in range(first, first + step, LANES):
                a, b = load(out, i), load(out, i + step)
                store(out, i, a + b)
                store(out, i + step, a - b)
        step *= 2


@kernel
def _scales(blocks):
    """float32, of each run: 1 / sqrt(its size)."""
    scales = np.empty(blocks.size, np.float32)
    for block in range(blocks.size):
        scales[block] = np.float32(1) / np.sqrt(np.float32(blocks[block]))
    return scales


@kernel
def _transform_row(x, out, blocks, scales):
    """out = a float32 row with the transforms of its runs, whose sizes are `blocks`; what it has behind them, or as part of a
    run, is not written. out may be x."""
    start = 0
    for block in range(blocks.size):
        if start + blocks[block] > x.size:
            return
        _transform(x, out, start, blocks[block], scales[block])
        start += blocks[block]


@kernel
def transform_rows(rows, blocks):
    """Transforms runs of every row of a C-contiguous float32 matrix in place, whose sizes are `blocks`, or as many of the first
    ones as rows have; what rows have behind them stays."""
    scales = _scales(blocks)
    for r in range(rows.shape[0]):
        _transform_row(rows[r], rows[r], blocks, scales)


@task_kernel(x=reads(HEADS), out=writes(HEADS), blocks=CONSTANT, count=INT)
def transform(task, number):
    """Transforms runs of every head of x, as `transform_rows` does. blocks: int64 [count]; out may be x."""
    first, stop, _, _ = cell(task, number)
    width, blocks = task.x.width, view(task.blocks, task.count, np.int64)
    scales = _scales(blocks)
    for r in range(first, stop):
        for h in range(task.x.heads):
            _transform_row(head_of(task.x, r, h, 0, width), head_of(task.out, r, h, 0, width), blocks, scales)
