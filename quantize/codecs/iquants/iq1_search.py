"""The codebook search of the iq1 types: y = scale * (level + shift), levels -1, 0, 1 by eights on a grid, shift +-1/8.

Scales are positive: a negative one is the mirror image, which the other shift covers. The shift belongs to a block of 32 or to
each group of eight. As in grid_search.py, grid points are searched with the weights of the errors themselves, and again at the
quantised scales. A superblock here is what shares a float16 scale: 256 elements, or a row of an interleaved type.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ....simd.compile import kernel
from ....simd.lanes import LANES, fma_lanes, fold_sum, load, mask_from_bits, max_lanes, reduce_max, select, splat, store
from .codebooks import NEIGHBOURS
from .grid_search import (
    GROUP_2BIT,
    MIN_AMAX,
    best_candidate,
    make_nearest_point,
    norm_corrected_scale,
    pack_2bit_levels,
    superblock_scale,
    values_of_2bit_levels,
    weighted_squares,
)

SHIFT = np.float32(0.125)
ZERO_LEVELS = 0x5555  # the packed levels of eight zeros, a point of the codebook

_nearest_point = make_nearest_point(GROUP_2BIT)


@kernel
def _nearest_level(y):
    """-1, 0 or 1, whichever is nearest to y."""
    return select(y > np.float32(0.5), splat(1), select(y < np.float32(-0.5), splat(-1), splat(0)))


def make_iq1_search(block: int, shift_block: int) -> Any:
    """The kernel search_superblock for `block` elements per scale and `shift_block` elements, 8 or 32, per shift."""
    groups, shift_groups = block // 8, shift_block // 8

    @kernel
    def start_scale(x, w, at, amax, trial_scales, scratch):
        """The block scale of least error if every vector of levels were on the grid: best of sixteen candidates, refitted."""
        scale = load(trial_scales, 0) * amax
        inverse = 1 / scale
        sxq, sqq = splat(0), splat(0)
        for first in range(at, at + block, shift_block):
            sxq_plus, sqq_plus, sxq_minus, sqq_minus = splat(0), splat(0), splat(0), splat(0)
            for j in range(first, first + shift_block):
                y = splat(x[j]) * inverse
                q = _nearest_level(y - SHIFT) + SHIFT
                wq = w[j] * q
                sxq_plus = fma_lanes(wq, splat(x[j]), sxq_plus)
                sqq_plus = fma_lanes(wq, q, sqq_plus)
                q = _nearest_level(y + SHIFT) - SHIFT
                wq = w[j] * q
                sxq_minus = fma_lanes(wq, splat(x[j]), sxq_minus)
                sqq_minus = fma_lanes(wq, q, sqq_minus)
            better = scale * sqq_minus - 2 * sxq_minus < scale * sqq_plus - 2 * sxq_plus
            sxq = sxq + select(better, sxq_minus, sxq_plus)
            sqq = sqq + select(better, sqq_minus, sqq_plus)
        return best_candidate(sxq, sqq, scratch)

    @kernel(forceinline=True)
    def assign_block(
        x, w, wx, at, scale, ranks, neighbours, tables_plus, tables_minus, a, b, levels, words, scratch, codes, signs
    ):
        """Maps all groups of the block at element `at` to grid points. Returns sum(w x q), sum(w q q).

        codes: uint16 [groups], out: packed levels; signs: uint8 [groups], out: 1 for a negative shift.
        """
        inverse = np.float32(1) / scale
        for j in range(0, block, LANES):
            y = load(x, at + j) * inverse
            store(levels, j, _nearest_level(y - SHIFT) + 1)
            store(levels, block + j, _nearest_level(y + SHIFT) + 1)
            store(a, j, (scale * scale) * load(w, at + j))
            store(b, j, (-2 * scale) * load(wx, at + j))
        for first in range(0, groups, shift_groups):
            error = np.float32(0)
            for g in range(first, first + shift_groups):
                code = pack_2bit_levels(words, g)
                rank = np.intp(ranks[0, code & 255]) + np.intp(ranks[1, code >> 8])
                block_codes, group_error = _nearest_point(a, b, 8 * g, tables_plus, neighbours, rank * NEIGHBOURS, scratch)
                codes[g], signs[g] = block_codes, 0
                error += group_error
            for g in range(first, first + shift_groups):
                code = pack_2bit_levels(words, groups + g)
                rank = np.intp(ranks[0, code & 255]) + np.intp(ranks[1, code >> 8])
                block_codes, group_error = _nearest_point(a, b, 8 * g, tables_minus, neighbours, rank * NEIGHBOURS, scratch)
                codes[groups + g] = block_codes
                error -= group_error
            if error > 0:
                for g in range(first, first + shift_groups):
                    codes[g], signs[g] = codes[groups + g], 1
        sxq, sqq = splat(0), splat(0)
        low = mask_from_bits(255)
        for h in range(block // LANES):
            shift1 = -SHIFT if signs[2 * h] else SHIFT
            shift2 = -SHIFT if signs[2 * h + 1] else SHIFT
            q = values_of_2bit_levels(codes, h, tables_plus) + select(low, splat(shift1 - SHIFT), splat(shift2 - SHIFT))
            sxq = fma_lanes(load(wx, at + LANES * h), q, sxq)
            sqq = fma_lanes(load(w, at + LANES * h) * q, q, sqq)
        return fold_sum(sxq), fold_sum(sqq)

    @kernel
    def search_superblock(
        x, w, norm_share, trial_scales, trial_divisors, base, step, max_code, ranks, neighbours, tables_plus, tables_minus,
        codes, signs, scale_codes,
    ):  # fmt: skip
        """Searches scales, shifts and grid points of a superblock. Returns d, 0 if all elements are zero.

        x, w               float32 [n]: elements of magnitude at most 1; weights of the squared errors
        norm_share, trial_scales, trial_divisors   see grid_search.py
        base, step, max_code   block scales are d * (base + step * code), code 0 ... max_code
        ranks, neighbours  of the Codebook; tables_plus, tables_minus: nibble_tables with either shift as offset
        codes, signs, scale_codes   out: packed levels uint16 [n / 8]; 1 for a negative shift, uint8 [n / 8]; uint8 [n / block]
        """
        blocks = x.size // block
        wx, a, b = np.empty(x.size, np.float32), np.empty(block, np.float32), np.empty(block, np.float32)
        levels, scratch = np.empty(2 * block, np.uint8), np.empty(LANES, np.float32)
        words = levels.view(np.uint64)
        block_codes, block_signs = np.empty(2 * groups, np.uint16), np.empty(groups, np.uint8)
        scales, weights = np.zeros(blocks, np.float32), np.zeros(blocks, np.float32)
        for j in range(0, x.size, LANES):
            store(wx, j, load(w, j) * load(x, j))
        any_nonzero = False
        for k in range(blocks):
            at = k * block
            lane_amax = splat(0)
            for j in range(at, at + block, LANES):
                lane_amax = max_lanes(lane_amax, abs(load(x, j)))
            amax = reduce_max(lane_amax)
            if amax <= MIN_AMAX:
                continue
            start = start_scale(x, w, at, amax, trial_scales, scratch)
            if start > 0:
                sxq, sqq = assign_block(
                    x, w, wx, at, start, ranks, neighbours, tables_plus, tables_minus, a, b, levels, words, scratch,
                    block_codes, block_signs,
                )  # fmt: skip
                if sxq > 0:
                    scales[k], weights[k] = sxq / sqq, sqq
                    any_nonzero = True
        codes[:], signs[:], scale_codes[:] = ZERO_LEVELS, 0, 0
        if not any_nonzero:
            return np.float32(0)
        d = superblock_scale(scales, weights, base, step, max_code, trial_divisors, scratch)
        sum_sxq, sum_sqq = np.float32(0), np.float32(0)
        for k in range(blocks):
            lower_code = np.intp(np.floor((scales[k] / d - base) / step))
            lower_code = max(0, min(np.intp(max_code) - 1, lower_code))
            best_error, best_sxq, best_sqq = np.float32(np.inf), np.float32(0), np.float32(0)
            for code in range(lower_code, lower_code + 2):
                q = base + step * np.float32(code)
                block_scale = d * q
                if q == 0:
                    best_error = np.float32(0)
                    continue
                sxq, sqq = assign_block(
                    x, w, wx, k * block, block_scale, ranks, neighbours, tables_plus, tables_minus, a, b, levels, words,
                    scratch, block_codes, block_signs,
                )  # fmt: skip
                error = block_scale * (block_scale * sqq - np.float32(2) * sxq)
                if error < best_error:
                    best_error, best_sxq, best_sqq = error, q * sxq, q * q * sqq
                    scale_codes[k] = code
                    for g in range(groups):
                        codes[k * groups + g], signs[k * groups + g] = block_codes[g], block_signs[g]
            sum_sxq += best_sxq
            sum_sqq += best_sqq
        return norm_corrected_scale(sum_sxq, sum_sqq, weighted_squares(wx, x), norm_share)

    return search_superblock
