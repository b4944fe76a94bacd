"""Runs of tokens that share an entry (DeepSeek-V4), and the last tokens of a sequence, as parts for programs (see simd.team).

Operands are SEQUENCES (see recurrent) and `lengths`, int64 [sequences]: tokens before the pass. A state has a row, `stride`
numbers apart, for each of the last `size` tokens, at its position modulo `size`.
"""

from __future__ import annotations

import numpy as np

from .....simd.compile import kernel
from .....simd.exponential import exp
from .....simd.memory import fill, view
from .recurrent import CHANNELS, SEQUENCES
from .task_kernel import CONSTANT, INT, ROWS, reads, row_of, task_kernel, writes

ROW_STEP = 32  # rows of a part of `keep_last`
_LOWEST = np.float32(-np.inf)


@kernel
def _copy(source, out):
    for j in range(out.size):
        out[j] = source[j]


@kernel
def _last_position(end, place, size):
    """The last position before `end` whose row is at a place; negative: there is none."""
    return end - 1 - (end - 1 - place) % size


@kernel
def _numbers(task, state, past, first, position, column, width):
    """Numbers of the token at a position, from a column on; state: address of the one that is read."""
    if position < past:
        return view(state + 4 * (task.stride * (position % task.size) + column), width, np.float32)
    return row_of(task.x, first + position - past, column, width)


@kernel
def _gates(task, state, past, first, position, column, out):
    """Writes the token's gates, with their biases, from a column on."""
    channels = task.series * task.width
    if position < past:
        _copy(view(state + 4 * (task.stride * (position % task.size) + channels + column), out.size, np.float32), out)
        return
    gates = row_of(task.gate, first + position - past, column, out.size)
    bias = view(task.bias + 4 * (position % task.every * channels + column), out.size, np.float32)
    for j in range(out.size):
        out[j] = gates[j] + bias[j]


@task_kernel(
    **{"x": reads(ROWS), "gate": reads(ROWS), "out": writes(ROWS), "bias": CONSTANT, **SEQUENCES, "lengths": CONSTANT},
    **dict.fromkeys(("width", "series", "every", "size", "stride"), INT),
)
def compress(task, number):
    """`Compress` for some columns of one sequence's entries. State: of the last `series` runs of `every` tokens, x and then
    gate + bias.

    bias: float32 [every, series * width]. Without gates (address 0, one series) all tokens of a run weigh the same, and a
    state's rows are x alone.
    """
    parts, series, every = (task.width + CHANNELS - 1) // CHANNELS, task.series, task.every
    sequence, column = number // parts, number % parts * CHANNELS
    width, channels = min(CHANNELS, task.width - column), series * task.width
    rows, states = view(task.ranges + 16 * sequence, 2, np.int64), view(task.states + 16 * sequence, 2, np.int64)
    first, n, past = rows[0], rows[1], view(task.lengths + 8 * sequence, 1, np.int64)[0]
    before, after = states[0] + task.offset, states[1] + task.offset
    gates, highest, sums = np.empty(width, np.float32), np.empty(width, np.float32), np.empty(width, np.float32)
    for t in range(n):
        fill(row_of(task.out, first + t, column, width), 0)
    for run in range(past // every, (past + n) // every):
        out = row_of(task.out, first + (run + 1) * every - 1 - past, column, width)
        fill(highest, _LOWEST)
        fill(sums, 0)
        begin = max(0, run - series + 1) * every
        for position in range(begin, (run + 1) * every if task.gate.address else begin):
            at = column + (position // every - run + series - 1) * task.width
            _gates(task, before, past, first, position, at, gates)
            for j in range(width):
                highest[j] = max(highest[j], gates[j])
        for position in range(begin, (run + 1) * every):
            at = column + (position // every - run + series - 1) * task.width
            x = _numbers(task, before, past, first, position, at, width)
            if task.gate.address:
                _gates(task, before, past, first, position, at, gates)
                for j in range(width):
                    weight = exp(gates[j] - highest[j])
                    sums[j] += weight
                    out[j] += x[j] * weight
            else:
                for j in range(width):
                    sums[j] += np.float32(1)
                    out[j] += x[j]
        for j in range(width):
            out[j] /= sums[j]
    for i in range(task.size):
        position = _last_position(past + n, i, task.size)
        for half in range(series):
            at = column + half * task.width
            kept = view(after + 4 * (task.stride * i + at), width, np.float32)
            kept_gates = view(after + 4 * (task.stride * i + channels + at), width if task.gate.address else 0, np.float32)
            if position >= past:
                _copy(_numbers(task, before, past, first, position, at, width), kept)
                if task.gate.address:
                    _gates(task, before, past, first, position, at, kept_gates)
            else:
                _copy(view(before + 4 * (task.stride * i + at), width, np.float32), kept)
                _copy(view(before + 4 * (task.stride * i + channels + at), kept_gates.size, np.float32), kept_gates)


@task_kernel(x=reads(ROWS), **SEQUENCES, lengths=CONSTANT, **dict.fromkeys(("width", "size", "stride"), INT))
def keep_last(task, number):
    """Writes the state behind the pass, of which rows of x are the last ones: ROW_STEP rows of one sequence's."""
    parts = (task.size + ROW_STEP - 1) // ROW_STEP
    sequence, begin = number // parts, number % parts * ROW_STEP
    rows, states = view(task.ranges + 16 * sequence, 2, np.int64), view(task.states + 16 * sequence, 2, np.int64)
    past = view(task.lengths + 8 * sequence, 1, np.int64)[0]
    for i in range(begin, min(begin + ROW_STEP, task.size)):
        position = _last_position(past + rows[1], i, task.size)
        kept = view(states[1] + task.offset + 4 * task.stride * i, task.width, np.float32)
        source = states[0] + task.offset + 4 * task.stride * i
        if position >= past:
            source = task.x.address + (rows[0] + position - past) * task.x.row_bytes
        _copy(view(source, task.width, np.float32), kept)
