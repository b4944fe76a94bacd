"""Ops with a recurrent state as parts for programs (see simd.team): the short convolution and the gated delta rule.

Every part takes the tokens of one sequence one after the other, and some channels or columns of the state that do not depend on
the others. So results do not depend on how tokens come in passes, nor on threads.

Operands of all are SEQUENCES. Each sequence has two int64 in `states`: the addresses of the state that is read, and of the one
that is written; the op's state lies at `offset` in both. Two in `ranges` say which rows are the sequence's: the first one, and
how many.
"""

from __future__ import annotations

import numpy as np

from .....simd.compile import kernel
from .....simd.exponential import exp
from .....simd.lanes import LANES, fma_lanes, load, splat, store
from .....simd.memory import view
from .elementwise import SILU, gate_run, product
from .softplus import softplus
from .task_kernel import CONSTANT, HEADS, INT, REAL, ROWS, head_of, reads, row_of, task_kernel, writes

CHANNELS = 256  # of a part of the convolution
SEQUENCES = {"ranges": CONSTANT, "states": CONSTANT, "offset": INT}
COLUMNS = 4 * LANES  # of a part of the delta rule: as many sums as fill the processor's pipelines


@task_kernel(
    **{"x": reads(ROWS), "out": writes(ROWS), "weight": CONSTANT, "bias": CONSTANT, **SEQUENCES},
    **dict.fromkeys(("channels", "kernel_size", "dilation", "stride", "silu"), INT),
)
def short_convolution(task, number):
    """The causal convolution of each channel, or silu of it. State: the last inputs, float32
    [(kernel_size - 1) * dilation, stride].

    weight: float32 [kernel_size, channels]; bias: float32 [channels]; silu: whether it follows.
    """
    channels, kernel_size, stride, dilation = task.channels, task.kernel_size, task.stride, task.dilation
    parts = (channels + CHANNELS - 1) // CHANNELS
    sequence, column = number // parts, number % parts * CHANNELS
    width = min(CHANNELS, channels - column)
    rows, states = view(task.ranges + 16 * sequence, 2, np.int64), view(task.states + 16 * sequence, 2, np.int64)
    first, n, past = rows[0], rows[1], (kernel_size - 1) * dilation
    before, after = states[0] + task.offset + 4 * column, states[1] + task.offset + 4 * column
    ones, bias = np.ones(width, np.float32), view(task.bias + 4 * column, width, np.float32)
    for t in range(n):
        out = row_of(task.out, first + t, column, width)
        for j in range(width):
            out[j] = bias[j]
        for i in range(kernel_size):
            at = t + i * dilation - past  # of the token, counted from the first new one
            source = before + 4 * stride * (past + at)
            if at >= 0:
                source = task.x.address + (first + at) * task.x.row_bytes + 4 * column
            x = view(source, width, np.float32)
            weight = view(task.weight + 4 * (channels * i + column), width, np.float32)
            for j in range(width):
                out[j] += weight[j] * x[j]
        if task.silu:
            gate_run(SILU, out, ones, out, np.float32(0), 0, 0)
    for i in range(past):
        at = n + i - past
        source = before + 4 * stride * (past + at)
        if at >= 0:
            source = task.x.address + (first + at) * task.x.row_bytes + 4 * column
        x, kept = view(source, width, np.float32), view(after + 4 * stride * i, width, np.float32)
        for j in range(width):
            kept[j] = x[j]


@kernel
def _unit(x, scale, epsilon, out):
    """out = scale * x / sqrt(sum(x^2) + epsilon)."""
    factor = scale / np.sqrt(product(x, x) + epsilon)
    for i in range(x.size):
        out[i] = x[i] * factor


