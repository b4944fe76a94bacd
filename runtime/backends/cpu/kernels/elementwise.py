"""What happens between matrix products: normalisation, gated activations, rotation of heads, the choice of experts.

Each is a part (see `team`) over runs of rows or elements, and a kernel that shares the parts out when there are enough to be
worth it. Every number is computed in one order, whatever the run it is in and the thread that takes it.
"""

from __future__ import annotations

import numpy as np

from .....simd.compile import kernel
from .....simd.exponential import exp, exp_lanes
from .....simd.lanes import LANES, load, min_lanes, select, splat, store
from .....simd.memory import view
from .....simd.team import part, run

RUN = 16384  # elements of one part: some microseconds
WIDTH = 256  # columns of one part, where rows are added up
_HUGE = 1e30
SILU, GELU, CLAMPED_SWISH, SQUARED_RELU = range(4)

_FAST = {"reassoc", "nsz", "contract"}  # sums over a row in whatever order is fastest: the same one at every call


@kernel
def launch(team, function, table, parts):
    """A program of one task: `function` with the address of the table as argument."""
    program = np.empty((1, 4), np.int64)
    program[0, 0], program[0, 1], program[0, 2], program[0, 3] = 0, function, table.ctypes.data, parts
    run(team if parts > 1 else 0, program)


@kernel(fastmath=_FAST)
def mean_square(row):
    total = np.float32(0)
    for i in range(row.size):
        total += row[i] * row[i]
    return total / np.float32(row.size)


@kernel
def normalise_row(row, weight, epsilon, out):
    inverse = np.float32(1) / np.sqrt(mean_square(row) + epsilon)
    for i in range(row.size):
        out[i] = row[i] * inverse * weight[i]


@kernel(fastmath=_FAST)
def mean(row):
    total = np.float32(0)
    for i in range(row.size):
        total += row[i]
    return total / np.float32(row.size)


@kernel
def centre(x, out):
    """Rows of x minus their mean: float32 x and out [rows, size] (may be one array)."""
    for r in range(len(x)):
        shift = mean(x[r])
        for i in range(x.shape[1]):
            out[r, i] = x[r, i] - shift


@part
def centre_part(argument, number):
    """Table: x, out, rows, size."""
    table = view(argument, 4, np.int64)
    rows, size = table[2], table[3]
    x, out = view(table[0], rows * size, np.float32), view(table[1], rows * size, np.float32)
    centre(x.reshape(rows, size), out.reshape(rows, size))


@kernel(fastmath=_FAST)
def product(a, b):
    total = np.float32(0)
    for i in range(a.size):
        total += a[i] * b[i]
    return total


@kernel
def share(x, gate, out):
    """Rows of out times sigmoid(x . gate) of their rows of x: float32 x and out [n, size], gate [size]."""
    for r in range(len(x)):
        divisor = np.float32(1) + exp(-product(x[r], gate))
        for i in range(out.shape[1]):
            out[r, i] /= divisor


@part
def share_part(argument, number):
    """Table: x, gate, out, size: of one row."""
    table = view(argument, 4, np.int64)
    size = table[3]
    x, out = view(table[0], size, np.float32).reshape(1, size), view(table[2], size, np.float32).reshape(1, size)
    share(x, view(table[1], size, np.float32), out)


@part
def normalise_part(argument, number):
    """Table: x, weight, out, rows, size, epsilon (float64), rows per part."""
    table, epsilon = view(argument, 7, np.int64), np.float32(view(argument, 7, np.float64)[5])
    size, step = table[4], table[6]
    weight = view(table[1], size, np.float32)
    for r in range(number * step, min(table[3], (number + 1) * step)):
        row, out = view(table[0] + 4 * size * r, size, np.float32), view(table[2] + 4 * size * r, size, np.float32)
        normalise_row(row, weight, epsilon, out)


