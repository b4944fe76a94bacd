"""Searching the vectors of a trellis codebook that are nearest to a group of weights, for several scales at once.

The search is approximate: it opens the boxes of the codebook's tree (see codebook.py) whose distance from the group is below a
limit, and reads all vectors in them. The limit is a multiple of the distance that the nearest vector will probably have; where
the result shows that the estimate was too low, the search is repeated with a higher one. With a factor of 1 and more the
nearest vector is hardly ever missed.

Distances are weighted squares, sum w_i (c_i - y_i)^2 with y = x / scale. Boxes and vectors are compared in 16-bit fixed point,
with pairs of products added in 32 bits (simd/instructions: vpmaddwd and vpdpwssd on x86); every processor gives the same
integers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types

from ....simd import llvm
from ....simd.compile import intrinsic, kernel
from ....simd.instructions.dot_products import add_word_pairs
from ....simd.instructions.permute import mask_of_bits
from ....simd.lane_types import F32, LANES, element_pointer
from ....simd.lanes import (
    first_set_lane,
    lane_at,
    load,
    mask_bits,
    mask_from_bits,
    min_lanes,
    reduce_min,
    select,
    splat,
    store,
)
from ....simd.llvm import F32X16, I16, I16X32, I32, I32X16, I64, constant, vector
from ....simd.scalar import count_bits, float_from_bits
from ....simd.target import target
from .codebook import OFFSET, RESOLUTION

BLOCK = 32
WIDTH = 2 * LANES  # int16 numbers in a row of a table: two coordinates of 16 vectors
_I32X32 = vector(I32, WIDTH)

_MAX_COORDINATE = np.float32(250)  # coordinates beyond are clipped; those of vectors end at 126
_MAX_I16, _MAX_U16 = np.float32(32767), np.float32(65535)
_MAX_FIXED_W = np.float32(8191)  # times 8 squares of 126: still an int32
_VARIANCE = np.float32(1365)  # of the values of codebooks: four bytes of 0 to 63
_MAX_SQUARE_RATIO = np.float32(1e4)  # of a group's mean square over that of the codebook
_NO_SCORE = np.float32(3e38)
_TINY = np.float32(1e-30)

_ATTEMPTS = 24
_MIN_LIMIT_RATIO = np.float32(0.6)  # of the limit that the least distance asks for: below it, the search is repeated
_APPENDED = 4  # numbers that _append writes

# Statistics of a group: largest w, mean x^2, sum w x^2, geometric mean of w over the largest, and the factors by which sums of
# squares and of products in fixed point are multiplied.
GROUP_STATS = 6
_MAX_W, _MEAN_SQUARE, _WEIGHTED_SQUARE, _MEAN_W, _SQUARE_UNIT, _PRODUCT_UNIT = range(GROUP_STATS)


def _load_row(context, builder, array_type, array, index, number):
    """Row `number` of a table from array[index] on: <32 x i16>."""
    at = builder.add(index, I64(number * WIDTH))
    return builder.load(element_pointer(context, builder, array_type, array, at, I16, WIDTH), align=2)


def _splat_pair(context, builder, array_type, array, index, number):
    """array[index + number] of an int32 row, two int16 in one, sixteen times: <32 x i16>."""
    data = context.make_array(array_type)(context, builder, array).data
    value = builder.load(builder.gep(data, [builder.add(index, I64(number))]))
    return builder.bitcast(llvm.splat(builder, value), I16X32)


def _saturating_difference(builder, a, b):
    """a - b of uint16, 0 where b is larger."""
    return llvm.call(builder, f"llvm.usub.sat.v{WIDTH}i16", I16X32, a, b)


def _high_product(builder, a, b):
    """The upper 16 bits of a * b of uint16."""
    product = builder.mul(builder.zext(a, _I32X32), builder.zext(b, _I32X32))
    return builder.trunc(builder.lshr(product, constant(_I32X32, 16)), I16X32)


def _make_box_distances(pairs):
    @intrinsic
    def box_distances(typingctx, boxes, at, point, root_w, first):
        """Squared distances of a point from the sixteen boxes at boxes[at], as float32 lanes.

        point, root_w: int32 rows, from `first` on pairs of uint16: the point's coordinates, and what distances along them are
        multiplied by / 2**16.
        """

        def generate(context, builder, signature, args):
            arrays, total = signature.args, constant(I32X16, 0)
            for j in range(pairs):
                low, high = (_load_row(context, builder, arrays[0], args[0], args[1], 2 * j + end) for end in (0, 1))
                coordinate = _splat_pair(context, builder, arrays[2], args[2], args[4], j)
                below = _saturating_difference(builder, low, coordinate)
                distance = builder.or_(below, _saturating_difference(builder, coordinate, high))
                scaled = _high_product(builder, distance, _splat_pair(context, builder, arrays[3], args[3], args[4], j))
                total = add_word_pairs(builder, total, scaled, scaled)
            return builder.sitofp(total, F32X16)

        return F32(boxes, types.intp, point, root_w, types.intp), generate

    return box_distances


def _make_vector_sums(pairs, squared):
    @intrinsic
    def vector_sums(typingctx, vectors, at, factors, first):
        """Sums of the factors (pairs of int16, from factors[first] of an int32 row on) times the coordinates of the sixteen
        vectors at vectors[at], or times their squares, as float32 lanes."""

        def generate(context, builder, signature, args):
            total = constant(I32X16, 0)
            for j in range(pairs):
                c = _load_row(context, builder, signature.args[0], args[0], args[1], j)
                factor = _splat_pair(context, builder, signature.args[2], args[2], args[3], j)
                total = add_word_pairs(builder, total, builder.mul(c, c) if squared else c, factor)
            return builder.sitofp(total, F32X16)

        return F32(vectors, types.intp, factors, types.intp), generate

    return vector_sums


_box_distances_8, _box_distances_4 = _make_box_distances(4), _make_box_distances(2)
_square_sums_8, _square_sums_4 = _make_vector_sums(4, True), _make_vector_sums(2, True)
_product_sums_8, _product_sums_4 = _make_vector_sums(4, False), _make_vector_sums(2, False)


@intrinsic
def _append(typingctx, row, at, base, word):
    """Writes base + number of the bit to row[at], row[at + 1] ... for the lowest bits set in an int64 of at most sixteen bits,
    all of them where the processor can compress vectors, else four; returns the rest.

    Four or sixteen are always written, however many bits are set: the next call overwrites those that are too many.
    """

    def generate(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        base, word = builder.trunc(args[2], I32), args[3]
        if target().has("avx512f"):
            numbers = builder.add(llvm.splat(builder, base), constant(I32X16, list(range(LANES))))
            mask = mask_of_bits(builder, builder.trunc(word, ir.IntType(LANES)))
            name = f"llvm.x86.avx512.mask.compress.v{LANES}i32"
            chosen = llvm.call(builder, name, I32X16, numbers, constant(I32X16, 0), mask)
            llvm.store(builder, chosen, builder.ptrtoint(builder.gep(data, [args[1]]), I64))
            return I64(0)
        for k in range(_APPENDED):
            number = builder.add(base, builder.trunc(builder.cttz(word, llvm.I1(0)), I32))
            builder.store(number, builder.gep(data, [builder.add(args[1], I64(k))]))
            word = builder.and_(word, builder.sub(word, I64(1)))
        return word

    return types.int64(row, types.intp, types.int64, types.int64), generate


@kernel
def _pack_pair(low, high):
    """Two int16 or uint16 numbers as an int32."""
    return (np.int32(low) & 0xFFFF) | np.int32(high) << 16


class BlockSearch(NamedTuple):
    """What the search knows of a block and has found for it. A codebook has max_runs runs of vectors.

    root_w, fixed_w, fixed_wx  int32 [16]: pairs of square roots of w, of w, of w * x, in 16-bit fixed point
    stats     float32 [groups * GROUP_STATS]
    counts    int64 [groups]: how many runs of vectors were read
    runs      int32 [groups * max_runs]: their numbers
    sums      float32 [groups * max_runs * 32]: sums of w c^2 and of -2 w x c for the vectors of each, as lanes
    point, limits, best, pending, lists  scratch: int32 [16], float32 [groups], float32 [groups], int64 [groups],
              int32 [2 * (groups * max_runs + 16)]
    """

    root_w: np.ndarray
    fixed_w: np.ndarray
    fixed_wx: np.ndarray
    stats: np.ndarray
    counts: np.ndarray
    runs: np.ndarray
    sums: np.ndarray
    point: np.ndarray
    limits: np.ndarray
    best: np.ndarray
    pending: np.ndarray
    lists: np.ndarray


@kernel
def new_block_search(size, max_runs):
    """A BlockSearch for groups of `size` elements (8 or 4)."""
    groups = BLOCK // size
    return BlockSearch(
        np.empty(BLOCK // 2, np.int32), np.empty(BLOCK // 2, np.int32), np.empty(BLOCK // 2, np.int32),
        np.empty(groups * GROUP_STATS, np.float32), np.empty(groups, np.int64), np.empty(groups * max_runs, np.int32),
        np.empty(groups * max_runs * 2 * LANES, np.float32), np.empty(BLOCK // 2, np.int32), np.empty(groups, np.float32),
        np.empty(groups, np.float32), np.empty(groups, np.int64), np.empty(2 * (groups * max_runs + LANES), np.int32),
    )  # fmt: skip


# Kernels below take rows and the index where a block begins: a view of an array costs numba two atomic counts.


@kernel
def prepare_block(x, w, w_bits, start, size, search):
    """Computes what the search (a BlockSearch) needs to know of a block's groups at any scale.

    x, w      float32 rows: weights, and the weights of their squared errors, above 0; the block begins at `start`
    w_bits    int32: the bits of w; size: 8 or 4, the elements of a group
    """
    root_w, fixed_w, fixed_wx, stats = search.root_w, search.fixed_w, search.fixed_wx, search.stats
    pairs = size // 2
    for g in range(BLOCK // size):
        max_w = max_wx = sum_xx = sum_wxx = np.float32(0)
        sum_bits = np.int64(0)
        for i in range(start + g * size, start + g * size + size):
            wx = w[i] * x[i]
            max_w = max(max_w, w[i])
            max_wx = max(max_wx, abs(wx))
            sum_xx += x[i] * x[i]
            sum_wxx += wx * x[i]
            sum_bits += w_bits[i]
        max_wx = max(max_wx, _TINY)
        inverse_w, inverse_wx = 1 / max_w, _MAX_I16 / max_wx
        for j in range(pairs):
            i = start + g * size + 2 * j
            w0, w1 = w[i] * inverse_w, w[i + 1] * inverse_w
            root_w[g * pairs + j] = _pack_pair(np.sqrt(w0) * _MAX_U16, np.sqrt(w1) * _MAX_U16)
            fixed_w[g * pairs + j] = _pack_pair(np.rint(w0 * _MAX_FIXED_W), np.rint(w1 * _MAX_FIXED_W))
            fixed_wx[g * pairs + j] = _pack_pair(np.rint(w[i] * x[i] * inverse_wx), np.rint(w[i + 1] * x[i + 1] * inverse_wx))
        at = g * GROUP_STATS
        stats[at + _MAX_W], stats[at + _MEAN_SQUARE], stats[at + _WEIGHTED_SQUARE] = max_w, sum_xx / np.float32(size), sum_wxx
        # The mean of floats' bit patterns is approximately that of their logarithms.
        stats[at + _MEAN_W] = float_from_bits(np.int32(sum_bits // size)) / max_w
        stats[at + _SQUARE_UNIT], stats[at + _PRODUCT_UNIT] = max_w / _MAX_FIXED_W, -2 * max_wx / _MAX_I16


@kernel
def find_near_vectors(x, start, size, scale, tree, codebook, search):
    """Finds the vectors near the groups of a block at a scale (not 0), and sums for the error of each at any scale.

    x         float32 row; the block begins at `start`; size: 8 or 4, the length of a group
    tree      TrellisTree; codebook: which of its codebooks is searched
    search    BlockSearch from `prepare_block`; receives counts, runs and sums
    """
    limit_factor, distance_polynomial, boxes, level_starts, top_boxes, vectors = tree
    root_w, fixed_w, fixed_wx, stats, counts, runs, sums, point, limits, best, pending, lists = search
    pairs, groups = size // 2, BLOCK // size
    depth = level_starts.shape[1]
    max_runs = runs.size // groups
    half_size = lists.size // 2
    top_vectors = (top_boxes + LANES - 1) // LANES
    base = codebook * (vectors.size // level_starts.shape[0])
    inverse = 1 / scale
    fixed_square = np.float32(RESOLUTION * RESOLUTION)  # a squared distance of 1
    remaining = groups
    for g in range(groups):
        for j in range(pairs):
            i = start + g * size + 2 * j
            low = min(max(x[i] * inverse, -_MAX_COORDINATE), _MAX_COORDINATE)
            high = min(max(x[i + 1] * inverse, -_MAX_COORDINATE), _MAX_COORDINATE)
            point[g * pairs + j] = _pack_pair((low + OFFSET) * RESOLUTION, (high + OFFSET) * RESOLUTION)
        ratio = min(stats[g * GROUP_STATS + _MEAN_SQUARE] * inverse * inverse / _VARIANCE, _MAX_SQUARE_RATIO)
        c0, c1, c2, c3 = distance_polynomial[0], distance_polynomial[1], distance_polynomial[2], distance_polynomial[3]
        expected = c0 + ratio * (c1 + ratio * (c2 + ratio * c3))
        limits[g] = limit_factor * fixed_square * stats[g * GROUP_STATS + _MEAN_W] * expected
        pending[g] = g
    for _ in range(_ATTEMPTS):
        # Entries of the lists are group << 16 | box or run. Level by level for all groups at once: searches of a single
        # group would have to wait for one comparison after the other.
        count = 0
        for i in range(remaining):
            for k in range(top_vectors):
                lists[count] = pending[i] << 16 | k
                count += 1
        usable_boxes = (1 << min(top_boxes, LANES)) - 1
        list_start, next_list = 0, half_size
        for level in range(depth):
            list_end, level_start, is_box = next_list, level_starts[codebook, level], mask_from_bits(usable_boxes)
            for i in range(list_start, list_start + count):
                entry = np.int64(lists[np.uintp(i)])
                g, box = entry >> 16, entry & 0xFFFF
                at = level_start + box * (2 * LANES * size)
                if size == 8:
                    distances = _box_distances_8(boxes, at, point, root_w, g * pairs)
                else:
                    distances = _box_distances_4(boxes, at, point, root_w, g * pairs)
                near = mask_bits((distances <= limits[np.uintp(g)]) & is_box)
                append_at = list_end
                list_end += count_bits(near)
                while True:
                    near = _append(lists, append_at, (g << 16) + LANES * box, near)
                    if near == 0:
                        break
                    append_at += _APPENDED
            count = list_end - next_list
            list_start, next_list = next_list, list_start
            usable_boxes = (1 << LANES) - 1
        for i in range(remaining):
            counts[pending[i]] = 0
        # The runs of a group follow one another.
        i, list_end = list_start, list_start + count
        while i < list_end:
            g = np.int64(lists[np.uintp(i)]) >> 16
            square_unit, product_unit = stats[g * GROUP_STATS + _SQUARE_UNIT], stats[g * GROUP_STATS + _PRODUCT_UNIT]
            group_end, group_best, entry = (g + 1) << 16, splat(_NO_SCORE), g * max_runs
            while i < list_end and lists[np.uintp(i)] < group_end:
                run = np.int64(lists[np.uintp(i)]) & 0xFFFF
                at = base + run * (LANES * size)
                if size == 8:
                    p, q = _square_sums_8(vectors, at, fixed_w, g * pairs), _product_sums_8(vectors, at, fixed_wx, g * pairs)
                else:
                    p, q = _square_sums_4(vectors, at, fixed_w, g * pairs), _product_sums_4(vectors, at, fixed_wx, g * pairs)
                p, q = p * square_unit, q * product_unit
                runs[np.uintp(entry)] = run
                store(sums, entry * 2 * LANES, p)
                store(sums, entry * 2 * LANES + LANES, q)
                group_best = min_lanes((p * scale + q) * scale, group_best)
                entry += 1
                i += 1
            counts[g] = entry - g * max_runs
            best[g] = reduce_min(group_best)
        repeated = 0
        for i in range(remaining):
            g = pending[i]
            if counts[g] == 0:
                limits[g] = 3 * limits[g] + 1
            else:
                distance = best[g] + stats[g * GROUP_STATS + _WEIGHTED_SQUARE]
                needed = limit_factor * distance * inverse * inverse / stats[g * GROUP_STATS + _MAX_W] * fixed_square
                if limits[g] >= _MIN_LIMIT_RATIO * needed:
                    continue
                limits[g] = needed
            pending[repeated] = g
            repeated += 1
        remaining = repeated
        if remaining == 0:
            break


@kernel
def least_error(scale, groups, search):
    """The least sum of w (x - scale * c)^2 less sum w x^2 of a block, over the vectors of `find_near_vectors`."""
    counts, sums = search.counts, search.sums
    max_runs = sums.size // (groups * 2 * LANES)
    total = np.float32(0)
    for g in range(groups):
        best = splat(_NO_SCORE)
        first = g * max_runs * 2 * LANES
        for at in range(first, first + counts[g] * 2 * LANES, 2 * LANES):
            s = (load(sums, at) * scale + load(sums, at + LANES)) * scale
            best = select(s < best, s, best)
        total += reduce_min(best)
    return total


@kernel
def best_vectors(scale, groups, search, out, start):
    """The vectors of least_error, to out[start] and the following, int32, counted in the order of the tree."""
    counts, runs, sums = search.counts, search.runs, search.sums
    max_runs = runs.size // groups
    for g in range(groups):
        best, best_run = splat(_NO_SCORE), splat(0)
        for i in range(counts[g]):
            at = (g * max_runs + i) * 2 * LANES
            s = (load(sums, at) * scale + load(sums, at + LANES)) * scale
            better = s < best
            best, best_run = select(better, s, best), select(better, splat(np.float32(i)), best_run)
        lane = first_set_lane(best <= reduce_min(best))
        out[start + g] = LANES * runs[g * max_runs + np.int64(lane_at(best_run, lane))] + lane
