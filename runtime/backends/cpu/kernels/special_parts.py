"""Operations of single families of models, as parts like those of row_parts: apart from these, which nearly all models need."""

from __future__ import annotations

import math

import numpy as np

from .....simd.compile import kernel
from .....simd.exponential import exp
from .....simd.memory import view
from .....simd.team import part
from .experts import reduce_experts
from .row_parts import cell, row_view


@part
def xielu(argument, number):
    """As graph.special_ops.Xielu. Table: ..., x, out (each with its row bytes), alpha_p, alpha_n, beta, epsilon (float64)."""
    table, real = view(argument, 12, np.int64), view(argument, 12, np.float64)
    first, stop, column, width = cell(table, number)
    alpha_p, alpha_n, beta, epsilon = np.float32(real[8]), np.float32(real[9]), np.float32(real[10]), np.float32(real[11])
    for r in range(first, stop):
        x, out = row_view(table[4], table[5], r, column, width), row_view(table[6], table[7], r, column, width)
        for j in range(width):
            value = x[j]
            if value > 0:
                out[j] = alpha_p * value * value + beta * value
            else:
                # In float64: the C library's last bit does not show.
                out[j] = alpha_n * (np.float32(math.expm1(np.float64(min(value, epsilon)))) - value) + beta * value


@part
def clamp(argument, number):
    """out = x limited to +-limit. Table: ..., x, out (each with its row bytes), limit (float64)."""
    table, limit = view(argument, 9, np.int64), np.float32(view(argument, 9, np.float64)[8])
    first, stop, column, width = cell(table, number)
    for r in range(first, stop):
        x, out = row_view(table[4], table[5], r, column, width), row_view(table[6], table[7], r, column, width)
        for j in range(width):
            out[j] = min(max(x[j], -limit), limit) if x[j] == x[j] else x[j]


@kernel
def _softplus(x):
    """log(1 + e^x), computed in float64."""
    return x if x > np.float32(20) else np.float32(math.log1p(math.exp(np.float64(x))))


@part
def softplus_gate(argument, number):
    """out = x * softplus(gate). Table: ..., x, gate, out (each with its row bytes), numbers of x for each of the gate."""
    table = view(argument, 11, np.int64)
    first, stop, _, width = cell(table, number)
    share = table[10]
    for r in range(first, stop):
        x, out = row_view(table[4], table[5], r, 0, width), row_view(table[8], table[9], r, 0, width)
        gate = row_view(table[6], table[7], r, 0, width // share)
        for i in range(gate.size):
            factor = _softplus(gate[i])
            for j in range(i * share, (i + 1) * share):
                out[j] = x[j] * factor


@part
def sparse_mixer_part(argument, number):
    """Chooses the experts of a run of tokens by SparseMixer: see graph.ops.Route. Table: as experts.route_part, where the scale
    is the jitter."""
    table, real = view(argument, 17, np.int64), view(argument, 17, np.float64)
    first, experts, used, jitter = number * table[1], table[5], table[11], np.float32(2 * real[15])
    for t in range(first, min(table[0], first + table[1])):
        logits = view(table[4] + 4 * t * experts, experts, np.float32)
        chosen, weights = view(table[12] + 8 * t * used, used, np.int64), view(table[13] + 4 * t * used, used, np.float32)
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
        if table[14]:
            reduce_experts(chosen, weights, table[14], np.float32(real[16]), False)


@kernel
def _contains(numbers, count, number):
    among = False
    for i in range(count):
        among |= numbers[i] == number
    return among
