"""The codebook search of the iq2 and iq3 types: scales and grid points of least weighted error for a super-block of 256.

A block of 16 or 32 elements has one scale and, for every group of eight or four elements, a point of a codebook of positive
levels; signs are apart. A round of the search maps all groups of a block to points at a trial scale. Where the levels next to
the elements are no point, the weighted errors of the 16 possible nibbles of packed levels make four small tables, so that
sixteen candidates at a time are four look-ups and three additions (`pick_sum`); candidates are the codebook's near points.

What differs from the reference (spec D.3): levels are what the decoder makes of them (5.375 where the reference fits 5), errors
are weighted by w where it takes sqrt(w), and points are searched again once the scales are rounded, at the scales that the
decoder will use. So scales need no correcting factor, and two or three rounds do better than its twenty.

Kernels are made for a group size and a block size, so that their loops have fixed lengths.
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
    max_lanes,
    reduce_max,
    reduce_min,
    round_product_lanes,
    select,
    splat,
    store,
)
from .codebooks import NEAREST, Codebook
from .grid_lanes import pick_sum, values_of_nibbles, values_of_pairs

SUPER = 256
PAIRS = 8  # elements of a group whose levels take two bits; levels of groups of four take four bits

# Blocks with nothing above this, where the largest of the super-block is 1, count as zero.
DEAD = np.float32(1e-9)

_ODD_CODES = 16  # scales are d * (2 * code + 1)

# The most by which scales are enlarged: more than that is missing only where weights can hardly be expressed at all.
_ENLARGED = np.float32(1.125)


def patterns(book: Codebook, shift: float = 0) -> np.ndarray:
    """What the elements of a nibble and their squares are, by nibble: float32 [64], of the first element, then the second.

    Every level is shifted by `shift`. A nibble of four-bit levels has no second element: zeros.
    """
    nibbles, count = np.arange(16), len(book.levels)
    if book.size == PAIRS:
        low, high = (book.levels[level % 4 % count] + shift for level in (nibbles, nibbles // 4))
    else:
        low, high = book.levels[nibbles % count] + shift, np.zeros(16)
    return np.concatenate([low, low * low, high, high * high]).astype(np.float32)


def make_map_group(size: int) -> Any:
    """map_group for groups of `size` elements."""
    pairs = size == PAIRS

    @kernel
    def map_group(a, b, j, shapes, near, first, scratch):
        """The one of NEAREST near points of least error for the group that begins at element j: (packed levels, the error).

        The error of an element at value v is a[j] * v^2 + b[j] * v; shapes: patterns(...); near[first ...] are candidates.
        """
        v1, q1 = load(shapes, 0), load(shapes, LANES)
        if pairs:
            v2, q2 = load(shapes, 2 * LANES), load(shapes, 3 * LANES)
            t0 = fma_lanes(splat(a[j]), q1, splat(b[j]) * v1) + fma_lanes(splat(a[j + 1]), q2, splat(b[j + 1]) * v2)
            t1 = fma_lanes(splat(a[j + 2]), q1, splat(b[j + 2]) * v1) + fma_lanes(splat(a[j + 3]), q2, splat(b[j + 3]) * v2)
            t2 = fma_lanes(splat(a[j + 4]), q1, splat(b[j + 4]) * v1) + fma_lanes(splat(a[j + 5]), q2, splat(b[j + 5]) * v2)
            t3 = fma_lanes(splat(a[j + 6]), q1, splat(b[j + 6]) * v1) + fma_lanes(splat(a[j + 7]), q2, splat(b[j + 7]) * v2)
        else:
            t0 = fma_lanes(splat(a[j]), q1, splat(b[j]) * v1)
            t1 = fma_lanes(splat(a[j + 1]), q1, splat(b[j + 1]) * v1)
            t2 = fma_lanes(splat(a[j + 2]), q1, splat(b[j + 2]) * v1)
            t3 = fma_lanes(splat(a[j + 3]), q1, splat(b[j + 3]) * v1)
        best, where = pick_sum(near, first, t0, t1, t2, t3), splat(0)
        for k in range(LANES, NEAREST, LANES):
            cost = pick_sum(near, first + k, t0, t1, t2, t3)
            better = cost < best
            best, where = select(better, cost, best), select(better, splat(k), where)
        least = reduce_min(best)
        lane = first_set_lane(best == least)
        store(scratch, 0, where)
        return near[first + np.intp(scratch[lane]) + lane], least

    return map_group


@kernel
def pack_pairs(words, g):
    """The packed levels of a group of eight; words: levels, a byte each, as uint64."""
    word = words[g]
    word = (word | word >> np.uint64(6)) & np.uint64(0x000F000F000F000F)
    word = (word | word >> np.uint64(12)) & np.uint64(0x000000FF000000FF)
    return np.intp((word | word >> np.uint64(24)) & np.uint64(0xFFFF))


@kernel
def pack_nibbles(words, g):
    """The packed levels of a group of four; words: levels, a byte each, as uint64."""
    word = (words[g // 2] >> np.uint64(32 * (g % 2))) & np.uint64(0xFFFFFFFF)
    word = (word | word >> np.uint64(4)) & np.uint64(0x00FF00FF)
    return np.intp((word | word >> np.uint64(8)) & np.uint64(0xFFFF))


@kernel
def values_of_eights(codes, h, table):
    """What the elements 16 * h ... stand for: codes are the packed levels of groups of eight, table: patterns(...)."""
    return values_of_pairs(np.uint32(codes[2 * h]), np.uint32(codes[2 * h + 1]), load(table, 0))


@kernel
def values_of_fours(codes, h, table):
    """As values_of_eights, for groups of four."""
    first = np.uint32(codes[4 * h]) | np.uint32(codes[4 * h + 1]) << np.uint32(16)
    second = np.uint32(codes[4 * h + 2]) | np.uint32(codes[4 * h + 3]) << np.uint32(16)
    return values_of_nibbles(first, second, load(table, 0))


@kernel
def best_of_lanes(sxq, sqq, scratch):
    """sxq / sqq of the lane of best score sxq^2 / sqq."""
    fitted = sxq / sqq
    score = fitted * sxq
    store(scratch, 0, fitted)
    return scratch[first_set_lane(score == reduce_max(score))]


@kernel
def common_scale(scales, weights, first, step, top, tries, scratch):
    """d such that every scale is near d * (first + step * code), code 0 ... top: the best of sixteen trials, refitted.

    weights: of the squared errors of the scales, which are not all 0; tries: float32 [16], what the highest scale is to be
    divided by to try.
    """
    highest = np.float32(0)
    for k in range(scales.size):
        highest = max(highest, scales[k])
    over = load(tries, 0) / highest
    sxq, sqq = splat(0), splat(0)
    for k in range(scales.size):
        y = (scales[k] * over - first) * (np.float32(1) / step)
        q = first + step * clamp(round_product_lanes(y, splat(1)), 0, top)
        sxq = fma_lanes(splat(weights[k] * scales[k]), q, sxq)
        sqq = fma_lanes(weights[k] * q, q, sqq)
    return best_of_lanes(sxq, sqq, scratch)


@kernel
def weighted_square(wx, x):
    """sum(wx * x) of whole lanes."""
    total = splat(0)
    for j in range(0, x.size, LANES):
        total = fma_lanes(load(wx, j), load(x, j), total)
    return fold_sum(total)


@kernel
def unshrunk(num, den, square, share):
    """The scale of a unit from num = sum(w x q), den = sum(w q q), square = sum(w x x), over all its elements.

    Least squares, num / den, makes the decoded weights smaller than the original ones by what they cannot express; `share` of
    what is missing to the same weighted norm is added. With one or two bits per weight that costs a little error and gives
    lower perplexity, which is why the reference enlarges the scales of these types by 5 to 12 percent.
    """
    if not (num > 0 and den > 0):
        return np.float32(0)
    enlarged = np.sqrt(square * den) / num
    one = np.float32(1)
    return num / den * (one + share * (min(enlarged, _ENLARGED) - one))


def make_search(size: int, block: int) -> Any:
    """search_grid for groups of `size` elements and blocks of `block`."""
    pairs, groups, blocks = size == PAIRS, block // size, SUPER // block
    map_group, pack, values = (
        make_map_group(size),
        (pack_nibbles, pack_pairs)[pairs],
        (values_of_fours, values_of_eights)[pairs],
    )

    @kernel
    def level_of(y, bounds):
        """Number of the level nearest to y, as lanes; bounds: between the two lowest levels, the next two, the last two."""
        if pairs:
            return select(y > bounds[1], splat(2), select(y > bounds[0], splat(1), splat(0)))
        return select(y > bounds[2], splat(7), clamp(round_product_lanes(y - 1, splat(0.5)), 0, 6))

    @kernel
    def value_of(y, bounds, levels):
        """What the level nearest to y stands for."""
        if pairs:
            one, two, three = splat(levels[0]), splat(levels[1]), splat(levels[2])
            return select(y > bounds[1], three, select(y > bounds[0], two, one))
        inner = fma_lanes(clamp(round_product_lanes(y - 1, splat(0.5)), 0, 6), splat(2), splat(1))
        return select(y > bounds[2], splat(levels[7]), inner)

    @kernel
    def start(x, w, at, largest, steps, shapes, bounds, scratch):
        """The scale of least error of a block if all vectors of levels were points: the best of sixteen trials, refitted."""
        over = 1 / (load(steps, 0) * largest)
        sxq, sqq = splat(0), splat(0)
        for j in range(at, at + block):
            q = value_of(splat(x[j]) * over, bounds, shapes)
            wq = w[j] * q
            sxq = fma_lanes(wq, splat(x[j]), sxq)
            sqq = fma_lanes(wq, q, sqq)
        return best_of_lanes(sxq, sqq, scratch)

    @kernel
    def map_block(x, w, wx, at, scale, ranks, index, near, shapes, bounds, a, b, levels, words, scratch, codes):
        """Maps all groups of the block at element `at`; codes: uint16 [groups]. Returns sum(w x q), sum(w q q)."""
        over = splat(np.float32(1) / scale)
        for j in range(0, block, LANES):
            store(levels, j, level_of(load(x, at + j) * over, bounds))
            store(a, j, (scale * scale) * load(w, at + j))
            store(b, j, (-2 * scale) * load(wx, at + j))
        for g in range(groups):
            code = pack(words, g)
            rank = np.intp(ranks[0, code & 255]) + np.intp(ranks[1, code >> 8])
            codes[g] = code if index[rank] >= 0 else map_group(a, b, size * g, shapes, near, rank * NEAREST, scratch)[0]
        sxq, sqq = splat(0), splat(0)
        for h in range(block // LANES):
            q = values(codes, h, shapes)
            sxq = fma_lanes(load(wx, at + LANES * h), q, sxq)
            sqq = fma_lanes(load(w, at + LANES * h) * q, q, sqq)
        return fold_sum(sxq), fold_sum(sqq)

    @kernel
    def search_grid(x, w, share, steps, trials, tries, ranks, index, near, shapes, bounds, codes, scale_codes):
        """Finds the scales and points of a super-block; returns d, 0 if all is zero.

        x: float32 [256], magnitudes of up to 1, negative where the sign is stored wrong; w: the weights of their errors,
        float32 [256], all above 0; share: as in unshrunk; steps: float32 [16], first trial scales where the largest of a block
        is 1; trials: float32 factors on the best of those, at which points are searched; tries: as in common_scale; the rest as
        in Codebook and patterns(). Writes the packed levels of all groups to codes, uint16 [256 / size], and the codes of the
        scales to scale_codes, uint8 [256 / block].
        """
        wx, a, b = np.empty(SUPER, np.float32), np.empty(block, np.float32), np.empty(block, np.float32)
        levels, scratch = np.empty(block, np.uint8), np.empty(LANES, np.float32)
        words = levels.view(np.uint64)
        found = np.empty(groups, np.uint16)
        scales, weights = np.zeros(blocks, np.float32), np.zeros(blocks, np.float32)
        for j in range(0, SUPER, LANES):
            store(wx, j, load(w, j) * load(x, j))
        alive = False
        for k in range(blocks):
            at = k * block
            top = load(x, at)
            for j in range(at, at + block, LANES):
                top = max_lanes(top, load(x, j))
            largest = reduce_max(top)
            if largest <= DEAD:
                continue
            s0 = start(x, w, at, largest, steps, shapes, bounds, scratch)
            best = np.float32(0)
            for t in range(trials.size if s0 > 0 else 0):
                sxq, sqq = map_block(
                    x, w, wx, at, s0 * trials[t], ranks, index, near, shapes, bounds, a, b, levels, words, scratch, found
                )
                if sxq > 0 and sxq / sqq * sxq > best:
                    scales[k], weights[k] = sxq / sqq, sqq
                    best = sxq / sqq * sxq
                    alive = True
        if not alive:
            codes[:], scale_codes[:] = 0, 0
            return np.float32(0)
        d = common_scale(scales, weights, np.float32(1), np.float32(2), np.float32(_ODD_CODES - 1), tries, scratch)
        num, den = np.float32(0), np.float32(0)
        for k in range(blocks):
            below = np.intp(np.floor(np.float32(0.5) * (scales[k] / d - np.float32(1))))
            below = max(0, min(_ODD_CODES - 2, below))
            least, bxq, bqq = np.float32(np.inf), np.float32(0), np.float32(0)
            for code in range(below, below + 2):
                q = np.float32(2 * code + 1)
                s = d * q
                sxq, sqq = map_block(
                    x, w, wx, k * block, s, ranks, index, near, shapes, bounds, a, b, levels, words, scratch, found
                )
                error = s * (s * sqq - np.float32(2) * sxq)
                if error < least:
                    least, bxq, bqq = error, q * sxq, q * q * sqq
                    scale_codes[k] = code
                    for g in range(groups):
                        codes[k * groups + g] = found[g]
            num += bxq
            den += bqq
        return unshrunk(num, den, weighted_square(wx, x), share)

    return search_grid
