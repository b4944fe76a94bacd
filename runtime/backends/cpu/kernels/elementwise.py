"""Normalisation, gated activations, dot products and routing to experts, of rows or runs of elements.

Task kernels call them. Every sum has a fixed order, whatever run of elements it is in.
"""

from __future__ import annotations

import math

import numpy as np

from .....simd.compile import kernel
from .....simd.exponential import exp, exp_lanes, one_plus_exp_lanes
from .....simd.lanes import LANES, load, min_lanes, select, splat, store
from .....simd.memory import prefetch_elements

_HUGE = 1e30
_GELU_LIMIT = 30.0
SILU, GELU, CLAMPED_SWISH, SQUARED_RELU, SIGMOID, IDENTITY, CLAMPED_SILU, GELU_ERF = range(8)
SOFTMAX, SIGMOID_SCORES, SQRT_SOFTPLUS = range(3)  # how a router's logits become scores

_FAST = {"reassoc", "nsz", "contract"}  # the compiler chooses the order of a row's sum, which is then the same at every call


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


@kernel(fastmath=_FAST)
def product(a, b):
    total = np.float32(0)
    for i in range(a.size):
        total += a[i] * b[i]
    return total


@kernel
def _gate(x, y, slope, cubic, limit, shift):
    """x / (1 + e^u) * (y + shift) for sixteen x and y, where u = x (slope + cubic x^2); before, x is clamped to at most the
    limit, and y to +-limit. NaN stays NaN."""
    x, y = select(x > limit, splat(limit), x), select(y > limit, splat(limit), y)
    y = select(y < -limit, splat(-limit), y) + shift
    square = min_lanes(x * x, splat(_HUGE))  # a cubic of 0 times infinity would be NaN
    return x / one_plus_exp_lanes(x * (square * cubic + slope)) * y


@kernel
def _gelu_erf(x):
    """x / 2 * (1 + erf(x / sqrt(2))) for sixteen x, erf by Abramowitz and Stegun, 7.1.26 (absolute error 1.5e-7). NaN stays."""
    size = select(x > 0, x, -x)
    size = select(size > splat(_GELU_LIMIT), splat(_GELU_LIMIT), size)  # erf is 1 there; infinity times 0 would be NaN
    t = splat(1) / (size * np.float32(0.3275911 * 0.7071067811865476) + 1)
    series = t * np.float32(1.061405429) + np.float32(-1.453152027)
    series = series * t + np.float32(1.421413741)
    series = series * t + np.float32(-0.284496736)
    series = (series * t + np.float32(0.254829592)) * t
    rest = size * series * exp_lanes(size * size * np.float32(-0.5)) * np.float32(0.5)
    return select(x > 0, x - rest, -rest)


@kernel
def _activated(activation, x, y, slope, cubic, limit, shift):
    """`_gate`; y times `_gelu_erf`, or the sigmoid of x; or, for CLAMPED_SILU, the silu of x, at most the limit, times y within
    +-limit."""
    if activation == GELU_ERF:
        return _gelu_erf(x) * y
    if activation == SIGMOID:
        return y / (exp_lanes(x * slope) + 1)  # not one_plus_exp_lanes, with which NaN, of x alone, would not stay
    if activation == CLAMPED_SILU:
        x = x / one_plus_exp_lanes(x * slope)
        x, y = select(x > limit, splat(limit), x), select(y > limit, splat(limit), y)
        return x * select(y < -limit, splat(-limit), y)
    return _gate(x, y, slope, cubic, limit, shift)


