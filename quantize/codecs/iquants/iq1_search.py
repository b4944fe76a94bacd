"""The codebook search of the iq1 types: y = scale * (level + shift), levels -1, 0, 1 by eights from a codebook, shift +-1/8.

Scales are positive: a negative one is the mirror image, which the other shift covers. The shift is that of a block of 32 or of
each group of eight. As in grid_search.py, which see, points are searched with the weights of the errors themselves, and again
at the scales as they are rounded, which belong to a float16 over 256 elements or over a row: the unit of this search.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ....simd.compile import kernel
from ....simd.lanes import LANES, fma_lanes, fold_sum, load, mask_from_bits, max_lanes, reduce_max, select, splat, store
from .codebooks import NEAREST
from .grid_search import (
    DEAD,
    PAIRS,
    best_of_lanes,
    common_scale,
    make_map_group,
    pack_pairs,
    unshrunk,
    values_of_eights,
    weighted_square,
)

SHIFT = np.float32(0.125)
ZERO = 0x5555  # the packed levels of eight zeros, a point of the codebook

_map_group = make_map_group(PAIRS)


@kernel
def _levels(y):
    """-1, 0 or 1, whichever is nearest."""
    return select(y > np.float32(0.5), splat(1), select(y < np.float32(-0.5), splat(-1), splat(0)))


def make_search(block: int, shared: int) -> Any:
    """search_levels for blocks of `block` elements with a scale, and `shared` elements, 8 or 32, with a shift."""
    groups, together = block // 8, shared // 8

    @kernel
    def start(x, w, at, largest, steps, scratch):
        """The scale of least error of a block if all vectors of levels were points: the best of sixteen trials, refitted."""
        scale = load(steps, 0) * largest
        over = 1 / scale
        sxq, sqq = splat(0), splat(0)
        for first in range(at, at + block, shared):
            xq1, qq1, xq2, qq2 = splat(0), splat(0), splat(0), splat(0)
            for j in range(first, first + shared):
                y = splat(x[j]) * over
                q = _levels(y - SHIFT) + SHIFT
                wq = w[j] * q
                xq1 = fma_lanes(wq, splat(x[j]), xq1)
                qq1 = fma_lanes(wq, q, qq1)
                q = _levels(y + SHIFT) - SHIFT
                wq = w[j] * q
                xq2 = fma_lanes(wq, splat(x[j]), xq2)
                qq2 = fma_lanes(wq, q, qq2)
            better = scale * qq2 - 2 * xq2 < scale * qq1 - 2 * xq1
            sxq = sxq + select(better, xq2, xq1)
            sqq = sqq + select(better, qq2, qq1)
        return best_of_lanes(sxq, sqq, scratch)

    @kernel
    def map_block(x, w, wx, at, scale, ranks, near, plus, minus, a, b, levels, words, scratch, codes, signs):
        """Maps all groups of the block at element `at`; codes: uint16 [groups], signs: uint8 [groups], 1 where the shift is
        negative. Returns sum(w x q), sum(w q q)."""
        over = np.float32(1) / scale
        for j in range(0, block, LANES):
            y = load(x, at + j) * over
            store(levels, j, _levels(y - SHIFT) + 1)
            store(levels, block + j, _levels(y + SHIFT) + 1)
            store(a, j, (scale * scale) * load(w, at + j))
            store(b, j, (-2 * scale) * load(wx, at + j))
        for first in range(0, groups, together):
            error = np.float32(0)
            for g in range(first, first + together):
                code = pack_pairs(words, g)
                rank = np.intp(ranks[0, code & 255]) + np.intp(ranks[1, code >> 8])
                found, cost = _map_group(a, b, 8 * g, plus, near, rank * NEAREST, scratch)
                codes[g], signs[g] = found, 0
                error += cost
            for g in range(first, first + together):
                code = pack_pairs(words, groups + g)
                rank = np.intp(ranks[0, code & 255]) + np.intp(ranks[1, code >> 8])
                found, cost = _map_group(a, b, 8 * g, minus, near, rank * NEAREST, scratch)
                codes[groups + g] = found
                error -= cost
            if error > 0:
                for g in range(first, first + together):
                    codes[g], signs[g] = codes[groups + g], 1
        sxq, sqq = splat(0), splat(0)
        low = mask_from_bits(255)
        for h in range(block // LANES):
            shift1 = -SHIFT if signs[2 * h] else SHIFT
            shift2 = -SHIFT if signs[2 * h + 1] else SHIFT
            q = values_of_eights(codes, h, plus) + select(low, splat(shift1 - SHIFT), splat(shift2 - SHIFT))
            sxq = fma_lanes(load(wx, at + LANES * h), q, sxq)
            sqq = fma_lanes(load(w, at + LANES * h) * q, q, sqq)
        return fold_sum(sxq), fold_sum(sqq)

    @kernel
    def search_levels(x, w, share, steps, tries, base, step, top, ranks, near, plus, minus, codes, signs, scale_codes):
        """Finds the scales and points of a unit; returns d, 0 if all is zero.

        x: float32 [n], of up to 1 in magnitude; w: the weights of the errors, float32 [n]; share: as in unshrunk; steps, tries:
        as in grid_search; base, step, top: scales are d * (base + step * code), code 0 ... top; ranks, near: of the codebook;
        plus, minus: its patterns with either shift. Writes the packed levels of groups to codes, uint16 [n / 8], 1 to signs,
        uint8 [n / 8], where the shift is negative, and the codes of scales to scale_codes, uint8 [n / block].
        """
        blocks = x.size // block
        wx, a, b = np.empty(x.size, np.float32), np.empty(block, np.float32), np.empty(block, np.float32)
        levels, scratch = np.empty(2 * block, np.uint8), np.empty(LANES, np.float32)
        words = levels.view(np.uint64)
        found, shifts = np.empty(2 * groups, np.uint16), np.empty(groups, np.uint8)
        scales, weights = np.zeros(blocks, np.float32), np.zeros(blocks, np.float32)
        for j in range(0, x.size, LANES):
            store(wx, j, load(w, j) * load(x, j))
        alive = False
        for k in range(blocks):
            at = k * block
            peak = splat(0)
            for j in range(at, at + block, LANES):
                peak = max_lanes(peak, abs(load(x, j)))
            largest = reduce_max(peak)
            if largest <= DEAD:
                continue
            s0 = start(x, w, at, largest, steps, scratch)
            if s0 > 0:
                sxq, sqq = map_block(x, w, wx, at, s0, ranks, near, plus, minus, a, b, levels, words, scratch, found, shifts)
                if sxq > 0:
                    scales[k], weights[k] = sxq / sqq, sqq
                    alive = True
        codes[:], signs[:], scale_codes[:] = ZERO, 0, 0
        if not alive:
            return np.float32(0)
        d = common_scale(scales, weights, base, step, top, tries, scratch)
        num, den = np.float32(0), np.float32(0)
        for k in range(blocks):
            below = np.intp(np.floor((scales[k] / d - base) / step))
            below = max(0, min(np.intp(top) - 1, below))
            least, bxq, bqq = np.float32(np.inf), np.float32(0), np.float32(0)
            for code in range(below, below + 2):
                q = base + step * np.float32(code)
                s = d * q
                if q == 0:
                    least = np.float32(0)
                    continue
                sxq, sqq = map_block(
                    x, w, wx, k * block, s, ranks, near, plus, minus, a, b, levels, words, scratch, found, shifts
                )
                error = s * (s * sqq - np.float32(2) * sxq)
                if error < least:
                    least, bxq, bqq = error, q * sxq, q * q * sqq
                    scale_codes[k] = code
                    for g in range(groups):
                        codes[k * groups + g], signs[k * groups + g] = found[g], shifts[g]
            num += bxq
            den += bqq
        return unshrunk(num, den, weighted_square(wx, x), share)

    return search_levels