@kernel
def _step_4(before, after, stride, column, q, k, v, shrink, strength, out):
    """One token for 64 columns of the matrix: before, after float32 [k.size * stride] (they may be the same)."""
    sum_0, sum_1, sum_2, sum_3 = splat(0), splat(0), splat(0), splat(0)
    at = column
    for i in range(k.size):
        factor = splat(k[i])
        sum_0 = fma_lanes(load(before, at), factor, sum_0)
        sum_1 = fma_lanes(load(before, at + LANES), factor, sum_1)
        sum_2 = fma_lanes(load(before, at + 2 * LANES), factor, sum_2)
        sum_3 = fma_lanes(load(before, at + 3 * LANES), factor, sum_3)
        at += stride
    change_0 = (load(v, 0) - sum_0 * shrink) * strength
    change_1 = (load(v, LANES) - sum_1 * shrink) * strength
    change_2 = (load(v, 2 * LANES) - sum_2 * shrink) * strength
    change_3 = (load(v, 3 * LANES) - sum_3 * shrink) * strength
    sum_0, sum_1, sum_2, sum_3 = splat(0), splat(0), splat(0), splat(0)
    at = column
    for i in range(k.size):
        factor, query = splat(k[i]), splat(q[i])
        state_0 = fma_lanes(change_0, factor, load(before, at) * shrink)
        state_1 = fma_lanes(change_1, factor, load(before, at + LANES) * shrink)
        state_2 = fma_lanes(change_2, factor, load(before, at + 2 * LANES) * shrink)
        state_3 = fma_lanes(change_3, factor, load(before, at + 3 * LANES) * shrink)
        store(after, at, state_0)
        store(after, at + LANES, state_1)
        store(after, at + 2 * LANES, state_2)
        store(after, at + 3 * LANES, state_3)
        sum_0, sum_1 = fma_lanes(state_0, query, sum_0), fma_lanes(state_1, query, sum_1)
        sum_2, sum_3 = fma_lanes(state_2, query, sum_2), fma_lanes(state_3, query, sum_3)
        at += stride
    store(out, 0, sum_0)
    store(out, LANES, sum_1)
    store(out, 2 * LANES, sum_2)
    store(out, 3 * LANES, sum_3)


@kernel
def _step_1(before, after, stride, column, q, k, v, shrink, strength, out):
    """As `_step_4` for 16 columns; v and out have only these."""
    total = splat(0)
    at = column
    for i in range(k.size):
        total = fma_lanes(load(before, at), splat(k[i]), total)
        at += stride
    change = (load(v, 0) - total * shrink) * strength
    total = splat(0)
    at = column
    for i in range(k.size):
        state = fma_lanes(change, splat(k[i]), load(before, at) * shrink)
        store(after, at, state)
        total = fma_lanes(state, splat(q[i]), total)
        at += stride
    store(out, 0, total)


@kernel
def _row_step_4(before, after, stride, column, q, k, decayed, v, shrink, strength, out):
    """As `_step_4` with a decay for each row: shrink and decayed, which is shrink * k, float32 [k.size]."""
    sum_0, sum_1, sum_2, sum_3 = splat(0), splat(0), splat(0), splat(0)
    at = column
    for i in range(k.size):
        factor = splat(decayed[i])
        sum_0 = fma_lanes(load(before, at), factor, sum_0)
        sum_1 = fma_lanes(load(before, at + LANES), factor, sum_1)
        sum_2 = fma_lanes(load(before, at + 2 * LANES), factor, sum_2)
        sum_3 = fma_lanes(load(before, at + 3 * LANES), factor, sum_3)
        at += stride
    change_0, change_1 = (load(v, 0) - sum_0) * strength, (load(v, LANES) - sum_1) * strength
    change_2, change_3 = (load(v, 2 * LANES) - sum_2) * strength, (load(v, 3 * LANES) - sum_3) * strength
    sum_0, sum_1, sum_2, sum_3 = splat(0), splat(0), splat(0), splat(0)
    at = column
    for i in range(k.size):
        factor, query, kept = splat(k[i]), splat(q[i]), splat(shrink[i])
        state_0 = fma_lanes(change_0, factor, load(before, at) * kept)
        state_1 = fma_lanes(change_1, factor, load(before, at + LANES) * kept)
        state_2 = fma_lanes(change_2, factor, load(before, at + 2 * LANES) * kept)
        state_3 = fma_lanes(change_3, factor, load(before, at + 3 * LANES) * kept)
        store(after, at, state_0)
        store(after, at + LANES, state_1)
        store(after, at + 2 * LANES, state_2)
        store(after, at + 3 * LANES, state_3)
        sum_0, sum_1 = fma_lanes(state_0, query, sum_0), fma_lanes(state_1, query, sum_1)
        sum_2, sum_3 = fma_lanes(state_2, query, sum_2), fma_lanes(state_3, query, sum_3)
        at += stride
    store(out, 0, sum_0)
    store(out, LANES, sum_1)
    store(out, 2 * LANES, sum_2)
    store(out, 3 * LANES, sum_3)


