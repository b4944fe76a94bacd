"""The scan of state space models (Mamba, Mamba-2) as a part for programs (see simd.team).

A part takes some columns of one head's matrix, which do not depend on the others, for all tokens of one sequence. Four of its
rows at a time stay in registers over a run of tokens. A result is the sum over rows in ascending order, whatever the run: it
depends neither on how tokens come in passes nor on threads.
"""

from __future__ import annotations

import numpy as np

from .....simd.compile import kernel
from .....simd.exponential import exp, exp_lanes
from .....simd.lanes import LANES, fma_lanes, load, splat, store
from .....simd.memory import view
from .recurrent import SEQUENCES
from .softplus import softplus, softplus_lanes
from .task_kernel import CONSTANT, HEADS, ROWS, head_of, reads, row_of, task_kernel, writes

COLUMNS = 4 * LANES  # of a part
_RUN = 32  # tokens: their factors and results stay in the first cache
_ROWS = 4  # of the matrix that are in registers


@kernel
def _scan_head(n, before, after, stride, at, b, c, size, shrink, values, out, column):
    """n tokens for 16 columns of a head's matrix with one factor per token.

    before, after: float32 [size * stride], the matrix, of which the columns from `at` on; b, c: float32 [tokens, size];
    shrink: float32 [tokens]; values, out: float32 [tokens * COLUMNS], of which those from `column` on.
    """
    i = 0
    while i + _ROWS <= size:
        place = i * stride + at
        state_0, state_1 = load(before, place), load(before, place + stride)
        state_2, state_3 = load(before, place + 2 * stride), load(before, place + 3 * stride)
        for t in range(n):
            factor, value, total = splat(shrink[t]), load(values, t * COLUMNS + column), load(out, t * COLUMNS + column)
            state_0 = fma_lanes(splat(b[t, i]), value, state_0 * factor)
            state_1 = fma_lanes(splat(b[t, i + 1]), value, state_1 * factor)
            state_2 = fma_lanes(splat(b[t, i + 2]), value, state_2 * factor)
            state_3 = fma_lanes(splat(b[t, i + 3]), value, state_3 * factor)
            total = fma_lanes(state_1, splat(c[t, i + 1]), fma_lanes(state_0, splat(c[t, i]), total))
            total = fma_lanes(state_3, splat(c[t, i + 3]), fma_lanes(state_2, splat(c[t, i + 2]), total))
            store(out, t * COLUMNS + column, total)
        store(after, place, state_0)
        store(after, place + stride, state_1)
        store(after, place + 2 * stride, state_2)
        store(after, place + 3 * stride, state_3)
        i += _ROWS
    while i < size:
        state = load(before, i * stride + at)
        for t in range(n):
            state = fma_lanes(splat(b[t, i]), load(values, t * COLUMNS + column), state * splat(shrink[t]))
            store(out, t * COLUMNS + column, fma_lanes(state, splat(c[t, i]), load(out, t * COLUMNS + column)))
        store(after, i * stride + at, state)
        i += 1


@kernel
def _scan_elements(n, before, after, stride, at, b, c, size, decay, steps, values, out, column):
    """As `_scan_head`, but each element of the matrix has its own decay, float32 [size * stride], and each column its own
    steps, float32 [tokens * COLUMNS]."""
    i = 0
    while i + _ROWS <= size:
        place = i * stride + at
        state_0, state_1 = load(before, place), load(before, place + stride)
        state_2, state_3 = load(before, place + 2 * stride), load(before, place + 3 * stride)
        decay_0, decay_1 = load(decay, place), load(decay, place + stride)
        decay_2, decay_3 = load(decay, place + 2 * stride), load(decay, place + 3 * stride)
        for t in range(n):
            step, value, total = (
                load(steps, t * COLUMNS + column),
                load(values, t * COLUMNS + column),
                load(out, t * COLUMNS + column),
            )
            state_0 = fma_lanes(splat(b[t, i]), value, state_0 * exp_lanes(step * decay_0))
            state_1 = fma_lanes(splat(b[t, i + 1]), value, state_1 * exp_lanes(step * decay_1))
            state_2 = fma_lanes(splat(b[t, i + 2]), value, state_2 * exp_lanes(step * decay_2))
            state_3 = fma_lanes(splat(b[t, i + 3]), value, state_3 * exp_lanes(step * decay_3))
            total = fma_lanes(state_1, splat(c[t, i + 1]), fma_lanes(state_0, splat(c[t, i]), total))
            total = fma_lanes(state_3, splat(c[t, i + 3]), fma_lanes(state_2, splat(c[t, i + 2]), total))
            store(out, t * COLUMNS + column, total)
        store(after, place, state_0)
        store(after, place + stride, state_1)
        store(after, place + 2 * stride, state_2)
        store(after, place + 3 * stride, state_3)
        i += _ROWS
    while i < size:
        state, factor = load(before, i * stride + at), load(decay, i * stride + at)
        for t in range(n):
            value, step = load(values, t * COLUMNS + column), load(steps, t * COLUMNS + column)
            state = fma_lanes(splat(b[t, i]), value, state * exp_lanes(step * factor))
            store(out, t * COLUMNS + column, fma_lanes(state, splat(c[t, i]), load(out, t * COLUMNS + column)))
        store(after, i * stride + at, state)
        i += 1


