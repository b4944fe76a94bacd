"""The scale search of the IQK types: the scale and table (plain or shifted) of least weighted error for each block (spec D.4).

The reference tries some sixty scales per block: 2 * ntry + 1 factors around the one that puts the largest weight on the first
entry, each with both signs and both tables. Here the factors lie side by side in the lanes of a vector. They differ by so
little that every weight has only two or three entries to choose from, whatever the factor (`iqk_tables.choices`), so a trial
costs a comparison and two fused multiply-adds per weight. Each lane sums in the reference's order, and a close race is decided
as the reference does.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types

from ....simd.compile import intrinsic, kernel
from ....simd.lanes import LANES, fma_lanes, load, mask_bits, max_lanes, reduce_max, select, splat, store
from .value_tables import CENTRE, CHOICE

# Below this largest magnitude a block counts as zero.
DEAD = np.float32(1e-16)
ORDINARY_EXPONENTS = (-10, 2)  # binary exponents of weights that are not scaled; see normalise_rows

# Trials whose score is within this of the best one race in the reference's order and arithmetic; any other has lost.
_CLOSE = np.float32(1 - 1e-5)

_FIRST = LANES - 1  # the lane of the trial that precedes the loop over factors


@intrinsic
def first_bit(typingctx, bits):
    """The number of the lowest set bit of an int64 that is not 0."""

    def generate(context, builder, signature, args):
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.int64), generate


@kernel
def largest_element(x):
    """The element of largest magnitude of a float32 vector, the first one of equals, with its sign."""
    found, magnitude = np.float32(0), np.float32(0)
    for j in range(x.size):
        if abs(x[j]) > magnitude:
            found, magnitude = x[j], abs(x[j])
    return found


@kernel
def _largest_of_block(x):
    """As largest_element, for a whole number of lanes and without branches that depend on the data."""
    tops = abs(load(x, 0))
    for j in range(LANES, x.size, LANES):
        tops = max_lanes(tops, abs(load(x, j)))
    top = reduce_max(tops)
    for j in range(0, x.size, LANES):
        bits = mask_bits(abs(load(x, j)) == top)
        if bits:
            return x[j + first_bit(bits)]
    return top


def trial_steps(ntry: int, step: int) -> np.ndarray:
    """What each lane adds to the first table entry, float32 [LANES]; past the 2 * ntry + 1 trials the middle one."""
    steps = np.zeros(LANES, np.float32)
    steps[: 2 * ntry + 1] = np.arange(-ntry, ntry + 1) * step
    return steps


@kernel
def _race(sums, lane, hypothesis, scale, best):
    """(scale, best, whether it won) after the reference's test of one trial."""
    sxq, sqq = sums[2 * LANES * hypothesis + lane], sums[2 * LANES * hypothesis + LANES + lane]
    if sqq > 0 and sxq * sxq > best * sqq:
        scale = sxq / sqq
        return scale, scale * sxq, True
    return scale, best, False


def _make_search(three: bool):
    """search_blocks for two or for three entries to choose between."""

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

        steps: trial_steps(...), of which the first `trials` lanes count; first_entries: float32 [2], the first entry of both
        tables; nearby: choices(...). Writes float32 scales and uint8 flags (1: shifted table), both [blocks]; dead blocks get
        0 and 0.
        """
        blocks, block = x.shape
        sums = np.empty(8 * LANES, np.float32)
        rows, rows_shifted = np.empty(block, np.uint8), np.empty(block, np.uint8)
        near, near_shifted = nearby[0], nearby[1]
        zero = splat(np.float32(0))
        lane_step = load(steps, 0)
        is_first = load(np.arange(LANES).astype(np.float32), 0) == np.float32(_FIRST)
        tried = (1 << trials) - 1
        base, shifted = first_entries[0], first_entries[1]
        for b in range(blocks):
            xb, wb = x[b], w[b]
            mx = _largest_of_block(xb)
            if abs(mx) < DEAD:
                scales[b], flags[b] = 0, 0
                continue
            # The first trial of the reference divides the other way round: its rounding differs from the middle factor's.
            first = np.float32(1) / (-mx / base)
            ids = select(is_first, splat(-first), (lane_step + base) / mx)
            ids_shifted = (lane_step + shifted) / mx
            for j in range(0, block, LANES):
                xj = load(xb, j)
                store(rows, j, xj * (base / mx) + np.float32(CENTRE + 0.5))
                store(rows_shifted, j, xj * (shifted / mx) + np.float32(CENTRE + 0.5))
            xq0 = xq1 = xq2 = xq3 = qq0 = qq1 = qq2 = qq3 = zero
            for j in range(block):
                xj, wj = splat(xb[j]), splat(wb[j])
                t = ids * xj
                k = np.uintp(rows[j]) * np.uintp(CHOICE)
                q = entry_from_below(t, near, k)
                wq = wj * q
                xq0, qq0 = fma_lanes(wq, xj, xq0), fma_lanes(wq, q, qq0)
                q = entry_from_above(t, near, k + np.uintp(CHOICE // 2))
                wq = wj * q
                xq1, qq1 = fma_lanes(wq, xj, xq1), fma_lanes(wq, q, qq1)
                t = ids_shifted * xj
                k = np.uintp(rows_shifted[j]) * np.uintp(CHOICE)
                q = entry_from_below(t, near_shifted, k)
                wq = wj * q
                xq2, qq2 = fma_lanes(wq, xj, xq2), fma_lanes(wq, q, qq2)
                q = entry_from_above(t, near_shifted, k + np.uintp(CHOICE // 2))
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
            close = reduce_max(select(bottom > np.float32(0), top / bottom, zero)) * _CLOSE
            in0, in1 = mask_bits(n0 >= qq0 * close), mask_bits(n1 >= qq1 * close)
            in2, in3 = mask_bits(n2 >= qq2 * close), mask_bits(n3 >= qq3 * close)
            scale, best, flag = np.float32(0), np.float32(0), 0
            if in1 >> _FIRST:  # that trial has the signs of the middle factor turned round: minus comes first
                scale, best, _ = _race(sums, _FIRST, 1, scale, best)
            if in0 >> _FIRST:
                scale, best, _ = _race(sums, _FIRST, 0, scale, best)
            left = (in0 | in1 | in2 | in3) & tried
            while left:
                lane = first_bit(left)
                left &= left - 1
                if (in0 >> lane) & 1:
                    scale, best, won = _race(sums, lane, 0, scale, best)
                    flag = 0 if won else flag
                if (in1 >> lane) & 1:
                    scale, best, won = _race(sums, lane, 1, scale, best)
                    flag = 0 if won else flag
                if (in2 >> lane) & 1:
                    scale, best, won = _race(sums, lane, 2, scale, best)
                    flag = 1 if won else flag
                if (in3 >> lane) & 1:
                    scale, best, won = _race(sums, lane, 3, scale, best)
                    flag = 1 if won else flag
            scales[b], flags[b] = scale, flag

    return search_blocks


search_of_two, search_of_three = _make_search(False), _make_search(True)
