"""Operations on the rows of activation matrices, as parts for programs of the team of threads (see simd.team).

A part's argument is the address of a table of int64 words. All tables begin with how the matrix is partitioned: the number of
rows, rows of one part, columns, columns of one part; part number p takes the rows and columns of cell p, cells counted along
the columns first. What follows are operands: the address of a matrix's first row and bytes from row to row. Operations over
whole rows (normalisation, rotation) have all columns in one part. Every number is computed in one order, whatever the
partition.

Parts with the same partition may be chained: `chain` runs part p of one task after the other on one thread, so that what the
first writes is still in the processor's cache for the next.
"""

from __future__ import annotations

import numpy as np

from .....simd.compile import kernel
from .....simd.exponential import exp
from .....simd.memory import fill, view
from .....simd.team import ARGUMENT, FUNCTION, atomic_load, call_part, part
from .activations import RUN, quantise_run
from .attention.cache_rows import store_row
from .elementwise import gate_run, mean, normalise_row, product

ROWS, ROW_STEP, COLUMNS, COLUMN_STEP = range(4)


@kernel
def cell(table, number):
    """(first row, row after the last, first column, number of columns) of part `number`."""
    across = (table[COLUMNS] + table[COLUMN_STEP] - 1) // table[COLUMN_STEP]
    row, column = number // across * table[ROW_STEP], number % across * table[COLUMN_STEP]
    return row, min(table[ROWS], row + table[ROW_STEP]), column, min(table[COLUMN_STEP], table[COLUMNS] - column)


@kernel
def row_view(address, row_bytes, row, column, width):
    return view(address + row * row_bytes + 4 * column, width, np.float32)


@part
def chain(argument, number):
    """Part `number` of several tasks, one after the other. Table: their number; then a row for each as in a program."""
    for task in range(atomic_load(argument)):
        row = argument + 8 + 32 * task
        call_part(atomic_load(row + 8 * FUNCTION), atomic_load(row + 8 * ARGUMENT), number)


@part
def add(argument, number):
    """out = a + factor * b. Table: ..., a, b, out (each with its row bytes), factor (float64)."""
    table, factor = view(argument, 11, np.int64), np.float32(view(argument, 11, np.float64)[10])
    first, stop, column, width = cell(table, number)
    for r in range(first, stop):
        a, b = row_view(table[4], table[5], r, column, width), row_view(table[6], table[7], r, column, width)
        out = row_view(table[8], table[9], r, column, width)
        for j in range(width):
            out[j] = a[j] + factor * b[j]


@part
def add_bias(argument, number):
    """x += bias. Table: ..., x, row bytes, biases float32 [matrices, columns], int64 [rows] matrix of each row (0: first)."""
    table = view(argument, 8, np.int64)
    first, stop, column, width = cell(table, number)
    for r in range(first, stop):
        matrix = view(table[7], r + 1, np.int64)[r] if table[7] else 0
        x, bias = row_view(table[4], table[5], r, column, width), row_view(table[6], 4 * table[COLUMNS], matrix, column, width)
        for j in range(width):
            x[j] += bias[j]


@part
def scale_rows(argument, number):
    """x *= factor of the row's matrix. Table: ..., x, row bytes, factors float32 [matrices], int64 [rows] (0: first)."""
    table = view(argument, 8, np.int64)
    first, stop, column, width = cell(table, number)
    for r in range(first, stop):
        matrix = view(table[7], r + 1, np.int64)[r] if table[7] else 0
        x, factor = row_view(table[4], table[5], r, column, width), view(table[6], matrix + 1, np.float32)[matrix]
        for j in range(width):
            x[j] *= factor


@part
def scale(argument, number):
    """out = factor * x. Table: ..., x, out (each with its row bytes), factor (float64)."""
    table, factor = view(argument, 9, np.int64), np.float32(view(argument, 9, np.float64)[8])
    first, stop, column, width = cell(table, number)
    for r in range(first, stop):
        x, out = row_view(table[4], table[5], r, column, width), row_view(table[6], table[7], r, column, width)
        for j in range(width):
            out[j] = factor * x[j]


@part
def gate(argument, number):
    """out = activation(gate) * up, as elementwise.gate_run. Table: ..., gate, up (0: ones), out (each with its row bytes),
    which activation, limit (float64)."""
    table, limit = view(argument, 12, np.int64), np.float32(view(argument, 12, np.float64)[11])
    first, stop, column, width = cell(table, number)
    ones = np.empty(0 if table[6] else width, np.float32)
    fill(ones, 1)
    for r in range(first, stop):
        x, out = row_view(table[4], table[5], r, column, width), row_view(table[8], table[9], r, column, width)
        if table[6]:
            gate_run(table[10], x, row_view(table[6], table[7], r, column, width), out, limit)
        else:
            gate_run(table[10], x, ones, out, limit)


