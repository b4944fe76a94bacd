"""The search of iq2_kl: 32 pairs of values, one for every two weights (docs/formats/encoders.md, iq2_kl).

At an inverse scale `id` the pair (g1, g2) costs, up to a constant, c - 2 id p with c = w1 g1^2 + w2 g2^2 and
p = w1 x1 g1 + w2 x2 g2. Neither depends on the scale, so both are computed once for all pairs of the table, and a trial of a
scale takes two operations per pair. So every pair is tried, where ik_llama.cpp takes the nearest values of both weights and, if
that is no pair of the table, the best of eight neighbours. The sixteen pairs of weights of a block are the lanes.
"""

from __future__ import annotations

import numpy as np

from ....formats.layouts.tables import IQ2_KL_PAIRS
from ....simd.compile import kernel
from ....simd.lanes import LANES, fma_lanes, load, min_lanes, reduce_sum, select, splat, store
from .table_search import MIN_AMAX, signed_max

BLOCK = 32
ENTRIES = 32

# Where trials put the largest weight, as multiples of the lowest value; weights beyond that are clipped.
TRIAL_FACTORS = np.geomspace(0.85, 2.5, 8, dtype=np.float32)

# float32 [32, 2]: the values of two neighbours that a code stands for
PAIRS = IQ2_KL_PAIRS.astype(np.float32)


@kernel
def pair_terms(x, w, scratch, p, c):
    """p and c of all table pairs for a block (float32 x, w [32]) as arrays of lanes [32 * LANES].

    Lane i is that of weights 2i and 2i + 1. scratch: float32 [4 * LANES].
    """
    for i in range(LANES):
        scratch[i], scratch[i + LANES] = x[2 * i], x[2 * i + 1]
        scratch[i + 2 * LANES], scratch[i + 3 * LANES] = w[2 * i], w[2 * i + 1]
    w1, w2 = load(scratch, 2 * LANES), load(scratch, 3 * LANES)
    wx1, wx2 = w1 * load(scratch, 0), w2 * load(scratch, LANES)
    for k in range(ENTRIES):
        g1, g2 = PAIRS[k, 0], PAIRS[k, 1]
        store(p, k * LANES, fma_lanes(wx1, splat(g1), wx2 * g2))
        store(c, k * LANES, fma_lanes(w1, splat(g1 * g1), w2 * (g2 * g2)))


@kernel
def _better_pair(scaled, p, c, xq, cost):
    """p and the cost of a pair where that is less than the cost so far."""
    trial = fma_lanes(scaled, p, c)
    return select(trial < cost, p, xq), min_lanes(trial, cost)


@kernel
def _better_sums(xq, qq, fit):
    """The better one of a fit (sxq^2, sxq, sqq) and of that with the sums of these lanes."""
    best, _, best_qq = fit
    sxq, sqq = reduce_sum(xq), reduce_sum(qq)
    better = sqq > 0 and sxq * sxq * best_qq > best * sqq
    return (sxq * sxq, sxq, sqq) if better else fit


@kernel
def search_pairs(x, p, c):
    """The scale of least weighted error of a block (float32 x [32]; p and c from pair_terms); 0 for a block of zeros.

    Factors around the one that puts the largest weight on the lowest value are tried with both signs; the scale is refitted to
    the pairs of each.
    """
    signed_max_x = signed_max(x)
    if abs(signed_max_x) < MIN_AMAX:
        return np.float32(0)
    fit, step = (np.float32(0), np.float32(0), np.float32(1)), np.float32(2) * PAIRS[0, 0]
    for first in range(0, TRIAL_FACTORS.size, 2):  # two at a time: each waits for its last pair
        scaled = step * TRIAL_FACTORS[first] / signed_max_x
        scaled2 = step * TRIAL_FACTORS[first + 1] / signed_max_x
        plus, minus, plus2, minus2 = splat(scaled), splat(-scaled), splat(scaled2), splat(-scaled2)
        xq = xq_minus = xq2 = xq2_minus = load(p, 0)
        cost, cost_minus = fma_lanes(minus, xq, load(c, 0)), fma_lanes(plus, xq, load(c, 0))
        cost2, cost2_minus = fma_lanes(minus2, xq, load(c, 0)), fma_lanes(plus2, xq, load(c, 0))
        for k in range(1, ENTRIES):
            pk, ck = load(p, k * LANES), load(c, k * LANES)
            xq, cost = _better_pair(minus, pk, ck, xq, cost)
            xq_minus, cost_minus = _better_pair(plus, pk, ck, xq_minus, cost_minus)
            xq2, cost2 = _better_pair(minus2, pk, ck, xq2, cost2)
            xq2_minus, cost2_minus = _better_pair(plus2, pk, ck, xq2_minus, cost2_minus)
        fit = _better_sums(xq, fma_lanes(plus, xq, cost), fit)
        fit = _better_sums(xq_minus, fma_lanes(minus, xq_minus, cost_minus), fit)
        fit = _better_sums(xq2, fma_lanes(plus2, xq2, cost2), fit)
        fit = _better_sums(xq2_minus, fma_lanes(minus2, xq2_minus, cost2_minus), fit)
    return fit[1] / fit[2]


@kernel
def score_pairs(p, c, scale):
    """Weighted squared error of a block with the best pairs at a scale, less that of the block as zeros."""
    if scale == 0:
        return np.float32(0)
    minus = splat(np.float32(-2) / scale)
    cost = fma_lanes(minus, load(p, 0), load(c, 0))
    for k in range(LANES, ENTRIES * LANES, LANES):
        cost = min_lanes(fma_lanes(minus, load(p, k), load(c, k)), cost)
    return reduce_sum(cost) * scale * scale


@kernel
def assign_pairs(p, c, scale, codes):
    """The best pairs of a block at a scale: codes uint8 [16]. Returns the sums of w x q and of w q q over the block."""
    minus = splat(np.float32(-2) / scale if scale != 0 else np.float32(0))
    cost, index = fma_lanes(minus, load(p, 0), load(c, 0)), splat(np.float32(0))
    for k in range(1, ENTRIES):
        trial = fma_lanes(minus, load(p, k * LANES), load(c, k * LANES))
        index, cost = select(trial < cost, splat(np.float32(k)), index), min_lanes(trial, cost)
    store(codes, 0, index)
    sxq = sqq = np.float32(0)
    for i in range(LANES):
        sxq += p[codes[i] * LANES + i]
        sqq += c[codes[i] * LANES + i]
    return sxq, sqq
