"""Operations on the rows of activation matrices, as task kernels.

A task's partition says how the matrix is divided: part number p takes the rows and columns of cell p. Operations over whole
rows (normalisation, rotation) have all columns in one part. Every number is computed in one order, whatever the partition.

Tasks with the same partition may be chained: `chain` runs part p of one task after the other on one thread, so that what the
first writes is still in the processor's cache for the next.
"""

from __future__ import annotations

import numpy as np

from .....simd.exponential import exp
from .....simd.memory import view
from .....simd.team import ARGUMENT, FUNCTION, TaskKernel, atomic_load, call_part
from .activations import RUN, quantise_run
from .attention.cache_rows import store_row
from .elementwise import mean, normalise_row, product
from .task_kernel import (
    ARRAY,
    CONSTANT,
    HEADS,
    INT,
    REAL,
    ROWS,
    Operand,
    cell,
    head_of,
    reads,
    row_of,
    task_kernel,
    updates,
    writes,
)  # fmt: skip


@TaskKernel
def chain(argument, number):
    """Part `number` of several tasks, one after the other. At the address: their number; then a row for each as in a
    program."""
    for task in range(atomic_load(argument)):
        row = argument + 8 + 32 * task
        call_part(atomic_load(row + 8 * FUNCTION), atomic_load(row + 8 * ARGUMENT), number)


@task_kernel(a=reads(ROWS), b=reads(ROWS), out=writes(ROWS), factor=REAL)
def add(task, number):
    """out = a + factor * b."""
    first, stop, column, width = cell(task, number)
    factor = np.float32(task.factor)
    for r in range(first, stop):
        a, b, out = row_of(task.a, r, column, width), row_of(task.b, r, column, width), row_of(task.out, r, column, width)
        for j in range(width):
            out[j] = a[j] + factor * b[j]


@task_kernel(x=updates(ROWS), bias=CONSTANT, matrices=reads(ARRAY))
def add_bias(task, number):
    """x += bias float32 [matrices, columns], the row that int64 [rows] `matrices` has for each row (0: the first)."""
    first, stop, column, width = cell(task, number)
    for r in range(first, stop):
        matrix = view(task.matrices, r + 1, np.int64)[r] if task.matrices else 0
        x = row_of(task.x, r, column, width)
        bias = view(task.bias + 4 * (matrix * task.partition.columns + column), width, np.float32)
        for j in range(width):
            x[j] += bias[j]


@task_kernel(x=updates(ROWS), factors=CONSTANT, matrices=reads(ARRAY))
def scale_rows(task, number):
    """x *= factors float32 [matrices], that of each row's matrix (see `add_bias`)."""
    first, stop, column, width = cell(task, number)
    for r in range(first, stop):
        matrix = view(task.matrices, r + 1, np.int64)[r] if task.matrices else 0
        x, factor = row_of(task.x, r, column, width), view(task.factors, matrix + 1, np.float32)[matrix]
        for j in range(width):
            x[j] *= factor


@task_kernel(x=reads(ROWS), out=writes(ROWS), factor=REAL)
def scale(task, number):
    """out = factor * x."""
    first, stop, column, width = cell(task, number)
    factor = np.float32(task.factor)
    for r in range(first, stop):
        x, out = row_of(task.x, r, column, width), row_of(task.out, r, column, width)
        for j in range(width):
            out[j] = factor * x[j]


@task_kernel(x=reads(ROWS), out=writes(ROWS), factors=CONSTANT)
def scale_tokens(task, number):
    """out = x * factors float32 [rows]."""
    first, stop, column, width = cell(task, number)
    factors = view(task.factors, stop, np.float32)
    for r in range(first, stop):
        x, out = row_of(task.x, r, column, width), row_of(task.out, r, column, width)
        for j in range(width):
            out[j] = x[j] * factors[r]


@task_kernel(x=reads(ROWS), out=writes(ROWS), weight=CONSTANT)
def multiply(task, number):
    """out = x * weight float32 [columns]."""
    first, stop, column, width = cell(task, number)
    weight = view(task.weight + 4 * column, width, np.float32)
    for r in range(first, stop):
        x, out = row_of(task.x, r, column, width), row_of(task.out, r, column, width)
        for j in range(width):
            out[j] = x[j] * weight[j]


@task_kernel(
    x=reads(HEADS), out=writes(HEADS), weight=CONSTANT, head_weights=INT, epsilon=REAL, bias=CONSTANT, subtracts_mean=INT
)  # fmt: skip
def normalise(task, number):
    """RMS norm or layer norm of every head of a row.

    weight, bias (0: none) are float32, head_weights numbers from one head's to the next one's.
    """
    first, stop, _, _ = cell(task, number)
    width, epsilon = task.x.width, np.float32(task.epsilon)
    for r in range(first, stop):
        for h in range(task.x.heads):
            x, out = head_of(task.x, r, h, 0, width), head_of(task.out, r, h, 0, width)
            weight = view(task.weight + 4 * h * task.head_weights, width, np.float32)
            if task.subtracts_mean:
                shift = mean(x)
                for j in range(width):
                    out[j] = x[j] - shift
                normalise_row(out, weight, epsilon, out)
            else:
                normalise_row(x, weight, epsilon, out)
            if task.bias:
                bias = view(task.bias + 4 * h * task.head_weights, width, np.float32)
                for j in range(width):
                    out[j] += bias[j]