@part
def normalise(argument, number):
    """RMS norm or layer norm of every head of a row.

    Table: ..., x, bytes from row to row and from head to head, heads, width of a head, weight float32, numbers from one head's
    weights to the next one's, epsilon (float64), bias of that layout (0: none), whether the mean is subtracted, out and its two
    steps.
    """
    table, epsilon = view(argument, 17, np.int64), np.float32(view(argument, 17, np.float64)[11])
    first, stop, _, _ = cell(table, number)
    width = table[8]
    for r in range(first, stop):
        for h in range(table[7]):
            x = view(table[4] + r * table[5] + h * table[6], width, np.float32)
            out = view(table[14] + r * table[15] + h * table[16], width, np.float32)
            weight = view(table[9] + 4 * h * table[10], width, np.float32)
            if table[13]:
                shift = mean(x)
                for j in range(width):
                    out[j] = x[j] - shift
                normalise_row(out, weight, epsilon, out)
            else:
                normalise_row(x, weight, epsilon, out)
            if table[12]:
                bias = view(table[12] + 4 * h * table[10], width, np.float32)
                for j in range(width):
                    out[j] += bias[j]


@part
def rotate(argument, number):
    """Rotates pairs of the first elements of heads in place.

    Table: ..., x, bytes from row to row and from head to head, heads, rotations float32 [tokens, 2 * pairs] (cosine and sine),
    pairs, whether these are neighbours, rows per token.
    """
    table = view(argument, 12, np.int64)
    first, stop, _, _ = cell(table, number)
    pairs = table[9]
    for r in range(first, stop):
        rotations = view(table[8] + 8 * pairs * (r // table[11]), 2 * pairs, np.float32)
        for h in range(table[7]):
            head = view(table[4] + r * table[5] + h * table[6], 2 * pairs, np.float32)
            if table[10]:
                for p in range(pairs):
                    a, b, c, s = head[2 * p], head[2 * p + 1], rotations[2 * p], rotations[2 * p + 1]
                    head[2 * p], head[2 * p + 1] = a * c - b * s, a * s + b * c
            else:
                for p in range(pairs):
                    a, b, c, s = head[p], head[p + pairs], rotations[2 * p], rotations[2 * p + 1]
                    head[p], head[p + pairs] = a * c - b * s, a * s + b * c


@part
def sigmoid_gate(argument, number):
    """y /= 1 + exp(-x . gate), row by row. Table: ..., x, row bytes, gate, its size, y, row bytes."""
    table = view(argument, 10, np.int64)
    first, stop, column, width = cell(table, number)
    weights = view(table[6], table[7], np.float32)
    for r in range(first, stop):
        divisor = np.float32(1) + exp(-product(row_view(table[4], table[5], r, 0, weights.size), weights))
        y = row_view(table[8], table[9], r, column, width)
        for j in range(width):
            y[j] /= divisor


@part
def copy(argument, number):
    """Copies rows of heads. Table: ..., x, bytes from row to row and from head to head, heads, width of a head, out and its two
    steps, int64 [rows] which rows of x (0: one after the other; -1: none)."""
    table = view(argument, 13, np.int64)
    first, stop, _, _ = cell(table, number)
    width = table[8]
    for r in range(first, stop):
        row = view(table[12], r + 1, np.int64)[r] if table[12] else r
        if row < 0:
            continue
        for h in range(table[7]):
            x = view(table[4] + row * table[5] + h * table[6], width, np.float32)
            out = view(table[9] + r * table[10] + h * table[11], width, np.float32)
            for j in range(width):
                out[j] = x[j]


@part
def quantise(argument, number):
    """Rows as 8-bit codes (see `activations`). Table: ..., x, row bytes, codes, scales, sums (of dense rows), block."""
    table = view(argument, 10, np.int64)
    first, stop, column, width = cell(table, number)
    columns, block = table[COLUMNS], table[9]
    for r in range(first, stop):
        at = r * columns + column
        quantise_run(
            row_view(table[4], table[5], r, column, width),
            block,
            view(table[6] + at, width, np.uint8),
            view(table[7] + 4 * (at // block), width // block, np.float32),
            view(table[8] + 2 * (at // RUN), width // RUN, np.int16),
        )


@part
def cache(argument, number):
    """Writes rows of heads to KV caches of a float type.

    Table: ..., x, bytes from row to row and from head to head, heads, width of a head, its type (cache_rows.TYPE_IDS),
    int64 [rows, 2]: address of head 0's row in the cache, and bytes from there to the next head's.
    """
    table = view(argument, 11, np.int64)
    first, stop, _, _ = cell(table, number)
    for r in range(first, stop):
        place = view(table[10] + 16 * r, 2, np.int64)
        for h in range(table[7]):
            x = view(table[4] + r * table[5] + h * table[6], table[8], np.float32)
            store_row(table[9], x, place[0] + h * place[1])
