"""The scale search of the IQK types: for each block the scale and table (plain or shifted) of least weighted error.

ik_llama.cpp tries some sixty scales per block: 2 * ntry + 1 factors around the one that puts the largest weight on the first
table value, each with both signs and both tables (docs/formats/encoders.md, the IQK search). Here the factors are the lanes of
a vector. They differ by so little that every weight has only two or three candidate values whatever the factor
(value_tables.candidate_values), so a trial costs a comparison and two fused multiply-adds per weight. Each lane sums in
ik_llama.cpp's order, and near ties are decided as there.
"""

from __future__ import annotations

import numpy as np

from ....simd.compile import kernel
from ....simd.lanes import LANES, fma_lanes, load, mask_bits, max_lanes, reduce_max, select, splat, store
from ....simd.scalar import lowest_bit
from .value_tables import CANDIDATE_ROW, MAX_SCALED

# A block with a smaller amax counts as zero.
MIN_AMAX = np.float32(1e-16)
ORDINARY_EXPONENTS = (-10, 2)  # binary exponents of weights that are not scaled; see normalise_rows

# Trials whose score is within this factor of the best are compared again in the reference's order and arithmetic.
_NEAR_TIE = np.float32(1 - 1e-5)

_FIRST_TRIAL = LANES - 1  # the lane of the trial that precedes the loop over factors


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
    """As signed_max, for a multiple of 16 elements and without branches that depend on the data."""
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
def _compare_trial(sums, hypothesis, lane, scale, best):
    """(scale, best, whether the trial is better) by the reference's comparison of one trial."""
    sxq, sqq = sums[2 * LANES * hypothesis + lane], sums[2 * LANES * hypothesis + LANES + lane]
    if sqq > 0 and sxq * sxq > best * sqq:
        scale = sxq / sqq
        return scale, scale * sxq, True
    return scale, best, False


def _make_search(three_candidates: bool):
    """search_blocks for two or for three candidate values per weight."""

    @kernel
    def add_element(t, x, w, candidates, k, sxq, sqq):
        """The sums w x q and w q q of every trial with one more element added, which the trials scale to t: float32 lanes.

        q is the nearest of the values of the row of `candidates` that begins at k.
        """
        q = select(t >= candidates[k], splat(candidates[k + np.uintp(2)]), splat(candidates[k + np.uintp(1)]))
        if three_candidates:
            q = select(t >= candidates[k + np.uintp(3)], splat(candidates[k + np.uintp(4)]), q)
        wq = w * q
        return fma_lanes(wq, x, sxq), fma_lanes(wq, q, sqq)

    @kernel
    def search_blocks(x, w, offsets, trial_count, first_values, candidates, scales, flags):
        """Scale and flag of every block, for float32 x and weights w, both [blocks, elements per block, a multiple of LANES].

        offsets: trial_offsets(...), of which the first `trial_count` lanes count; first_values: float32 [2], the first value of
        both tables; candidates: candidate_values(...). Writes float32 scales and uint8 flags (1: shifted table), both [blocks];
        blocks of zeros get 0, 0.

        A block has four hypotheses: the plain table with positive and with negative scales, then the shifted one.
        """
        blocks, block = x.shape
        sums, near = np.empty(8 * LANES, np.float32), np.empty(4, np.int64)
        candidate_rows, candidate_rows_shifted = np.empty(block, np.uint8), np.empty(block, np.uint8)
        plain, shifted = candidates[0], candidates[1]
        zero = splat(np.float32(0))
        lane_offset = load(offsets, 0)
        for lane in range(LANES):
            sums[lane] = lane
        is_first_trial = load(sums, 0) == np.float32(_FIRST_TRIAL)
        trial_mask = (1 << trial_count) - 1
        first_plain, first_shifted = first_values[0], first_values[1]
        negative = np.uintp(CANDIDATE_ROW // 2)
        for b in range(blocks):
            xb, wb = x[b], w[b]
            signed_max_x = _block_signed_max(xb)
            if abs(signed_max_x) < MIN_AMAX:
                scales[b], flags[b] = 0, 0
                continue
            # The first trial of the reference divides in another order: its rounding differs from that of the middle factor.
            first_inverse = np.float32(1) / (-signed_max_x / first_plain)
            inverses = select(is_first_trial, splat(-first_inverse), (lane_offset + first_plain) / signed_max_x)
            inverses_shifted = (lane_offset + first_shifted) / signed_max_x
            for j in range(0, block, LANES):
                xj = load(xb, j)
                store(candidate_rows, j, xj * (first_plain / signed_max_x) + np.float32(MAX_SCALED + 0.5))
                store(candidate_rows_shifted, j, xj * (first_shifted / signed_max_x) + np.float32(MAX_SCALED + 0.5))
            sxq0 = sxq1 = sxq2 = sxq3 = sqq0 = sqq1 = sqq2 = sqq3 = zero
            for j in range(block):
                xj, wj = splat(xb[j]), splat(wb[j])
                t = inverses * xj
                k = np.uintp(candidate_rows[j]) * np.uintp(CANDIDATE_ROW)
                sxq0, sqq0 = add_element(t, xj, wj, plain, k, sxq0, sqq0)
                sxq1, sqq1 = add_element(-t, xj, wj, plain, k + negative, sxq1, sqq1)
                t = inverses_shifted * xj
                k = np.uintp(candidate_rows_shifted[j]) * np.uintp(CANDIDATE_ROW)
                sxq2, sqq2 = add_element(t, xj, wj, shifted, k, sxq2, sqq2)
                sxq3, sqq3 = add_element(-t, xj, wj, shifted, k + negative, sxq3, sqq3)
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
            better, better_shifted = n1 * sqq0 > n0 * sqq1, n3 * sqq2 > n2 * sqq3
            numerator, denominator = select(better, n1, n0), select(better, sqq1, sqq0)
            numerator2, denominator2 = select(better_shifted, n3, n2), select(better_shifted, sqq3, sqq2)
            better = numerator2 * denominator > numerator * denominator2
            numerator, denominator = select(better, numerator2, numerator), select(better, denominator2, denominator)
            threshold = reduce_max(select(denominator > np.float32(0), numerator / denominator, zero)) * _NEAR_TIE
            near[0], near[1] = mask_bits(n0 >= sqq0 * threshold), mask_bits(n1 >= sqq1 * threshold)
            near[2], near[3] = mask_bits(n2 >= sqq2 * threshold), mask_bits(n3 >= sqq3 * threshold)
            scale, best, flag = np.float32(0), np.float32(0), 0
            for hypothesis in (1, 0):  # the first trial has the opposite sign of the middle factor: negative comes first
                if near[hypothesis] >> _FIRST_TRIAL:
                    scale, best, _ = _compare_trial(sums, hypothesis, _FIRST_TRIAL, scale, best)
            near_ties = (near[0] | near[1] | near[2] | near[3]) & trial_mask
            while near_ties:
                lane = lowest_bit(near_ties)
                near_ties &= near_ties - 1
                for hypothesis in range(4):
                    if near[hypothesis] >> lane & 1:
                        scale, best, better_trial = _compare_trial(sums, hypothesis, lane, scale, best)
                        flag = hypothesis >> 1 if better_trial else flag
            scales[b], flags[b] = scale, flag

    return search_blocks


search_blocks_of_two, search_blocks_of_three = _make_search(False), _make_search(True)
