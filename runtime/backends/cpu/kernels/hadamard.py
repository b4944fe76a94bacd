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
def _transform(row, start, size):
    """In place, of row[start] ... row[start + size - 1]; size: a power of two."""
    step, scale = 1, np.float32(1) / np.sqrt(np.float32(size))
    if size >= LANES:
        for i in range(start, start + size, LANES):
            store(row, i, hadamard_lanes(load(row, i)) * scale)
        step = LANES
        while step < size:
            for first in range(start, start + size, 2 * step):
                for i in range(first, first + step, LANES):
                    a, b = load(row, i), load(row, i + step)
                    store(row, i, a + b)
                    store(row, i + step, a - b)
            step *= 2
        return
    while step < size:
        for first in range(start, start + size, 2 * step):
            for i in range(first, first + step):
                a, b = row[i], row[i + step]
                row[i], row[i + step] = a + b, a - b
        step *= 2
    for i in range(start, start + size):
        row[i] *= scale


@kernel
def transform_row(row, blocks):
    """Transforms runs of a float32 row in place, whose sizes are `blocks`; what the row has behind them stays."""
    start = 0
    for block in range(blocks.size):
        if start + blocks[block] > row.size:
            return
        _transform(row, start, blocks[block])
        start += blocks[block]


@kernel
def transform_rows(rows, blocks):
    """`transform_row` of every row of a C-contiguous float32 matrix."""
    for r in range(rows.shape[0]):
        transform_row(rows[r], blocks)


@task_kernel(x=reads(HEADS), out=writes(HEADS), blocks=CONSTANT, count=INT)
def transform(task, number):
    """out = `transform_row` of every head of x, which may be out. blocks: int64 [count]."""
    first, stop, _, _ = cell(task, number)
    width, blocks = task.x.width, view(task.blocks, task.count, np.int64)
    for r in range(first, stop):
        for h in range(task.x.heads):
            x, out = head_of(task.x, r, h, 0, width), head_of(task.out, r, h, 0, width)
            for j in range(width):
                out[j] = x[j]
            transform_row(out, blocks)