@kernel
def normalise(team, function, x, weight, epsilon, out):
    """Rows of x / sqrt(mean of their squares + epsilon) * weight: float32 x and out [rows, size] (may be one array)."""
    rows, size = x.shape
    if rows * size <= RUN:
        for r in range(rows):
            normalise_row(x[r], weight, np.float32(epsilon), out[r])
        return
    table = np.empty(7, np.int64)
    step = max(1, RUN // size)
    table[0], table[1], table[2] = x.ctypes.data, weight.ctypes.data, out.ctypes.data
    table[3], table[4], table[6] = rows, size, step
    table.view(np.float64)[5] = epsilon
    launch(team, function, table, -(-rows // step))


@kernel
def _gate(x, y, slope, bend, limit, shift):
    """x / (1 + e^u) * y for sixteen x and y, where u = x (slope + bend x^2); x is kept below the limit, y within +-limit, and
    then shifted. NaN stays NaN."""
    x, y = select(x > limit, splat(limit), x), select(y > limit, splat(limit), y)
    y = select(y < -limit, splat(-limit), y) + shift
    square = min_lanes(x * x, splat(_HUGE))  # bend 0 times infinity would be NaN
    return x / (exp_lanes(x * (square * bend + slope)) + 1) * y


@kernel
def gate_run(kind, gate, up, out, limit):
    """out = activation(gate) * up, element by element; out may be gate or up.

    kind: SILU, GELU (the tanh form), CLAMPED_SWISH: gate and up are kept within +-limit (gate only from above), the result is
    gate * sigmoid(1.702 gate) * (up + 1) (gpt-oss); or SQUARED_RELU: max(gate, 0)^2 * up.
    """
    if kind == SQUARED_RELU:
        for i in range(out.size):
            value = gate[i] if gate[i] > 0 or gate[i] != gate[i] else np.float32(0)
            out[i] = value * value * up[i]
        return
    slope, bend, most, shift = np.float32(-1), np.float32(0), np.float32(np.inf), np.float32(0)
    if kind == GELU:
        # x / 2 * (1 + tanh(u)) = x * sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
        slope, bend = np.float32(-1.5957691216), np.float32(-0.07135481282)
    elif kind == CLAMPED_SWISH:
        slope, most, shift = np.float32(-1.702), np.float32(limit), np.float32(1)
    x, y = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    for i in range(0, out.size, LANES):
        if i + LANES <= out.size:
            store(out, i, _gate(load(gate, i), load(up, i), slope, bend, most, shift))
        else:
            for j in range(LANES):
                at = min(i + j, out.size - 1)
                x[j], y[j] = gate[at], up[at]
            store(x, 0, _gate(load(x, 0), load(y, 0), slope, bend, most, shift))
            for j in range(out.size - i):
                out[i + j] = x[j]


@part
def gate_part(argument, number):
    """Table: kind, gate, up, out, elements, elements per part, limit (float64)."""
    table, limit = view(argument, 7, np.int64), np.float32(view(argument, 7, np.float64)[6])
    first = number * table[5]
    size, at = min(table[5], table[4] - first), 4 * first
    gate, up = view(table[1] + at, size, np.float32), view(table[2] + at, size, np.float32)
    gate_run(table[0], gate, up, view(table[3] + at, size, np.float32), limit)


@kernel
def gated(team, function, kind, gate, up, limit):
    """gate = activation(gate) * up as in gate_run, float32 [n, size] both."""
    table = np.empty(7, np.int64)
    table[0], table[1], table[2], table[3] = kind, gate.ctypes.data, up.ctypes.data, gate.ctypes.data
    table[4], table[5] = gate.size, RUN
    table.view(np.float64)[6] = limit
    launch(team, function, table, -(-gate.size // RUN))


@part
def add_part(argument, number):
    """Table: rows, factors, places, out, number of rows, size; part: a run of WIDTH columns."""
    table = view(argument, 6, np.int64)
    n, size, first = table[4], table[5], number * WIDTH
    width = min(WIDTH, size - first)
    factors, places = view(table[1], n, np.float32), view(table[2], n, np.int64)
    for i in range(n):
        row = view(table[0] + 4 * (i * size + first), width, np.float32)
        out = view(table[3] + 4 * (places[i] * size + first), width, np.float32)
        factor = factors[i]
        for j in range(width):
            out[j] += factor * row[j]


@kernel
def add_rows(team, function, rows, factors, places, out):
    """out[places[i]] += factors[i] * rows[i], one i after the other: float32 rows [n, size], factors [n], out [.., size]; int64
    places [n]."""
    table = np.empty(6, np.int64)
    table[0], table[1], table[2], table[3] = rows.ctypes.data, factors.ctypes.data, places.ctypes.data, out.ctypes.data
    table[4], table[5] = rows.shape
    launch(team, function, table, -(-rows.shape[1] // WIDTH))


@part
def rotate_part(argument, number):
    """Table: x, bytes from token to token and from head to head, tokens, heads, turns, pairs, interleaved, tokens per part."""
    table = view(argument, 9, np.int64)
    pairs, step = table[6], table[8]
    for t in range(number * step, min(table[3], (number + 1) * step)):
        turns = view(table[5] + 8 * pairs * t, 2 * pairs, np.float32)
        for h in range(table[4]):
            head = view(table[0] + t * table[1] + h * table[2], 2 * pairs, np.float32)
            if table[7]:
                for p in range(pairs):
                    a, b, c, s = head[2 * p], head[2 * p + 1], turns[2 * p], turns[2 * p + 1]
                    head[2 * p], head[2 * p + 1] = a * c - b * s, a * s + b * c
            else:
                for p in range(pairs):
                    a, b, c, s = head[p], head[p + pairs], turns[2 * p], turns[2 * p + 1]
                    head[p], head[p + pairs] = a * c - b * s, a * s + b * c


@kernel
def rotate(team, function, x, turns, interleaved):
    """Turns pairs of the first elements of heads: x float32 [n, heads, size], turns complex64 [n, pairs]; as `Rope.rotate`."""
    n, heads, size = x.shape
    table = np.empty(9, np.int64)
    step = max(1, RUN // (heads * size))
    table[0], table[1], table[2], table[3], table[4] = x.ctypes.data, x.strides[0], x.strides[1], n, heads
    table[5], table[6], table[7], table[8] = turns.ctypes.data, turns.shape[1], interleaved, step
    launch(team, function, table, -(-n // step))


@kernel
def _best(scores, allowed, count, found):
    """The places of the `count` highest scores among those allowed, best first; of equals the first."""
    for k in range(count):
        best = -1
        for i in range(scores.size):
            if allowed[i] and (best < 0 or scores[i] > scores[best]):
                best = i
        found[k] = best
        allowed[best] = False


@kernel
def route(scores, sigmoid, bias, groups, groups_used, normalised, scale, experts, weights):
    """Chooses experts: as `moe.Router`, which says what the options mean.

    scores: float32 [n, experts] of the router's product, overwritten; bias: float32 [experts], or [0] for none;
    experts int64 [n, used] and weights float32 [n, used] are the results, best first.
    """
    n, count = scores.shape
    used, size = experts.shape[1], count // groups
    allowed, open_groups, strength = np.empty(count, np.bool_), np.empty(groups, np.bool_), np.empty(groups, np.float32)
    chosen_groups, choice = np.empty(groups_used, np.int64), np.empty(count, np.float32)
    for t in range(n):
        row = scores[t]
        if sigmoid:
            for i in range(count):
                row[i] = np.float32(1) / (np.float32(1) + exp(-row[i]))
        else:
            top, total = row[0], np.float32(0)
            for i in range(count):
                top = max(top, row[i])
            for i in range(count):
                row[i] = exp(row[i] - top)
                total += row[i]
            for i in range(count):
                row[i] /= total
        for i in range(count):
            choice[i] = row[i] + bias[i] if bias.size else row[i]
        for i in range(count):
            allowed[i] = groups == 1
        if groups > 1:
            for g in range(groups):
                first, second = np.float32(-np.inf), np.float32(-np.inf)
                for i in range(g * size, (g + 1) * size):
                    if choice[i] > first:
                        first, second = choice[i], first
                    elif choice[i] > second:
                        second = choice[i]
                strength[g] = first + second if sigmoid and size > 1 else first
                open_groups[g] = True
            _best(strength, open_groups, groups_used, chosen_groups)
            for g in chosen_groups:
                for i in range(g * size, (g + 1) * size):
                    allowed[i] = True
        _best(choice, allowed, used, experts[t])
        total = np.float32(0)
        for k in range(used):
            weights[t, k] = row[experts[t, k]]
            total += weights[t, k]
        factor = np.float32(scale)
        if normalised:
            factor /= max(total, np.float32(1e-20))
        for k in range(used):
            weights[t, k] *= factor
