"""The scale search of the IQK types: for each block the scale and table (plain or shifted) of least weighted error.

ik_llama.cpp tries some sixty scales per block: 2 * ntry + 1 factors around the one that puts the largest weight on the first
table value, each with both signs and both tables (docs/formats/encoders.md, the IQK search). Here the factors are the lanes of
a vector. They differ by so little that every weight has only two or three candidate values whatever the factor
(value_tables.candidate_values), so a trial costs a comparison and two fused multiply-adds per weight. Each lane sums in
ik_llama.cpp's order, and near ties are decided as there.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types

from ....simd.compile import intrinsic, kernel
from ....simd.lanes import LANES, fma_lanes, load, mask_bits, max_lanes, reduce_max, select, splat, store
from .value_tables import CANDIDATE_ROW, MAX_SCALED

# A block with a smaller amax counts as zero.
MIN_AMAX = np.float32(1e-16)
ORDINARY_EXPONENTS = (-10, 2)  # binary exponents of weights that are not scaled; see normalise_rows

# Trials whose score is within this factor of the best are compared again in the reference's order and arithmetic.
_NEAR_TIE = np.float32(1 - 1e-5)

_FIRST_TRIAL = LANES - 1  # the lane of the trial that precedes the loop over factors


@intrinsic
def lowest_bit(typingctx, bits):
    """The index of the lowest set bit of an int64 that is not 0."""

    def generate(context, builder, signature, args):
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.int64), generate


@kernel
def signed_max(x):
    """The element of largest magnitude of a float32 vector (the first on ties), with its sign."""
    result, amax = np.float32(0), np.float32(0)
    for j in range(x.size):
        if abs(x[j]) > amax:
            result, amax = x[j], abs(x[j])
    return result


@kernel
def _block_signed_max(x):
    """As signed_max, for whole lanes and without branches that depend on the data."""
    lane_amax = abs(load(x, 0))
    for j in range(LANES, x.size, LANES):
        lane_amax = max_lanes(lane_amax, abs(load(x, j)))
    amax = reduce_max(lane_amax)
    for j in range(0, x.size, LANES):
        bits = mask_bits(abs(load(x, j)) == amax)
        if bits:
            return x[j + lowest_bit(bits)]
    return amax


def trial_offsets(ntry: int, step: int) -> np.ndarray:
    """What each lane adds to the first table value, float32 [LANES]; lanes beyond the 2 * ntry + 1 trials add 0."""
    steps = np.zeros(LANES, np.float32)
    steps[: 2 * ntry + 1] = np.arange(-ntry, ntry + 1) * step
    return steps


@kernel
def _compare_trial(sums, lane, hypothesis, scale, best):
    """(scale, best, whether the trial is better) by the reference's comparison of one trial."""
    sxq, sqq = sums[2 * LANES * hypothesis + lane], sums[2 * LANES * hypothesis + LANES + lane]
    if sqq > 0 and sxq * sxq > best * sqq:
        scale = sxq / sqq
        return scale, scale * sxq, True
    return scale, best, False


