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
    found, magnitude = np.float32(0), np.float32(0)
    for j in range(x.size):
        if abs(x[j]) > magnitude:
            found, magnitude = x[j], abs(x[j])
    return found


@kernel
def _block_signed_max(x):
    """As signed_max, for whole lanes and without branches that depend on the data."""
    tops = abs(load(x, 0))
    for j in range(LANES, x.size, LANES):
        tops = max_lanes(tops, abs(load(x, j)))
    top = reduce_max(tops)
    for j in range(0, x.size, LANES):
        bits = mask_bits(abs(load(x, j)) == top)
        if bits:
            return x[j + lowest_bit(bits)]
    return top


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


def _make_search(three: bool):
    """search_blocks for two or for three candidate values per weight."""

    @kernel
    def entry_from_below(t, near, k):
        q = select(t >= near[k], splat(near[k + np.uintp(2)]), splat(near[k + np.uintp(1)]))
        if three:
            q = select(t >= near[k + np.uintp(3)], splat(near[k + np.uintp(4)]), q)
        return q

    @kernel
    def entry_from_above(t, near, k):
        q = select(t <= near[k], splat(near[k + np.uintp(2)]), splat(near[k + np.uintp(1)]))
        if three:
            q = select(t <= near[k + np.uintp(3)], splat(near[k + np.uintp(4)]), q)
        return q

    @kernel
    def search_blocks(x, w, steps, trials, first_entries, nearby, scales, flags):
        """Scale and flag of every block, for float32 x and weights w, both [blocks, elements per block, a multiple of LANES].

        steps: trial_offsets(...), of which the first `trials` lanes count; first_entries: float32 [2], the first value of both
        tables; nearby: candidate_values(...). Writes float32 scales and uint8 flags (1: shifted table), both [blocks]; blocks
        of zeros get 0, 0.
        """
        blocks, block = x.shape
        sums = np.empty(8 * LANES, np.float32)
        rows, rows_shifted = np.empty(block, np.uint8), np.empty(block, np.uint8)
        near, near_shifted = nearby[0], nearby[1]
        zero = splat(np.float32(0))
        lane_step = load(steps, 0)
        is_first = load(np.arange(LANES).astype(np.float32), 0) == np.float32(_FIRST_TRIAL)
        tried = (1 << trials) - 1
        base, shifted = first_entries[0], first_entries[1]
        for b in range(blocks):
            xb, wb = x[b], w[b]
            mx = _block_signed_max(xb)
            if abs(mx) < MIN_AMAX:
                scales[b], flags[b] = 0, 0
                continue
            # The first trial of the reference divides in another order: its rounding differs from that of the middle factor.
            first = np.float32(1) / (-mx / base)
            ids = select(is_first, splat(-first), (lane_step + base) / mx)
            ids_shifted = (lane_step + shifted) / mx
            for j in range(0, block, LANES):
                xj = load(xb, j)
                store(rows, j, xj * (base / mx) + np.float32(MAX_SCALED + 0.5))
                store(rows_shifted, j, xj * (shifted / mx) + np.float32(MAX_SCALED + 0.5))
            xq0 = xq1 = xq2 = xq3 = qq0 = qq1 = qq2 = qq3 = zero
            for j in range(block):
                xj, wj = splat(xb[j]), splat(wb[j])
                t = ids * xj
                k = np.uintp(rows[j]) * np.uintp(CANDIDATE_ROW)
                q = entry_from_below(t, near, k)
                wq = wj * q
                xq0, qq0 = fma_lanes(wq, xj, xq0), fma_lanes(wq, q, qq0)
                q = entry_from_above(t, near, k + np.uintp(CANDIDATE_ROW // 2))
                wq = wj * q
                xq1, qq1 = fma_lanes(wq, xj, xq1), fma_lanes(wq, q, qq1)
                t = ids_shifted * xj
                k = np.uintp(rows_shifted[j]) * np.uintp(CANDIDATE_ROW)
                q = entry_from_below(t, near_shifted, k)
                wq = wj * q
                xq2, qq2 = fma_lanes(wq, xj, xq2), fma_lanes(wq, q, qq2)
                q = entry_from_above(t, near_shifted, k + np.uintp(CANDIDATE_ROW // 2))
                wq = wj * q
                xq3, qq3 = fma_lanes(wq, xj, xq3), fma_lanes(wq, q, qq3)
            store(sums, 0, xq0)
            store(sums, 1 * LANES, qq0)
            store(sums, 2 * LANES, xq1)
            store(sums, 3 * LANES, qq1)
            store(sums, 4 * LANES, xq2)
            store(sums, 5 * LANES, qq2)
            store(sums, 6 * LANES, xq3)
            store(sums, 7 * LANES, qq3)
            # The best score sxq^2 / sqq, up to rounding: pairs are compared crosswise, to divide only once.
            n0, n1, n2, n3 = xq0 * xq0, xq1 * xq1, xq2 * xq2, xq3 * xq3
            one, two = n1 * qq0 > n0 * qq1, n3 * qq2 > n2 * qq3
            top, bottom = select(one, n1, n0), select(one, qq1, qq0)
            top2, bottom2 = select(two, n3, n2), select(two, qq3, qq2)
            one = top2 * bottom > top * bottom2
            top, bottom = select(one, top2, top), select(one, bottom2, bottom)
            close = reduce_max(select(bottom > np.float32(0), top / bottom, zero)) * _NEAR_TIE
            in0, in1 = mask_bits(n0 >= qq0 * close), mask_bits(n1 >= qq1 * close)
            in2, in3 = mask_bits(n2 >= qq2 * close), mask_bits(n3 >= qq3 * close)
            scale, best, flag = np.float32(0), np.float32(0), 0
            if in1 >> _FIRST_TRIAL:  # that trial has the opposite signs of the middle factor: minus comes first
                scale, best, _ = _compare_trial(sums, _FIRST_TRIAL, 1, scale, best)
            if in0 >> _FIRST_TRIAL:
                scale, best, _ = _compare_trial(sums, _FIRST_TRIAL, 0, scale, best)
            left = (in0 | in1 | in2 | in3) & tried
            while left:
                lane = lowest_bit(left)
                left &= left - 1
                if (in0 >> lane) & 1:
                    scale, best, won = _compare_trial(sums, lane, 0, scale, best)
                    flag = 0 if won else flag
                if (in1 >> lane) & 1:
                    scale, best, won = _compare_trial(sums, lane, 1, scale, best)
                    flag = 0 if won else flag
                if (in2 >> lane) & 1:
                    scale, best, won = _compare_trial(sums, lane, 2, scale, best)
                    flag = 1 if won else flag
                if (in3 >> lane) & 1:
                    scale, best, won = _compare_trial(sums, lane, 3, scale, best)
                    flag = 1 if won else flag
            scales[b], flags[b] = scale, flag

    return search_blocks


search_blocks_of_two, search_blocks_of_three = _make_search(False), _make_search(True)
