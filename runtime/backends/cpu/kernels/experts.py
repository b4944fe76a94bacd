"""Mixtures of experts: routing, sorting the rows of tokens by expert, and adding the experts' results by token."""

from __future__ import annotations

import numpy as np

from .....simd.compile import kernel
from .....simd.memory import fill, view
from .....simd.team import part
from .elementwise import route
from .gemv.gemv import FIRST, MATRIX, TARGET, TOKENS

RUN = 16384  # numbers of one part: several microseconds


@kernel
def arrange(chosen, weights, experts, unit, gemv_tokens, starts, counts, places, matrices, rows, factors):
    """Gives every choice of an expert a row: first those of experts with more than `gemv_tokens` tokens, expert by expert, each
    from a multiple of `unit`; then, without gaps, those of the others. Returns the numbers of rows of the two groups.

    chosen int64 [n, used], -1 for none; weights float32 [n, used]. Results: starts and counts int64 [experts] of each expert's
    rows; of each row (as many as there may be: n * used + experts * unit) its token, -1 for a gap, and its expert, 0 for a gap:
    places, matrices int64; of each token its rows, int64 [n, used], -1 for none, in the order of experts, and their factors.
    """
    n, used = chosen.shape
    fill(counts, 0)
    for t in range(n):
        for k in range(used):
            if chosen[t, k] >= 0:
                counts[chosen[t, k]] += 1
    total = 0
    for e in range(experts):
        if counts[e] > gemv_tokens:
            starts[e] = total
            total += (counts[e] + unit - 1) // unit * unit
    gemm_rows = total
    for e in range(experts):
        if counts[e] <= gemv_tokens:
            starts[e] = total
            total += counts[e]
    for r in range(total):
        places[r], matrices[r] = -1, 0
    for t in range(n):
        for k in range(used):
            rows[t, k], factors[t, k] = -1, 0
    filled = np.empty(experts, np.int64)
    fill(filled, 0)
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
    return gemm_rows, total - gemm_rows


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
            fill(out, 0)
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


ROUTE_FIELDS = (
    *("rows", "row_step", "columns", "column_step"),  # the partition: of tokens
    *("scores", "experts", "gating", "bias", "groups", "groups_used", "normalise", "used", "chosen", "weights", "keep"),
    *("scale", "share"),  # float64
)


@kernel
def reduce_experts(chosen, weights, keep, share, normalise):
    """Of one token's experts, best first, drops those after the first `keep` whose weight is below `share` times the largest.

    A dropped expert becomes -1 and its weight 0; with `normalise` the others grow so that the sum stays. int64 and float32
    [used].
    """
    strongest, before, after = weights[0], np.float32(0), np.float32(0)
    for k in range(len(weights)):
        strongest = max(strongest, weights[k])
        before += weights[k]
    for k in range(len(weights)):
        if k >= keep and weights[k] < share * strongest:
            chosen[k], weights[k] = -1, 0
        after += weights[k]
    if normalise:
        factor = before / max(after, np.float32(1e-20))
        for k in range(len(weights)):
            weights[k] *= factor


@part
def route_part(argument, number):
    """Chooses the experts of a run of tokens as `elementwise.route`; with `keep` above 0 reduced by `reduce_experts`."""
    table, real = view(argument, 17, np.int64), view(argument, 17, np.float64)
    first, experts, used = number * table[1], table[5], table[11]
    n = min(table[1], table[0] - first)
    scores = view(table[4] + 4 * first * experts, (n, experts), np.float32)
    bias = view(table[7], experts if table[7] else 0, np.float32)
    chosen = view(table[12] + 8 * first * used, (n, used), np.int64)
    weights = view(table[13] + 4 * first * used, (n, used), np.float32)
    route(scores, table[6], bias, table[8], table[9], table[10] != 0, real[15], chosen, weights)
    if table[14]:
        for t in range(n):
            reduce_experts(chosen[t], weights[t], table[14], np.float32(real[16]), table[10] != 0)


@part
def arrange_part(argument, number):
    """Sorts the choices of tokens by expert (see `arrange`) and makes the jobs of the products (see gemv.gemv).

    Table: chosen, weights, tokens, used, experts, starts, counts, places, matrices, rows, factors, jobs int64 [2, tokens *
    used, 4]: the first for products of the rows of tokens (one token: its own row, else rows as arranged), the second
    for products of rows as arranged. Jobs that are not needed have no tokens.
    """
    table = view(argument, 12, np.int64)
    n, used, experts = table[2], table[3], table[4]
    choices = n * used
    chosen = view(table[0], (n, used), np.int64)
    weights = view(table[1], (n, used), np.float32)
    starts, counts = view(table[5], experts, np.int64), view(table[6], experts, np.int64)
    places, matrices = view(table[7], choices, np.int64), view(table[8], choices, np.int64)
    rows = view(table[9], (n, used), np.int64)
    factors = view(table[10], (n, used), np.float32)
    fill(places, -1)  # of rows without a choice
    fill(matrices, 0)
    arrange(chosen, weights, experts, 1, 0, starts, counts, places, matrices, rows, factors)
    jobs = view(table[11], (2, choices, 4), np.int64)
    for job in range(choices):
        jobs[0, job, TOKENS] = jobs[1, job, TOKENS] = 0
    job = 0
    for expert in range(experts):
        if counts[expert] > 0:
            for side in range(2):
                jobs[side, job, MATRIX], jobs[side, job, TOKENS] = expert, counts[expert]
                jobs[side, job, FIRST] = jobs[side, job, TARGET] = starts[expert]
            if n == 1:
                jobs[0, job, FIRST] = 0
            job += 1
