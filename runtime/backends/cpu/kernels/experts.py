"""Mixtures of experts: routing, sorting the rows of tokens by expert, and adding the experts' results by token."""

from __future__ import annotations

import numpy as np

from .....simd.compile import kernel
from .....simd.exponential import exp
from .....simd.memory import fill, view
from .elementwise import route, sqrt_softplus
from .gemv.gemv import FIRST, MATRIX, TARGET, TOKENS
from .task_kernel import ARRAY, CONSTANT, INT, REAL, ROWS, cell, reads, row_of, task_kernel, updates, writes


@kernel
def arrange(chosen, weights, experts, unit, starts, counts, places, matrices, rows, factors):
    """Gives every choice of an expert a row, expert by expert, each from a multiple of `unit` on. Returns the number of rows.

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
        starts[e] = total
        total += (counts[e] + unit - 1) // unit * unit
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
    return total


@task_kernel(
    results=reads(ARRAY), factors=reads(ARRAY), rows=reads(ARRAY), out=updates(ARRAY), used=INT, low=INT, high=INT,
    starts_at_zero=INT
)  # fmt: skip
def combine(task, number):
    """out[t] += factors[t, k] * results[rows[t, k]], one k after the other, for rows from `low` to `high` - 1.

    results (the first is row `low`), factors float32 [tokens, used], rows int64 [tokens, used]; starts_at_zero: whether out is
    zero before.
    """
    first, stop, _, columns = cell(task, number)
    used, low, high = task.used, task.low, task.high
    for t in range(first, stop):
        factors, rows = view(task.factors + 4 * t * used, used, np.float32), view(task.rows + 8 * t * used, used, np.int64)
        out = view(task.out + 4 * t * columns, columns, np.float32)
        if task.starts_at_zero:
            fill(out, 0)
        for k in range(used):
            row, factor = rows[k], factors[k]
            if row < low or row >= high:
                continue
            result = view(task.results + 4 * (row - low) * columns, columns, np.float32)
            for i in range(columns):
                out[i] += factor * result[i]


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


_CHOICE: dict = {
    **{"logits": updates(ARRAY), "chosen": writes(ARRAY), "weights": writes(ARRAY), "experts": INT, "used": INT},
    **{"least": INT, "share": REAL},  # of Settings.expert_reduction; 0: all are kept
}


@task_kernel(**_CHOICE, gating=INT, bias=CONSTANT, groups=INT, groups_used=INT, normalise=INT, scale=REAL)
def choose_experts(task, number):
    """Chooses the experts of a run of tokens as `elementwise.route`; with `least` above 0 reduced by `reduce_experts`."""
    first, stop, _, _ = cell(task, number)
    n, experts, used = stop - first, task.experts, task.used
    scores = view(task.logits + 4 * first * experts, (n, experts), np.float32)
    bias = view(task.bias, experts if task.bias else 0, np.float32)
    chosen = view(task.chosen + 8 * first * used, (n, used), np.int64)
    weights = view(task.weights + 4 * first * used, (n, used), np.float32)
    normalise = task.normalise != 0
    route(scores, task.gating, bias, task.groups, task.groups_used, normalise, task.scale, chosen, weights)
    if task.least:
        for t in range(n):
            reduce_experts(chosen[t], weights[t], task.least, np.float32(task.share), normalise)


@task_kernel(**_CHOICE, jitter=REAL)
def choose_by_sparse_mixer(task, number):
    """Chooses the experts of a run of tokens by SparseMixer: see graph.ops.Route."""
    first, stop, _, _ = cell(task, number)
    experts, used, jitter = task.experts, task.used, np.float32(2 * task.jitter)
    for t in range(first, stop):
        logits = view(task.logits + 4 * t * experts, experts, np.float32)
        chosen, weights = view(task.chosen + 8 * t * used, used, np.int64), view(task.weights + 4 * t * used, used, np.float32)
        for k in range(used):
            best = -1
            for i in range(experts):
                if not _contains(chosen, k, i) and (best < 0 or logits[i] > logits[best]):
                    best = i
            total, largest = np.float32(0), logits[best]
            for i in range(experts):
                if not _contains(chosen, k, i) and (largest - logits[i]) / max(abs(logits[i]), largest) <= jitter:
                    total += exp(logits[i] - largest)
            chosen[k], weights[k] = best, np.float32(1) / total
        if task.least:
            reduce_experts(chosen, weights, task.least, np.float32(task.share), False)


@task_kernel(
    **{"logits": reads(ARRAY), "listed": CONSTANT, "chosen": writes(ARRAY), "weights": writes(ARRAY)},
    **{"experts": INT, "used": INT, "normalise": INT, "scale": REAL},
)
def choose_listed(task, number):
    """Chooses the experts that are listed for each of a run of tokens, int64 [n, used], weighted by the square roots of the
    softplus of their logits."""
    first, stop, _, _ = cell(task, number)
    experts, used = task.experts, task.used
    for t in range(first, stop):
        logits = view(task.logits + 4 * t * experts, experts, np.float32)
        listed = view(task.listed + 8 * t * used, used, np.int64)
        chosen, weights = view(task.chosen + 8 * t * used, used, np.int64), view(task.weights + 4 * t * used, used, np.float32)
        total, factor = np.float32(0), np.float32(task.scale)
        for k in range(used):
            chosen[k] = listed[k]
            weights[k] = sqrt_softplus(logits[chosen[k]])
            total += weights[k]
        if task.normalise:
            factor /= max(total, np.float32(1e-20))
        for k in range(used):
            weights[k] *= factor


@task_kernel(chosen=reads(ARRAY), weights=updates(ARRAY), factors=CONSTANT, used=INT)
def multiply_weights(task, number):
    """weights *= the factor of each expert, float32 [experts]; that of a dropped one (-1) is 0 already."""
    first, stop, _, _ = cell(task, number)
    for i in range(first * task.used, stop * task.used):
        expert = view(task.chosen, i + 1, np.int64)[i]
        if expert >= 0:
            view(task.weights, i + 1, np.float32)[i] *= view(task.factors, expert + 1, np.float32)[expert]


@task_kernel(chosen=updates(ARRAY), weights=reads(ARRAY), x=reads(ROWS), out=writes(ROWS), used=INT, last=INT, width=INT)
def add_identities(task, number):
    """Takes the experts from `last` on, which have no matrices, out of the choice (-1), and writes x times the sum of their
    weights; that of a dropped one, which is -1 already, is 0."""
    first, stop, _, _ = cell(task, number)
    used = task.used
    for t in range(first, stop):
        chosen, weights = view(task.chosen + 8 * t * used, used, np.int64), view(task.weights + 4 * t * used, used, np.float32)
        total = np.float32(0)
        for k in range(used):
            if chosen[k] >= task.last:
                chosen[k] = -1
            if chosen[k] < 0:
                total += weights[k]
        x, out = row_of(task.x, t, 0, task.width), row_of(task.out, t, 0, task.width)
        for j in range(task.width):
            out[j] = x[j] * total


@task_kernel(
    **{"x": reads(ROWS), "out": writes(ROWS), "places": reads(ARRAY), "rows": reads(ARRAY), "factors": reads(ARRAY)},
    **{"used": INT, "low": INT},
)
def scale_by_routing(task, number):
    """Rows of experts' choices, from number `low` on: x of the row's token times the weight of its choice; 0 of a gap.

    places int64 [rows]: each row's token, -1 of a gap; rows int64, factors float32 [tokens, used]: of each token's choices.
    """
    first, stop, column, width = cell(task, number)
    for r in range(first, stop):
        token, factor = view(task.places, r + 1, np.int64)[r], np.float32(0)
        for i in range(token * task.used, (token + 1) * task.used if token >= 0 else token * task.used):
            if view(task.rows, i + 1, np.int64)[i] == task.low + r:
                factor = view(task.factors, i + 1, np.float32)[i]
        x, out = row_of(task.x, max(token, 0), column, width), row_of(task.out, r, column, width)
        for j in range(width):
            out[j] = x[j] * factor


@kernel
def _contains(numbers, count, number):
    among = False
    for i in range(count):
        among |= numbers[i] == number
    return among


@task_kernel(
    **{"chosen": reads(ARRAY), "weights": reads(ARRAY), "tokens": INT, "used": INT, "experts": INT, "spare": INT},
    **dict.fromkeys(("starts", "counts", "places", "matrices", "rows", "factors", "jobs"), writes(ARRAY)),
)
def arrange_choices(task, number):
    """Sorts the choices of tokens by expert (see `arrange`) and makes the jobs of the products (see gemv.gemv; those of
    GEMM have the same words).

    spare: rows without a token (-1) that `places` has after those of the choices.

    jobs: int64 [2, least of tokens * used and experts, 4]: the first for products of the rows of tokens (one token: its own
    row, else rows as arranged), the second for products of rows as arranged. Jobs that are not needed have no tokens.
    """
    n, used, experts = task.tokens, task.used, task.experts
    choices = n * used
    chosen = view(task.chosen, (n, used), np.int64)
    weights = view(task.weights, (n, used), np.float32)
    starts, counts = view(task.starts, experts, np.int64), view(task.counts, experts, np.int64)
    places, matrices = view(task.places, choices + task.spare, np.int64), view(task.matrices, choices, np.int64)
    rows = view(task.rows, (n, used), np.int64)
    factors = view(task.factors, (n, used), np.float32)
    fill(places, -1)  # of rows without a choice
    fill(matrices, 0)
    arrange(chosen, weights, experts, 1, starts, counts, places, matrices, rows, factors)
    n_jobs = min(choices, experts)
    jobs = view(task.jobs, (2, n_jobs, 4), np.int64)
    for job in range(n_jobs):
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
