"""The codebook search of the iq2 and iq3 types: scales and grid points of least weighted error for a superblock of 256.

A block of 16 or 32 elements has one scale and, for every group of eight or four elements, a grid point of positive levels;
signs are stored separately. A trial maps all groups of a block to grid points at a given scale. Where the nearest levels of a
group are off the grid, the weighted errors of the 16 possible nibbles of packed levels make four small tables, so that the
error of sixteen candidates takes four look-ups and three additions (`lookup_sum`); candidates are the neighbours on the grid.

Differences from llama.cpp (docs/formats/encoders.md, codebook i-quants): levels have the values of the decoder (5.375 where
llama.cpp fits 5), errors are weighted by w where it takes sqrt(w), and grid points are searched again after the scales are
quantised, at the scales of the decoder. So scales need no correction factor, and two or three trials per block do better than
its twenty.

Kernels are generated for a group size and a block size, so that their loops have fixed lengths.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ....simd.compile import kernel
from ....simd.lanes import (
    LANES,
    clamp,
    first_set_lane,
    fma_lanes,
    fold_sum,
    load,
    mask_bits,
    max_lanes,
    min_lanes,
    reduce_max,
    reduce_min,
    round_product_lanes,
    select,
    splat,
    store,
)
from .codebooks import NEIGHBOURS, Codebook
from .grid_lanes import lookup_sum, unpack_2bit_levels, unpack_4bit_levels

SUPERBLOCK = 256
GROUP_2BIT = 8  # elements of a group whose levels take two bits; levels of groups of four take four bits

# Blocks with an amax of at most this count as zero; the amax of the superblock is 1.
MIN_AMAX = np.float32(1e-9)

_SCALE_CODES = 16  # scales are d * (2 * code + 1)

# Largest factor on a scale: more of the norm is missing only where the codes can hardly express the weights at all.
_MAX_CORRECTION = np.float32(1.125)


def nibble_tables(codebook: Codebook, offset: float = 0) -> np.ndarray:
    """Values of the elements of a nibble, and their squares, for each nibble: float32 [64], first element, then second element.

    offset: added to the value of every level. A nibble of four-bit levels has no second element: zeros.
    """
    nibbles, count = np.arange(16), len(codebook.levels)
    if codebook.size == GROUP_2BIT:
        low, high = (codebook.levels[level % 4 % count] + offset for level in (nibbles, nibbles // 4))
    else:
        low, high = codebook.levels[nibbles % count] + offset, np.zeros(16)
    return np.concatenate([low, low * low, high, high * high]).astype(np.float32)


def make_nearest_point(size: int) -> Any:
    """The kernel nearest_point for groups of `size` elements."""
    two_bit, in_two_vectors = size == GROUP_2BIT, NEIGHBOURS == 2 * LANES

    @kernel
    def nearest_point(a, b, j, tables, neighbours, first, scratch):
        """The candidate of neighbours[first ...] with the least error for the group at element j: (packed levels, error).

        The error of an element with value v is a[j] * v^2 + b[j] * v. There are NEIGHBOURS candidates. tables:
        nibble_tables(...); scratch: float32 [16].
        """
        v1, q1 = load(tables, 0), load(tables, LANES)
        if two_bit:
            v2, q2 = load(tables, 2 * LANES), load(tables, 3 * LANES)
            t0 = fma_lanes(splat(a[j]), q1, splat(b[j]) * v1) + fma_lanes(splat(a[j + 1]), q2, splat(b[j + 1]) * v2)
            t1 = fma_lanes(splat(a[j + 2]), q1, splat(b[j + 2]) * v1) + fma_lanes(splat(a[j + 3]), q2, splat(b[j + 3]) * v2)
            t2 = fma_lanes(splat(a[j + 4]), q1, splat(b[j + 4]) * v1) + fma_lanes(splat(a[j + 5]), q2, splat(b[j + 5]) * v2)
            t3 = fma_lanes(splat(a[j + 6]), q1, splat(b[j + 6]) * v1) + fma_lanes(splat(a[j + 7]), q2, splat(b[j + 7]) * v2)
        else:
            t0 = fma_lanes(splat(a[j]), q1, splat(b[j]) * v1)
            t1 = fma_lanes(splat(a[j + 1]), q1, splat(b[j + 1]) * v1)
            t2 = fma_lanes(splat(a[j + 2]), q1, splat(b[j + 2]) * v1)
            t3 = fma_lanes(splat(a[j + 3]), q1, splat(b[j + 3]) * v1)
        best = lookup_sum(neighbours, first, t0, t1, t2, t3)
        if in_two_vectors:  # where a mask says which one a lane is of, nothing goes through memory
            error = lookup_sum(neighbours, first + LANES, t0, t1, t2, t3)
            better = error < best
            best = min_lanes(error, best)
            best_error = reduce_min(best)
            lane = first_set_lane(best == best_error)
            return neighbours[np.uintp(first + (mask_bits(better) >> lane & 1) * LANES + lane)], best_error
        best_offset = splat(0)
        for k in range(LANES, NEIGHBOURS, LANES):
            error = lookup_sum(neighbours, first + k, t0, t1, t2, t3)
            better = error < best
            best, best_offset = select(better, error, best), select(better, splat(k), best_offset)
        best_error = reduce_min(best)
        lane = first_set_lane(best == best_error)
        store(scratch, 0, best_offset)
        return neighbours[first + np.intp(scratch[lane]) + lane], best_error

    return nearest_point


@kernel
def pack_2bit_levels(words, g):
    """Packed levels of group g of eight elements; words: the levels, a byte each, as uint64."""
    word = words[g]
    word = (word | word >> np.uint64(6)) & np.uint64(0x000F000F000F000F)
    word = (word | word >> np.uint64(12)) & np.uint64(0x000000FF000000FF)
    return np.intp((word | word >> np.uint64(24)) & np.uint64(0xFFFF))


@kernel
def pack_4bit_levels(words, g):
    """Packed levels of group g of four elements; words: the levels, a byte each, as uint64."""
    word = (words[g // 2] >> np.uint64(32 * (g % 2))) & np.uint64(0xFFFFFFFF)
    word = (word | word >> np.uint64(4)) & np.uint64(0x00FF00FF)
    return np.intp((word | word >> np.uint64(8)) & np.uint64(0xFFFF))


@kernel
def values_of_2bit_levels(codes, h, tables):
    """Values of the sixteen elements from 16 * h on, as lanes.

    codes: packed levels of groups of eight; tables: nibble_tables(...).
    """
    return unpack_2bit_levels(np.uint32(codes[2 * h]), np.uint32(codes[2 * h + 1]), load(tables, 0))


@kernel
def values_of_4bit_levels(codes, h, tables):
    """As values_of_2bit_levels, for groups of four."""
    first = np.uint32(codes[4 * h]) | np.uint32(codes[4 * h + 1]) << np.uint32(16)
    second = np.uint32(codes[4 * h + 2]) | np.uint32(codes[4 * h + 3]) << np.uint32(16)
    return unpack_4bit_levels(first, second, load(tables, 0))


@kernel
def best_candidate(sxq, sqq, scratch):
    """The scale sxq / sqq of the lane with the best score sxq^2 / sqq; scratch: float32 [16]."""
    scale = sxq / sqq
    score = scale * sxq
    store(scratch, 0, scale)
    return scratch[first_set_lane(score == reduce_max(score))]


@kernel
def superblock_scale(scales, weights, first, step, max_code, trial_divisors, scratch):
    """The scale d such that each block scale is near d * (first + step * code), code 0 ... max_code.

    It is the best of sixteen candidates, refitted. weights: of the squared errors of the scales, which are not all 0;
    trial_divisors: float32 [16], the candidates are the largest scale over these.
    """
    max_scale = np.float32(0)
    for k in range(scales.size):
        max_scale = max(max_scale, scales[k])
    inverse = load(trial_divisors, 0) / max_scale
    sxq, sqq = splat(0), splat(0)
    for k in range(scales.size):
        y = (scales[k] * inverse - first) * (np.float32(1) / step)
        q = first + step * clamp(round_product_lanes(y, splat(1)), 0, max_code)
        sxq = fma_lanes(splat(weights[k] * scales[k]), q, sxq)
        sqq = fma_lanes(weights[k] * q, q, sqq)
    return best_candidate(sxq, sqq, scratch)


@kernel
def weighted_squares(wx, x):
    """sum(wx * x) of arrays of a multiple of 16 elements."""
    total = splat(0)
    for j in range(0, x.size, LANES):
        total = fma_lanes(load(wx, j), load(x, j), total)
    return fold_sum(total)


@kernel
def norm_corrected_scale(sxq, sqq, sxx, norm_share):
    """The scale of a superblock from sxq = sum(w x q), sqq = sum(w q q), sxx = sum(w x x) over all its elements.

    Least squares, sxq / sqq, makes the decoded weights smaller than the original ones by what the codes cannot express;
    norm_share is the part of the missing weighted norm that is added back. With one or two bits per weight that costs a little
    error and gives lower perplexity, which is why llama.cpp enlarges the scales of these types by 5 to 12 percent.
    """
    if not (sxq > 0 and sqq > 0):
        return np.float32(0)
    correction = np.sqrt(sxx * sqq) / sxq
    one = np.float32(1)
    return sxq / sqq * (one + norm_share * (min(correction, _MAX_CORRECTION) - one))


def make_grid_search(size: int, block: int) -> Any:
    """The kernel search_superblock for groups of `size` elements and blocks of `block`."""
    two_bit, groups, blocks = size == GROUP_2BIT, block // size, SUPERBLOCK // block
    # Which groups are off the grid is hard to predict: many are listed without a jump, then searched.
    listed = groups > 4
    nearest_point = make_nearest_point(size)
    pack_levels = (pack_4bit_levels, pack_2bit_levels)[two_bit]
    values_of_levels = (values_of_4bit_levels, values_of_2bit_levels)[two_bit]

    @kernel
    def nearest_level(y, bounds):
        """Index of the level nearest to y, as lanes. bounds: midpoints of the two lowest levels, the next two, the last two."""
        if two_bit:
            return select(y > bounds[1], splat(2), select(y > bounds[0], splat(1), splat(0)))
        return select(y > bounds[2], splat(7), clamp(round_product_lanes(y - 1, splat(0.5)), 0, 6))

    @kernel
    def nearest_value(y, bounds, levels):
        """Value of the level nearest to y, as lanes."""
        if two_bit:
            level0, level1, level2 = splat(levels[0]), splat(levels[1]), splat(levels[2])
            return select(y > bounds[1], level2, select(y > bounds[0], level1, level0))
        inner = fma_lanes(clamp(round_product_lanes(y - 1, splat(0.5)), 0, 6), splat(2), splat(1))
        return select(y > bounds[2], splat(levels[7]), inner)

    @kernel
    def start_scale(x, w, at, amax, trial_scales, tables, bounds, scratch):
        """The block scale of least error if every vector of levels were on the grid: best of sixteen candidates, refitted."""
        inverse = 1 / (load(trial_scales, 0) * amax)
        sxq, sqq = splat(0), splat(0)
        for j in range(at, at + block):
            q = nearest_value(splat(x[j]) * inverse, bounds, tables)
            wq = w[j] * q
            sxq = fma_lanes(wq, splat(x[j]), sxq)
            sqq = fma_lanes(wq, q, sqq)
        return best_candidate(sxq, sqq, scratch)

    @kernel(forceinline=True)
    def assign_block(
        x, w, wx, at, scale, ranks, grid_index, neighbours, tables, bounds, a, b, levels, words, scratch, off_grid, codes
    ):
        """Maps all groups of the block at element `at` to grid points. Returns sum(w x q), sum(w q q).

        off_grid: int64 [groups], scratch; codes: uint16 [groups], out: packed levels.
        """
        inverse = splat(np.float32(1) / scale)
        for j in range(0, block, LANES):
            store(levels, j, nearest_level(load(x, at + j) * inverse, bounds))
            store(a, j, (scale * scale) * load(w, at + j))
            store(b, j, (-2 * scale) * load(wx, at + j))
        count = 0
        for g in range(groups):
            code = pack_levels(words, g)
            rank = np.intp(ranks[0, code & 255]) + np.intp(ranks[1, code >> 8])
            codes[g] = code
            if listed:
                off_grid[np.uintp(count)] = rank * groups + g
                count += grid_index[np.uintp(rank)] < 0
            elif grid_index[rank] < 0:
                codes[g] = nearest_point(a, b, size * g, tables, neighbours, rank * NEIGHBOURS, scratch)[0]
        for i in range(count):
            rank, g = off_grid[np.uintp(i)] // groups, off_grid[np.uintp(i)] % groups
            codes[np.uintp(g)] = nearest_point(a, b, size * g, tables, neighbours, rank * NEIGHBOURS, scratch)[0]
        sxq, sqq = splat(0), splat(0)
        for h in range(block // LANES):
            q = values_of_levels(codes, h, tables)
            sxq = fma_lanes(load(wx, at + LANES * h), q, sxq)
            sqq = fma_lanes(load(w, at + LANES * h) * q, q, sqq)
        return fold_sum(sxq), fold_sum(sqq)

    @kernel
    def search_superblock(
        x, w, norm_share, trial_scales, trial_factors, trial_divisors, ranks, grid_index, neighbours, tables, bounds,
        codes, scale_codes,
    ):  # fmt: skip
        """Searches scales and grid points of a superblock. Returns d, 0 if all elements are zero.

        x              float32 [256], magnitudes of at most 1, negative where the stored sign is wrong
        w              float32 [256], weights of the squared errors, all above 0
        norm_share     see norm_corrected_scale
        trial_scales   float32 [16], scales that start_scale tries, for an amax of 1
        trial_factors  float32, factors on the best of those at which grid points are searched
        trial_divisors see superblock_scale
        ranks, grid_index, neighbours, tables   of the Codebook; nibble_tables(...)
        codes          uint16 [256 / size], out: packed levels of all groups
        scale_codes    uint8 [256 / block], out
        """
        wx, a, b = np.empty(SUPERBLOCK, np.float32), np.empty(block, np.float32), np.empty(block, np.float32)
        levels, scratch = np.empty(block, np.uint8), np.empty(LANES, np.float32)
        words = levels.view(np.uint64)
        off_grid, block_codes = np.empty(groups, np.int64), np.empty(groups, np.uint16)
        scales, weights = np.zeros(blocks, np.float32), np.zeros(blocks, np.float32)
        for j in range(0, SUPERBLOCK, LANES):
            store(wx, j, load(w, j) * load(x, j))
        any_nonzero = False
        for k in range(blocks):
            at = k * block
            lane_amax = load(x, at)
            for j in range(at, at + block, LANES):
                lane_amax = max_lanes(lane_amax, load(x, j))
            amax = reduce_max(lane_amax)
            if amax <= MIN_AMAX:
                continue
            start = start_scale(x, w, at, amax, trial_scales, tables, bounds, scratch)
            best = np.float32(0)
            for t in range(trial_factors.size if start > 0 else 0):
                sxq, sqq = assign_block(
                    x, w, wx, at, start * trial_factors[t], ranks, grid_index, neighbours, tables, bounds, a, b, levels,
                    words, scratch, off_grid, block_codes,
                )  # fmt: skip
                if sxq > 0 and sxq / sqq * sxq > best:
                    scales[k], weights[k] = sxq / sqq, sqq
                    best = sxq / sqq * sxq
                    any_nonzero = True
        if not any_nonzero:
            codes[:], scale_codes[:] = 0, 0
            return np.float32(0)
        d = superblock_scale(
            scales, weights, np.float32(1), np.float32(2), np.float32(_SCALE_CODES - 1), trial_divisors, scratch
        )
        sum_sxq, sum_sqq = np.float32(0), np.float32(0)
        for k in range(blocks):
            lower_code = np.intp(np.floor(np.float32(0.5) * (scales[k] / d - np.float32(1))))
            lower_code = max(0, min(_SCALE_CODES - 2, lower_code))
            best_error, best_sxq, best_sqq = np.float32(np.inf), np.float32(0), np.float32(0)
            for code in range(lower_code, lower_code + 2):
                q = np.float32(2 * code + 1)
                block_scale = d * q
                sxq, sqq = assign_block(
                    x, w, wx, k * block, block_scale, ranks, grid_index, neighbours, tables, bounds, a, b, levels, words,
                    scratch, off_grid, block_codes,
                )  # fmt: skip
                error = block_scale * (block_scale * sqq - np.float32(2) * sxq)
                if error < best_error:
                    best_error, best_sxq, best_sqq = error, q * sxq, q * q * sqq
                    scale_codes[k] = code
                    for g in range(groups):
                        codes[k * groups + g] = block_codes[g]
            sum_sxq += best_sxq
            sum_sqq += best_sqq
        return norm_corrected_scale(sum_sxq, sum_sqq, weighted_squares(wx, x), norm_share)

    return search_superblock