@kernel
def _row_step_1(before, after, stride, column, q, k, decayed, v, shrink, strength, out):
    """As `_row_step_4` for 16 columns; v and out have only these."""
    total = splat(0)
    at = column
    for i in range(k.size):
        total = fma_lanes(load(before, at), splat(decayed[i]), total)
        at += stride
    change = (load(v, 0) - total) * strength
    total = splat(0)
    at = column
    for i in range(k.size):
        state = fma_lanes(change, splat(k[i]), load(before, at) * splat(shrink[i]))
        store(after, at, state)
        total = fma_lanes(state, splat(q[i]), total)
        at += stride
    store(out, 0, total)


@task_kernel(
    **{
        "q": reads(HEADS),
        "k": reads(HEADS),
        "v": reads(HEADS),
        "out": writes(HEADS),
        "alpha": reads(ROWS),
        "beta": reads(ROWS),
    },
    **{"decay": CONSTANT, "bias": CONSTANT, "decays": INT, "tiled": INT, "epsilon": REAL, "scale": REAL},
    **{"lower_bound": REAL, **SEQUENCES},
)
def delta_rule(task, number):
    """The gated delta rule for one sequence, one value head and up to COLUMNS columns of its matrix.

    The state: a matrix float32 [k_width, stride] per head, stride the columns filled up to a multiple of LANES.

    decay: float32 [heads]; bias: of alpha, float32 [heads * decays]; decays: of a head, 1 or k_width; tiled: whether heads are;
    scale: of the queries; lower_bound: see `ops.GatedDeltaRule`.
    """
    lower_bound = np.float32(task.lower_bound)
    decays, epsilon, scale = task.decays, np.float32(task.epsilon), np.float32(task.scale)
    heads, key_heads, k_width, v_width = task.v.heads, task.k.heads, task.k.width, task.v.width
    stride = (v_width + LANES - 1) // LANES * LANES
    across = (stride + COLUMNS - 1) // COLUMNS
    sequence, head, column = number // (heads * across), number // across % heads, number % across * COLUMNS
    key_head = head % key_heads if task.tiled else head // (heads // key_heads)
    rows, states = view(task.ranges + 16 * sequence, 2, np.int64), view(task.states + 16 * sequence, 2, np.int64)
    place = task.offset + 4 * head * k_width * stride
    before = view(states[0] + place, k_width * stride, np.float32)
    after = view(states[1] + place, k_width * stride, np.float32)
    decay, bias = view(task.decay, heads, np.float32)[head], view(task.bias + 4 * head * decays, decays, np.float32)
    columns = min(COLUMNS, stride - column)
    used = min(COLUMNS, v_width - column)
    q, k = np.empty(k_width, np.float32), np.empty(k_width, np.float32)
    shrink, decayed = np.empty(decays, np.float32), np.empty(k_width, np.float32)
    v, out = np.zeros(COLUMNS, np.float32), np.empty(COLUMNS, np.float32)
    for t in range(rows[0], rows[0] + rows[1]):
        _unit(head_of(task.q, t, key_head, 0, k_width), scale, epsilon, q)
        _unit(head_of(task.k, t, key_head, 0, k_width), np.float32(1), epsilon, k)
        values = head_of(task.v, t, head, column, used)
        for j in range(used):
            v[j] = values[j]
        alpha = row_of(task.alpha, t, head * decays, decays)
        beta = row_of(task.beta, t, head, 1)[0]
        for i in range(decays):
            x = alpha[i] + bias[i]
            if lower_bound != 0:
                shrink[i] = exp(lower_bound / (np.float32(1) + exp(-abs(decay) * x)))
            else:
                shrink[i] = exp(decay * softplus(x))
        strength = np.float32(1) / (np.float32(1) + exp(-beta))
        if decays > 1:
            for i in range(k_width):
                decayed[i] = shrink[i] * k[i]
        if columns == COLUMNS and decays == 1:
            _step_4(before, after, stride, column, q, k, v, shrink[0], strength, out)
        elif columns == COLUMNS:
            _row_step_4(before, after, stride, column, q, k, decayed, v, shrink, strength, out)
        for first in range(0, columns if columns < COLUMNS else 0, LANES):
            if decays == 1:
                _step_1(before, after, stride, column + first, q, k, v[first:], shrink[0], strength, out[first:])
            else:
                _row_step_1(before, after, stride, column + first, q, k, decayed, v[first:], shrink, strength, out[first:])
        before = after
        result = head_of(task.out, t, head, column, used)
        for j in range(used):
            result[j] = out[j]