@kernel
def gate_run(activation, gate, up, out, limit, gate_ahead, up_ahead):
    """out = activation(gate) * up, element by element; out may be gate or up.

    activation: SILU, GELU (the tanh form), GELU_ERF (without approximation), SIGMOID, CLAMPED_SWISH: gate * sigmoid(1.702 gate)
    * (up + 1) of gate clamped to at most the limit and up to +-limit (gpt-oss); CLAMPED_SILU: the silu and up clamped likewise
    (Step-3.5); SQUARED_RELU: max(gate, 0)^2 * up; or IDENTITY: gate * up. A limit above 0 clamps gate and up of SILU too
    (DeepSeek-V4). gate_ahead, up_ahead: how many elements ahead gate and up are prefetched; 0: nothing further.
    """
    if activation == IDENTITY:
        for i in range(out.size):
            out[i] = gate[i] * up[i]
        return
    if activation == SQUARED_RELU:
        for i in range(out.size):
            value = gate[i] if gate[i] > 0 or gate[i] != gate[i] else np.float32(0)
            out[i] = value * value * up[i]
        return
    slope, cubic, bound, shift = np.float32(-1), np.float32(0), np.float32(np.inf), np.float32(0)
    if activation == GELU:
        # x / 2 * (1 + tanh(u)) = x * sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
        slope, cubic = np.float32(-1.5957691216), np.float32(-0.07135481282)
    elif activation == CLAMPED_SWISH:
        slope, bound, shift = np.float32(-1.702), np.float32(limit), np.float32(1)
    elif activation == CLAMPED_SILU or (activation == SILU and limit > 0):
        bound = np.float32(limit)
    whole = out.size // LANES * LANES
    if activation == SILU and bound == np.float32(np.inf):
        for i in range(0, whole, LANES):
            prefetch_elements(gate, i + gate_ahead, LANES)
            prefetch_elements(up, i + up_ahead, LANES)
            value = load(gate, i)
            store(out, i, value / one_plus_exp_lanes(splat(0) - value) * (load(up, i) + 0))
    else:
        for i in range(0, whole, LANES):
            prefetch_elements(gate, i + gate_ahead, LANES)
            prefetch_elements(up, i + up_ahead, LANES)
            store(out, i, _activated(activation, load(gate, i), load(up, i), slope, cubic, bound, shift))
    if whole < out.size:
        x, y = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
        for j in range(LANES):
            at = min(whole + j, out.size - 1)
            x[j], y[j] = gate[at], up[at]
        store(x, 0, _activated(activation, load(x, 0), load(y, 0), slope, cubic, bound, shift))
        for j in range(out.size - whole):
            out[whole + j] = x[j]


@kernel
def _top_k(scores, allowed, count, indices):
    """Writes the indices of the `count` highest scores among those allowed, best first; of equal ones the first. They are no
    longer allowed then."""
    for k in range(count):
        best = -1
        for i in range(scores.size):
            if allowed[i] and (best < 0 or scores[i] > scores[best]):
                best = i
        indices[k] = best
        allowed[best] = False


@kernel
def sqrt_softplus(x):
    """The square root of log(1 + e^x) of a float32, computed in float64."""
    x = np.float64(x)
    return np.float32(math.sqrt(x if x > 30 else math.log1p(math.exp(x))))


@kernel
def route(scores, gating, bias, groups, groups_used, normalised, scale, experts, weights):
    """Chooses experts: as graph.ops.Route, which says what the options mean.

    scores: float32 [n, experts], the router's logits, overwritten; gating: SOFTMAX, SIGMOID_SCORES or SQRT_SOFTPLUS; bias:
    float32 [experts], or [0] for none;
    experts int64 [n, used] and weights float32 [n, used] are the results, best first.
    """
    n, count = scores.shape
    used, size = experts.shape[1], count // groups
    allowed, open_groups, strength = np.empty(count, np.bool_), np.empty(groups, np.bool_), np.empty(groups, np.float32)
    chosen_groups, choice = np.empty(groups_used, np.int64), np.empty(count, np.float32)
    for t in range(n):
        row = scores[t]
        if gating == SIGMOID_SCORES:
            for i in range(count):
                row[i] = np.float32(1) / (np.float32(1) + exp(-row[i]))
        elif gating == SQRT_SOFTPLUS:
            for i in range(count):
                row[i] = sqrt_softplus(row[i])
        else:
            maximum, total = row[0], np.float32(0)
            for i in range(count):
                maximum = max(maximum, row[i])
            for i in range(count):
                row[i] = exp(row[i] - maximum)
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
                strength[g] = first + second if gating == SIGMOID_SCORES and size > 1 else first
                open_groups[g] = True
            _top_k(strength, open_groups, groups_used, chosen_groups)
            for g in chosen_groups:
                for i in range(g * size, (g + 1) * size):
                    allowed[i] = True
        _top_k(choice, allowed, used, experts[t])
        total = np.float32(0)
        for k in range(used):
            weights[t, k] = row[experts[t, k]]
            total += weights[t, k]
        factor = np.float32(scale)
        if normalised:
            factor /= max(total, np.float32(1e-20))
        for k in range(used):
            weights[t, k] *= factor