@task_kernel(x=Operand(HEADS), rotations=CONSTANT, pairs=INT, interleaved=INT, token_rows=INT)
def rotate(task, number):
    """Rotates pairs of the first elements of heads in place. The task says itself what it reads and writes.

    rotations: float32 [tokens, 2 * pairs] (cosine and sine); interleaved: whether pairs are neighbours; token_rows: rows per
    token.
    """
    first, stop, _, _ = cell(task, number)
    pairs = task.pairs
    for r in range(first, stop):
        rotations = view(task.rotations + 8 * pairs * (r // task.token_rows), 2 * pairs, np.float32)
        for h in range(task.x.heads):
            head = head_of(task.x, r, h, 0, 2 * pairs)
            if task.interleaved:
                for p in range(pairs):
                    a, b, c, s = head[2 * p], head[2 * p + 1], rotations[2 * p], rotations[2 * p + 1]
                    head[2 * p], head[2 * p + 1] = a * c - b * s, a * s + b * c
            else:
                for p in range(pairs):
                    a, b, c, s = head[p], head[p + pairs], rotations[2 * p], rotations[2 * p + 1]
                    head[p], head[p + pairs] = a * c - b * s, a * s + b * c


@task_kernel(x=reads(ROWS), gate=CONSTANT, size=INT, y=updates(ROWS))
def sigmoid_gate(task, number):
    """y /= 1 + exp(-x . gate), row by row. gate: float32 [size]."""
    first, stop, column, width = cell(task, number)
    gate = view(task.gate, task.size, np.float32)
    for r in range(first, stop):
        divisor = np.float32(1) + exp(-product(row_of(task.x, r, 0, gate.size), gate))
        y = row_of(task.y, r, column, width)
        for j in range(width):
            y[j] /= divisor


@task_kernel(x=updates(HEADS), gate=reads(ROWS))
def gate_heads(task, number):
    """x /= 1 + exp(-gate), head by head of every row. gate: float32 [rows, heads]."""
    first, stop, _, _ = cell(task, number)
    for r in range(first, stop):
        gates = row_of(task.gate, r, 0, task.x.heads)
        for h in range(task.x.heads):
            factor = np.float32(1) / (np.float32(1) + exp(-gates[h]))
            head = head_of(task.x, r, h, 0, task.x.width)
            for j in range(task.x.width):
                head[j] *= factor


@task_kernel(x=reads(HEADS), out=writes(HEADS), index=reads(ARRAY))
def copy(task, number):
    """Copies rows of heads. index: int64 [rows] which rows of x (0: one after the other; -1: none)."""
    first, stop, _, _ = cell(task, number)
    width = task.x.width
    for r in range(first, stop):
        row = view(task.index, r + 1, np.int64)[r] if task.index else r
        if row < 0:
            continue
        for h in range(task.x.heads):
            x, out = head_of(task.x, row, h, 0, width), head_of(task.out, r, h, 0, width)
            for j in range(width):
                out[j] = x[j]


@task_kernel(x=reads(ROWS), codes=writes(ARRAY), scales=INT, sums=INT, block=INT)
def quantise(task, number):
    """Rows as 8-bit codes (see `activations`). codes, scales, sums: addresses, of dense rows."""
    first, stop, column, width = cell(task, number)
    columns, block = task.partition.columns, task.block
    for r in range(first, stop):
        at = r * columns + column
        quantise_run(
            row_of(task.x, r, column, width),
            block,
            view(task.codes + at, width, np.uint8),
            view(task.scales + 4 * (at // block), width // block, np.float32),
            view(task.sums + 2 * (at // RUN), width // RUN, np.int16),
        )


@task_kernel(x=reads(HEADS), type_id=INT, addresses=CONSTANT)
def store_in_cache(task, number):
    """Writes rows of heads to KV caches of a float type (cache_rows.TYPE_IDS).

    addresses: int64 [rows, 2], of head 0's row in the cache (0: it has none), and bytes from there to the next head's.
    """
    first, stop, _, _ = cell(task, number)
    for r in range(first, stop):
        place = view(task.addresses + 16 * r, 2, np.int64)
        for h in range(task.x.heads if place[0] else 0):
            store_row(task.type_id, head_of(task.x, r, h, 0, task.x.width), place[0] + h * place[1])