@task_kernel(
    **{"x": reads(HEADS), "out": writes(HEADS), "b": reads(HEADS), "c": reads(HEADS), "dt": reads(ROWS), "dt_bias": CONSTANT},
    **{"decay": CONSTANT, "skip": CONSTANT, **SEQUENCES},
)
def selective_scan(task, number):
    """The scan for one sequence, one head and up to COLUMNS columns of its matrix, float32 [size, stride], stride the columns
    filled up to a multiple of LANES.

    dt_bias: float32 [heads] (0: dt has one number for each column); decay: float32 [heads] or [size, stride]; skip: float32
    [heads] or [width].
    """
    heads, width, groups, size = task.x.heads, task.x.width, task.b.heads, task.b.width
    stride = (width + LANES - 1) // LANES * LANES
    across = (stride + COLUMNS - 1) // COLUMNS
    sequence, head, column = number // (heads * across), number // across % heads, number % across * COLUMNS
    group = head // (heads // groups)
    rows, states = view(task.ranges + 16 * sequence, 2, np.int64), view(task.states + 16 * sequence, 2, np.int64)
    place = task.offset + 4 * head * size * stride
    before = view(states[0] + place, size * stride, np.float32)
    after = view(states[1] + place, size * stride, np.float32)
    columns, used = min(COLUMNS, stride - column), min(COLUMNS, width - column)
    per_head = task.dt_bias != 0
    values, steps = np.zeros(_RUN * COLUMNS, np.float32), np.zeros(_RUN * COLUMNS, np.float32)
    sums, shrink = np.empty(_RUN * COLUMNS, np.float32), np.empty(_RUN, np.float32)
    b, c = np.empty((_RUN, size), np.float32), np.empty((_RUN, size), np.float32)
    for first in range(rows[0], rows[0] + rows[1], _RUN):
        n = min(_RUN, rows[0] + rows[1] - first)
        for t in range(n):
            at = first + t
            b_row = head_of(task.b, at, group, 0, size)
            c_row = head_of(task.c, at, group, 0, size)
            for i in range(size):
                b[t, i], c[t, i] = b_row[i], c_row[i]
            x = head_of(task.x, at, head, column, used)
            if per_head:
                step = softplus(row_of(task.dt, at, head, 1)[0] + view(task.dt_bias, heads, np.float32)[head])
                shrink[t] = exp(step * view(task.decay, heads, np.float32)[head])
                for j in range(used):
                    values[t * COLUMNS + j] = step * x[j]
            else:
                dt = row_of(task.dt, at, column, used)
                for j in range(used):
                    steps[t * COLUMNS + j] = dt[j]
                for j in range(0, columns, LANES):
                    store(steps, t * COLUMNS + j, softplus_lanes(load(steps, t * COLUMNS + j)))
                for j in range(used):
                    values[t * COLUMNS + j] = steps[t * COLUMNS + j] * x[j]
        for j in range(n * COLUMNS):
            sums[j] = 0
        for j in range(0, columns, LANES):
            if per_head:
                _scan_head(n, before, after, stride, column + j, b, c, size, shrink, values, sums, j)
            else:
                decay = view(task.decay, size * stride, np.float32)
                _scan_elements(n, before, after, stride, column + j, b, c, size, decay, steps, values, sums, j)
        before = after
        for t in range(n):
            x = head_of(task.x, first + t, head, column, used)
            out = head_of(task.out, first + t, head, column, used)
            if per_head:
                skip = view(task.skip, heads, np.float32)[head]
                for j in range(used):
                    out[j] = sums[t * COLUMNS + j] + skip * x[j]
            else:
                skips = view(task.skip + 4 * column, used, np.float32)
                for j in range(used):
                    out[j] = sums[t * COLUMNS + j] + skips[j] * x[j]