def _make_search(three_candidates: bool):
    """search_blocks for two or for three candidate values per weight."""

    @kernel
    def nearest_value(t, candidates, k):
        q = select(t >= candidates[k], splat(candidates[k + np.uintp(2)]), splat(candidates[k + np.uintp(1)]))
        if three_candidates:
            q = select(t >= candidates[k + np.uintp(3)], splat(candidates[k + np.uintp(4)]), q)
        return q

    @kernel
    def nearest_value_negated(t, candidates, k):
        q = select(t <= candidates[k], splat(candidates[k + np.uintp(2)]), splat(candidates[k + np.uintp(1)]))
        if three_candidates:
            q = select(t <= candidates[k + np.uintp(3)], splat(candidates[k + np.uintp(4)]), q)
        return q

    @kernel
    def search_blocks(x, w, offsets, trial_count, first_values, nearby, scales, flags):
        """Scale and flag of every block, for float32 x and weights w, both [blocks, elements per block, a multiple of LANES].

        offsets: trial_offsets(...), of which the first `trial_count` lanes count; first_values: float32 [2], the first value of
        both tables; nearby: candidate_values(...). Writes float32 scales and uint8 flags (1: shifted table), both [blocks];
        blocks of zeros get 0, 0.
        """
        blocks, block = x.shape
        sums = np.empty(8 * LANES, np.float32)
        candidate_rows, candidate_rows_shifted = np.empty(block, np.uint8), np.empty(block, np.uint8)
        candidates, candidates_shifted = nearby[0], nearby[1]
        zero = splat(np.float32(0))
        lane_offset = load(offsets, 0)
        is_first_trial = load(np.arange(LANES).astype(np.float32), 0) == np.float32(_FIRST_TRIAL)
        trial_mask = (1 << trial_count) - 1
        base, shifted = first_values[0], first_values[1]
        for b in range(blocks):
            xb, wb = x[b], w[b]
            signed_max_x = _block_signed_max(xb)
            if abs(signed_max_x) < MIN_AMAX:
                scales[b], flags[b] = 0, 0
                continue
            # The first trial of the reference divides in another order: its rounding differs from that of the middle factor.
            first_inverse = np.float32(1) / (-signed_max_x / base)
            inverses = select(is_first_trial, splat(-first_inverse), (lane_offset + base) / signed_max_x)
            inverses_shifted = (lane_offset + shifted) / signed_max_x
            for j in range(0, block, LANES):
                xj = load(xb, j)
                store(candidate_rows, j, xj * (base / signed_max_x) + np.float32(MAX_SCALED + 0.5))
                store(candidate_rows_shifted, j, xj * (shifted / signed_max_x) + np.float32(MAX_SCALED + 0.5))
            sxq0 = sxq1 = sxq2 = sxq3 = sqq0 = sqq1 = sqq2 = sqq3 = zero
            for j in range(block):
                xj, wj = splat(xb[j]), splat(wb[j])
                t = inverses * xj
                k = np.uintp(candidate_rows[j]) * np.uintp(CANDIDATE_ROW)
                q = nearest_value(t, candidates, k)
                wq = wj * q
                sxq0, sqq0 = fma_lanes(wq, xj, sxq0), fma_lanes(wq, q, sqq0)
                q = nearest_value_negated(t, candidates, k + np.uintp(CANDIDATE_ROW // 2))
                wq = wj * q
                sxq1, sqq1 = fma_lanes(wq, xj, sxq1), fma_lanes(wq, q, sqq1)
                t = inverses_shifted * xj
                k = np.uintp(candidate_rows_shifted[j]) * np.uintp(CANDIDATE_ROW)
                q = nearest_value(t, candidates_shifted, k)
                wq = wj * q
                sxq2, sqq2 = fma_lanes(wq, xj, sxq2), fma_lanes(wq, q, sqq2)
                q = nearest_value_negated(t, candidates_shifted, k + np.uintp(CANDIDATE_ROW // 2))
                wq = wj * q
                sxq3, sqq3 = fma_lanes(wq, xj, sxq3), fma_lanes(wq, q, sqq3)
            store(sums, 0, sxq0)
            store(sums, 1 * LANES, sqq0)
            store(sums, 2 * LANES, sxq1)
            store(sums, 3 * LANES, sqq1)
            store(sums, 4 * LANES, sxq2)
            store(sums, 5 * LANES, sqq2)
            store(sums, 6 * LANES, sxq3)
            store(sums, 7 * LANES, sqq3)
            # The best score sxq^2 / sqq, up to rounding: pairs are compared crosswise, to divide only once.
            n0, n1, n2, n3 = sxq0 * sxq0, sxq1 * sxq1, sxq2 * sxq2, sxq3 * sxq3
            first_pair, second_pair = n1 * sqq0 > n0 * sqq1, n3 * sqq2 > n2 * sqq3
            numerator, denominator = select(first_pair, n1, n0), select(first_pair, sqq1, sqq0)
            numerator2, denominator2 = select(second_pair, n3, n2), select(second_pair, sqq3, sqq2)
            first_pair = numerator2 * denominator > numerator * denominator2
            numerator, denominator = select(first_pair, numerator2, numerator), select(first_pair, denominator2, denominator)
            threshold = reduce_max(select(denominator > np.float32(0), numerator / denominator, zero)) * _NEAR_TIE
            in0, in1 = mask_bits(n0 >= sqq0 * threshold), mask_bits(n1 >= sqq1 * threshold)
            in2, in3 = mask_bits(n2 >= sqq2 * threshold), mask_bits(n3 >= sqq3 * threshold)
            scale, best, flag = np.float32(0), np.float32(0), 0
            if in1 >> _FIRST_TRIAL:  # that trial has the opposite signs of the middle factor: minus comes first
                scale, best, _ = _compare_trial(sums, _FIRST_TRIAL, 1, scale, best)
            if in0 >> _FIRST_TRIAL:
                scale, best, _ = _compare_trial(sums, _FIRST_TRIAL, 0, scale, best)
            near_ties = (in0 | in1 | in2 | in3) & trial_mask
            while near_ties:
                lane = lowest_bit(near_ties)
                near_ties &= near_ties - 1
                if (in0 >> lane) & 1:
                    scale, best, better = _compare_trial(sums, lane, 0, scale, best)
                    flag = 0 if better else flag
                if (in1 >> lane) & 1:
                    scale, best, better = _compare_trial(sums, lane, 1, scale, best)
                    flag = 0 if better else flag
                if (in2 >> lane) & 1:
                    scale, best, better = _compare_trial(sums, lane, 2, scale, best)
                    flag = 1 if better else flag
                if (in3 >> lane) & 1:
                    scale, best, better = _compare_trial(sums, lane, 3, scale, best)
                    flag = 1 if better else flag
            scales[b], flags[b] = scale, flag

    return search_blocks


search_blocks_of_two, search_blocks_of_three = _make_search(False), _make_search(True)
