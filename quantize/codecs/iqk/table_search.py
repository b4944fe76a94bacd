"""The scale search of the IQK types: for each block the scale and table (plain or shifted) of least weighted error.

ik_llama.cpp tries some sixty scales per block: 2 * ntry + 1 factors around the one that puts the largest weight on the first
table value, each with both signs and both tables (docs/formats/encoders.md, the IQK search). Here the factors are the lanes of
a vector. They differ by so little that every weight has only two or three candidate values whatever the factor
(value_tables.candidate_values), so a trial costs a comparison and two fused multiply-adds per weight. Each lane sums in
ik_llama.cpp's order, and near ties are decided as there.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from ....simd.compile import kernel
from ....simd.lanes import LANES, fma_lanes, load, mask_bits, max_lanes, reduce_max, select, splat, store
from ....simd.memory import view
from ....simd.scalar import lowest_bit
from ....simd.team import TaskKernel
from .value_tables import CANDIDATE_ROW, MAX_SCALED

# A block with a smaller amax counts as zero.
MIN_AMAX = np.float32(1e-16)
ORDINARY_EXPONENTS = (-10, 2)  # binary exponents of weights that are not scaled; see normalise_rows

# Trials whose score is within this factor of the best are compared again in the reference's order and arithmetic.
_NEAR_TIE = np.float32(1 - 1e-5)

_FIRST_TRIAL = LANES - 1  # the lane of the trial that precedes the loop over factors

# The arguments of a search that is called by its address: addresses of arrays, and how long those are that differ.
SEARCH = np.dtype(
    [
        (name, np.int64)
        for name in (
            "x", "w", "scales", "flags", "blocks", "block", "offsets", "trial_count", "first_values", "candidates",
            "candidate_count", "table", "entries", "network", "comparators",
        )
    ]
)  # fmt: skip


@kernel
def signed_max(x):
    """The element of largest magnitude of a float32 vector (the first on ties), with its sign."""
    result, amax = np.float32(0), np.float32(0)
    for j in range(x.size):
        if abs(x[j]) > amax:
            result, amax = x[j], abs(x[j])
    return result


@kernel
def _block_signed_max(x, start, size):
    """As signed_max, of elements start ... start + size - 1, of which there are 16, 32 or 48, and without branches that depend
    on the data."""
    lane_amax = abs(load(x, start))
    for j in range(start + LANES, start + size, LANES):
        lane_amax = max_lanes(lane_amax, abs(load(x, j)))
    amax, bits = reduce_max(lane_amax), np.int64(0)
    for j in range(0, size, LANES):
        bits |= mask_bits(abs(load(x, start + j)) == amax) << j
    return x[np.uintp(start + lowest_bit(bits))] if bits else amax


def trial_offsets(ntry: int, step: int) -> np.ndarray:
    """What each lane adds to the first table value, float32 [LANES]; lanes beyond the 2 * ntry + 1 trials add 0."""
    steps = np.zeros(LANES, np.float32)
    steps[: 2 * ntry + 1] = np.arange(-ntry, ntry + 1) * step
    return steps


@kernel
def _every_fourth(bits):
    """Bit i of an integer of sixteen bits as bit 4 i."""
    bits = (bits | bits << 24) & 0x000000FF000000FF
    bits = (bits | bits << 12) & 0x000F000F000F000F
    bits = (bits | bits << 6) & 0x0303030303030303
    return (bits | bits << 3) & 0x1111111111111111


@kernel
def _best_trial(near0, near1, near2, near3, sums):
    """Scale and flag of the best of the trials that are near it, by the reference's comparison of one after the other.

    near0 ...: for each hypothesis a mask of lanes; sums: for each hypothesis the lanes of sxq, then those of sqq
    """
    # In the reference's order: the first trial has the opposite sign of the middle factor, so its negative scale comes first.
    ordinary = (1 << _FIRST_TRIAL) - 1
    trials = _every_fourth(near0 & ordinary) | _every_fourth(near1 & ordinary) << 1
    trials |= _every_fourth(near2) << 2 | _every_fourth(near3) << 3
    trials = trials << 2 | (near0 >> _FIRST_TRIAL & 1) << 1 | near1 >> _FIRST_TRIAL & 1
    scale, best, flag = np.float32(0), np.float32(0), 0
    while trials:
        number = lowest_bit(trials)
        trials &= trials - 1
        hypothesis = (number - 2) & 3 if number > 1 else 1 - number
        at = np.uintp(2 * LANES * hypothesis + ((number - 2) >> 2 if number > 1 else _FIRST_TRIAL))
        sxq, sqq = sums[at], sums[at + np.uintp(LANES)]
        if sqq > 0 and sxq * sxq > best * sqq:
            scale, flag = sxq / sqq, hypothesis >> 1
            best = scale * sxq
    return scale, flag


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
        sums = np.empty(8 * LANES, np.float32)
        candidate_rows, candidate_rows_shifted = np.empty(block, np.uint8), np.empty(block, np.uint8)
        plain, shifted = candidates[0], candidates[1]
        zero = splat(np.float32(0))
        lane_offset = load(offsets, 0)
        for lane in range(LANES):
            sums[lane] = lane
        is_first_trial = load(sums, 0) == np.float32(_FIRST_TRIAL)
        trial_mask = (1 << trial_count) - 1
        plain_mask = trial_mask | 1 << _FIRST_TRIAL
        first_plain, first_shifted = first_values[0], first_values[1]
        negative = np.uintp(CANDIDATE_ROW // 2)
        xs, ws = x.reshape(-1), w.reshape(-1)  # a view of a block would cost two atomic counts
        for b in range(blocks):
            start = b * block
            signed_max_x = _block_signed_max(xs, start, block)
            if abs(signed_max_x) < MIN_AMAX:
                scales[b], flags[b] = 0, 0
                continue
            # The first trial of the reference divides in another order: its rounding differs from that of the middle factor.
            first_inverse = np.float32(1) / (-signed_max_x / first_plain)
            inverses = select(is_first_trial, splat(-first_inverse), (lane_offset + first_plain) / signed_max_x)
            inverses_shifted = (lane_offset + first_shifted) / signed_max_x
            for j in range(0, block, LANES):
                xj = load(xs, start + j)
                store(candidate_rows, j, xj * (first_plain / signed_max_x) + np.float32(MAX_SCALED + 0.5))
                store(candidate_rows_shifted, j, xj * (first_shifted / signed_max_x) + np.float32(MAX_SCALED + 0.5))
            sxq0 = sxq1 = sxq2 = sxq3 = sqq0 = sqq1 = sqq2 = sqq3 = zero
            for j in range(block):
                xj, wj = splat(xs[np.uintp(start + j)]), splat(ws[np.uintp(start + j)])
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
            near0, near1 = mask_bits(n0 >= sqq0 * threshold) & plain_mask, mask_bits(n1 >= sqq1 * threshold) & plain_mask
            near2, near3 = mask_bits(n2 >= sqq2 * threshold) & trial_mask, mask_bits(n3 >= sqq3 * threshold) & trial_mask
            # Mostly all that are near have the same codes, so the same sums: then none has to be compared.
            near = near0 | near1 << LANES | near2 << 2 * LANES | near3 << 3 * LANES
            number = lowest_bit(near) & 4 * LANES - 1
            at = np.uintp(number + (number & -LANES))
            sxq, sqq = sums[at], sums[at + np.uintp(LANES)]
            others = near0 & ~mask_bits((sxq0 == sxq) & (sqq0 == sqq)) | near1 & ~mask_bits((sxq1 == sxq) & (sqq1 == sqq))
            others |= near2 & ~mask_bits((sxq2 == sxq) & (sqq2 == sqq)) | near3 & ~mask_bits((sxq3 == sxq) & (sqq3 == sqq))
            if near and others == 0 and sqq > 0 and sxq * sxq > 0 and ((near0 | near1) == 0 or (near2 | near3) == 0):
                scale, flag = sxq / sqq, number // (2 * LANES)
            else:
                scale, flag = _best_trial(near0, near1, near2, near3, sums)
            scales[b], flags[b] = scale, flag

    return search_blocks


search_blocks_of_two, search_blocks_of_three = _make_search(False), _make_search(True)


@partial(TaskKernel, dtype=SEARCH)
def search_of_three(job, number):
    """`search_blocks_of_three` of a record of SEARCH."""
    shape = job.blocks, job.block
    x, w = view(job.x, shape, np.float32), view(job.w, shape, np.float32)
    offsets, first_values = view(job.offsets, LANES, np.float32), view(job.first_values, 2, np.float32)
    candidates = view(job.candidates, (2, job.candidate_count), np.float32)
    scales, flags = view(job.scales, job.blocks, np.float32), view(job.flags, job.blocks, np.uint8)
    search_blocks_of_three(x, w, offsets, job.trial_count, first_values, candidates, scales, flags)
