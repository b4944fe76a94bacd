"""The way of tokens to their experts and back: rows side by side for each expert, and its results added up by token."""

from __future__ import annotations

import numpy as np

from .....simd.compile import kernel
from .....simd.memory import view
from .....simd.team import part

RUN = 16384  # numbers of one part: some microseconds


@kernel
def arrange(chosen, weights, experts, unit, few, starts, counts, places, matrices, rows, factors):
    """Gives every choice of an expert a row: first those of experts with more than `few` tokens, expert by expert, each from a
    multiple of `unit`; then, without gaps, those of the others. Returns how many rows each of the two kinds takes.

    chosen int64 [n, used], -1 for none; weights float32 [n, used]. Results: starts and counts int64 [experts] of each expert's
    rows; of each row (as many as there may be: n * used + experts * unit) its token, -1 for a gap, and its expert, 0 for a gap:
    places, matrices int64; of each token its rows, int64 [n, used], -1 for none, in the order of experts, and their factors.
    """
    n, used = chosen.shape
    counts[:] = 0
    for t in range(n):
        for k in range(used):
            if chosen[t, k] >= 0:
                counts[chosen[t, k]] += 1
    total = 0
    for e in range(experts):
        if counts[e] > few:
            starts[e] = total
            total += (counts[e] + unit - 1) // unit * unit
    many = total
    for e in range(experts):
        if counts[e] <= few:
            starts[e] = total
            total += counts[e]
    places[:total], matrices[:total], rows[:], factors[:] = -1, 0, -1, 0
    filled = np.zeros(experts, np.int64)
    order = np.empty(used, np.int64)
    for t in range(n):
        size = 0  # the token's choices, sorted by expert
        for k in range(used):
            if chosen[t, k] >= 0:
                at = size
                while at > 0 and chosen[t, order[at - 1]] > chosen[t, k]:
                    order[at] = order[at - 1]
                    at -= 1
                order[at] = k
                size += 1
        for i in range(size):
            e = chosen[t, order[i]]
            row = starts[e] + filled[e]
            filled[e] += 1
            places[row], matrices[row] = t, e
            rows[t, i], factors[t, i] = row, weights[t, order[i]]
    return many, total - many


@part
def combine_part(argument, number):
    """out[t] += factors[t, k] * (results[rows[t, k]] + bias of the row's matrix), one k after the other, for rows from `low` to
    `high` - 1.

    Table: results (the first is row `low`), factors float32 [tokens, k], rows int64 [tokens, k], out, tokens, k, columns,
    tokens per part, biases float32 [matrices, columns] (0: none), matrices int64 [rows], low, high, whether out is zero before.
    """
    table = view(argument, 13, np.int64)
    count, columns, step, low, high = table[5], table[6], table[7], table[10], table[11]
    for t in range(number * step, min(table[4], (number + 1) * step)):
        factors, rows = view(table[1] + 4 * t * count, count, np.float32), view(table[2] + 8 * t * count, count, np.int64)
        out = view(table[3] + 4 * t * columns, columns, np.float32)
        if table[12]:
            out[:] = 0
        for k in range(count):
            row, factor = rows[k], factors[k]
            if row < low or row >= high:
                continue
            result = view(table[0] + 4 * (row - low) * columns, columns, np.float32)
            if table[8]:
                matrix = view(table[9], row + 1, np.int64)[row]
                bias = view(table[8] + 4 * matrix * columns, columns, np.float32)
                for i in range(columns):
                    out[i] += factor * (result[i] + bias[i])
            else:
                for i in range(columns):
                    out[i] += factor * result[i]
