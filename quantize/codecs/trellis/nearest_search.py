"""Searching the vectors of a trellis codebook that are nearest to a group of weights, for several scales at once.

The search is approximate: it opens the boxes of the codebook's tree (see codebook.py) whose distance from the group is below a
limit, and reads all vectors in them. The limit is a share of the distance that the nearest vector will probably have; where the
result shows that the guess was too low, the search is repeated with a higher one. With a share of 1 and more the nearest vector
is hardly ever missed.

Distances are weighted squares, sum w_i (c_i - y_i)^2 with y = x / scale. Boxes and vectors are compared in 16-bit fixed point,
with pairs of products added in 32 bits: on x86 the instructions vpmaddwd and vpdpwssd, which LLVM selects for the plain form
written here; other processors give the same integers.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function

from ....simd.compile import intrinsic, kernel
from ....simd.lanes import F32, LANES, MASK, load, select, splat, store
from .codebook import OFFSET, UNITS

WIDTH = 2 * LANES  # int16 numbers in a row of a table: two coordinates of 16 vectors
_SHORT, _INT = ir.IntType(16), ir.IntType(32)
_SHORTS, _INTS = ir.VectorType(_SHORT, WIDTH), ir.VectorType(_INT, WIDTH)
_SUMS = ir.VectorType(_INT, LANES)
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_FAR = np.float32(250)  # coordinates are cut off here; those of vectors end at 126
_SHORT_MAX, _USHORT_MAX = np.float32(32767), np.float32(65535)
_SQUARE_MAX = np.float32(8191)  # times 8 squares of 126: still an int32
_NOTHING = np.float32(3e38)
_TINY = np.float32(1e-30)
_VARIANCE = np.float32(1365)  # of the values of codebooks: four bytes of 0 to 63
_RHO_MAX = np.float32(1e4)
_ATTEMPTS = 24
_AT_ONCE = 4
BLOCK = 32
FACTS = 6  # what is known of each group:
_MOST_W, _MEAN_SQUARE, _ENERGY, _MEAN_W = 0, 1, 2, 3  # largest w, mean x^2, sum w x^2, geometric mean of w over the largest,
_BY_SQUARES, _BY_PRODUCTS = 4, 5  # and what sums of squares and products are multiplied by
_ENOUGH = np.float32(0.6)  # of the limit that the distance found asks for


def _row(context, builder, array_type, array, index, number):
    """Row `number` of a table from array[index] on: <32 x i16>."""
    data = context.make_array(array_type)(context, builder, array).data
    place = builder.gep(data, [builder.add(index, ir.Constant(index.type, number * WIDTH))])
    return builder.load(builder.bitcast(place, _SHORTS.as_pointer()), align=2)


def _pair(context, builder, array_type, array, index, number):
    """array[index + number] of an int32 row, two int16 in one, sixteen times: <32 x i16>."""
    data = context.make_array(array_type)(context, builder, array).data
    value = builder.load(builder.gep(data, [builder.add(index, ir.Constant(index.type, number))]))
    none = ir.Constant(_SUMS, ir.Undefined)
    first = builder.insert_element(none, value, ir.Constant(_INT, 0))
    return builder.bitcast(builder.shuffle_vector(first, none, ir.Constant(_SUMS, [0] * LANES)), _SHORTS)


def _add_products(builder, total, a, b):
    """total + products of pairs of int16, added two by two: <16 x i32>."""
    products = builder.mul(builder.sext(a, _INTS), builder.sext(b, _INTS))
    none = ir.Constant(_INTS, ir.Undefined)
    even, odd = (builder.shuffle_vector(products, none, ir.Constant(_SUMS, list(range(start, WIDTH, 2)))) for start in (0, 1))
    both = builder.add(even, odd)
    return both if total is None else builder.add(total, both)


def _less(builder, a, b):
    """a - b of uint16, 0 where b is larger."""
    function_type = ir.FunctionType(_SHORTS, [_SHORTS, _SHORTS])
    return builder.call(get_or_insert_function(builder.module, function_type, f"llvm.usub.sat.v{WIDTH}i16"), [a, b])


def _upper_product(builder, a, b):
    product = builder.mul(builder.zext(a, _INTS), builder.zext(b, _INTS))
    return builder.trunc(builder.lshr(product, ir.Constant(_INTS, [16] * WIDTH)), _SHORTS)


def _bounds(pairs):
    @intrinsic
    def bounds(typingctx, boxes, at, place, stretch, first):
        """Squared distances of a point from the sixteen boxes at boxes[at], as float32 lanes.

        place, stretch: int32 rows, from `first` on pairs of uint16: the point's coordinates, and what distances along them are
        multiplied by / 2**16.
        """

        def generate(context, builder, sig, args):
            kinds, total = sig.args, None
            for j in range(pairs):
                low, high = (_row(context, builder, kinds[0], args[0], args[1], 2 * j + end) for end in (0, 1))
                here = _pair(context, builder, kinds[2], args[2], args[4], j)
                distance = builder.or_(_less(builder, low, here), _less(builder, here, high))
                scaled = _upper_product(builder, distance, _pair(context, builder, kinds[3], args[3], args[4], j))
                total = _add_products(builder, total, scaled, scaled)
            return builder.sitofp(total, _FLOATS)

        return F32(boxes, types.intp, place, stretch, types.intp), generate

    return bounds


def _dots(pairs, squared):
    @intrinsic
    def dots(typingctx, vectors, at, factors, first):
        """Sums of the factors (pairs of int16, from factors[first] of an int32 row on) times the coordinates of the sixteen
        vectors at vectors[at], or times their squares, as float32 lanes."""

        def generate(context, builder, sig, args):
            total = None
            for j in range(pairs):
                c = _row(context, builder, sig.args[0], args[0], args[1], j)
                factor = _pair(context, builder, sig.args[2], args[2], args[3], j)
                total = _add_products(builder, total, builder.mul(c, c) if squared else c, factor)
            return builder.sitofp(total, _FLOATS)

        return F32(vectors, types.intp, factors, types.intp), generate

    return dots


_bounds_of_8, _bounds_of_4 = _bounds(4), _bounds(2)
_squares_of_8, _squares_of_4 = _dots(4, True), _dots(2, True)
_products_of_8, _products_of_4 = _dots(4, False), _dots(2, False)


@intrinsic
def _bits(typingctx, mask):
    """A mask as a number whose bit l is lane l."""

    def generate(context, builder, sig, args):
        return builder.zext(builder.bitcast(args[0], ir.IntType(LANES)), ir.IntType(64))

    return types.int64(MASK), generate


@intrinsic
def _lowest_bit(typingctx, word):
    """Number of the lowest bit that is set in an int64; 64 for 0."""

    def generate(context, builder, sig, args):
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.int64), generate


@intrinsic
def _count_bits(typingctx, word):
    """How many bits are set in an int64."""

    def generate(context, builder, sig, args):
        return builder.ctpop(args[0])

    return types.int64(types.int64), generate


@intrinsic
def _append(typingctx, row, at, base, word):
    """Writes base + number of the bit to row[at], row[at + 1] ... for the lowest four bits set in an int64; returns the rest.

    Four are always written, whatever their number: what is too much is written over by the next.
    """

    def generate(context, builder, sig, args):
        data = context.make_array(sig.args[0])(context, builder, args[0]).data
        word = args[3]
        for k in range(_AT_ONCE):
            number = builder.add(args[2], builder.cttz(word, ir.Constant(ir.IntType(1), 0)))
            place = builder.gep(data, [builder.add(args[1], ir.Constant(args[1].type, k))])
            builder.store(builder.trunc(number, _INT), place)
            word = builder.and_(word, builder.sub(word, ir.Constant(word.type, 1)))
        return word

    return types.int64(row, types.intp, types.int64, types.int64), generate


@intrinsic
def _lowest_lane(typingctx, a):
    """The smallest of sixteen float32 lanes, none of which is NaN."""

    def generate(context, builder, sig, args):
        kind = ir.FunctionType(ir.FloatType(), [args[0].type])
        reduce = get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fmin.v{LANES}f32")
        return builder.call(reduce, args, fastmath=("nnan",))

    return types.float32(F32), generate


@intrinsic
def _as_float(typingctx, bits):
    """The float32 of these 32 bits."""

    def generate(context, builder, sig, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), generate


@intrinsic
def _lane(typingctx, a, number):
    """One of sixteen float32 lanes."""

    def generate(context, builder, sig, args):
        return builder.extract_element(args[0], args[1])

    return types.float32(F32, types.int64), generate


@kernel(error_model="numpy")
def _both(low, high):
    """Two int16 or uint16 numbers as a pair."""
    return (np.int32(low) & 0xFFFF) | np.int32(high) << 16


# Kernels below take plain rows and where to begin in them: a view of an array costs numba two atomic counts. The error model
# spares a test before each division; none of the divisors can be 0.


@kernel(error_model="numpy")
def prepare(x, w, bits, start, size, stretch, squares, products, facts):
    """Computes what the search needs to know of a block's groups, whatever the scale.

    x, w      float32 rows: weights, and the weights of their squared errors, above 0; the block begins at `start`
    bits      int32: the bits of w; size: 8 or 4, the elements of a group
    stretch, squares, products    int32 [16], out: pairs of square roots of w, of w, of w * x, in fixed point
    facts     float32 [groups * FACTS], out: see _MOST_W and the following
    """
    pairs = size // 2
    for g in range(BLOCK // size):
        most_w = most_wx = xx = wxx = np.float32(0)
        exponents = np.int64(0)
        for i in range(start + g * size, start + g * size + size):
            wx = w[i] * x[i]
            most_w = max(most_w, w[i])
            most_wx = max(most_wx, abs(wx))
            xx += x[i] * x[i]
            wxx += wx * x[i]
            exponents += bits[i]
        most_wx = max(most_wx, _TINY)
        inverse_w, inverse_wx = 1 / most_w, _SHORT_MAX / most_wx
        for j in range(pairs):
            i = start + g * size + 2 * j
            w0, w1 = w[i] * inverse_w, w[i + 1] * inverse_w
            stretch[g * pairs + j] = _both(np.sqrt(w0) * _USHORT_MAX, np.sqrt(w1) * _USHORT_MAX)
            squares[g * pairs + j] = _both(np.rint(w0 * _SQUARE_MAX), np.rint(w1 * _SQUARE_MAX))
            products[g * pairs + j] = _both(np.rint(w[i] * x[i] * inverse_wx), np.rint(w[i + 1] * x[i + 1] * inverse_wx))
        at = g * FACTS
        facts[at + _MOST_W], facts[at + _MEAN_SQUARE], facts[at + _ENERGY] = most_w, xx / np.float32(size), wxx
        # The mean of floats' bit patterns is that of their logarithms, nearly.
        facts[at + _MEAN_W] = _as_float(np.int32(exponents // size)) / most_w
        facts[at + _BY_SQUARES], facts[at + _BY_PRODUCTS] = most_w / _SQUARE_MAX, -2 * most_wx / _SHORT_MAX


@kernel(error_model="numpy")
def find_near_vectors(
    x, start, size, stretch, squares, products, facts, center, share, expected, boxes, levels, book, tops, vectors, place,
    limits, best, todo, lists, counts, runs, sums,
):  # fmt: skip
    """Finds the vectors near the groups of a block at a scale `center` (not 0), and sums for the score of each at any scale.

    x         float32 row; the block begins at `start`; size: 8 or 4, the length of a group
    stretch, squares, products, facts    from `prepare`
    share     of the expected distance, up to which boxes are opened
    expected  float32 [4]: distance as a polynomial of the mean square of a group over that of the codebook
    boxes, levels, tops, vectors         of the Books, one after the other; book: which of them
    counts    int64 [groups], out: how many runs of vectors were found
    runs      int32 [groups * any], out: their numbers
    sums      float32 [groups * any * 32], out: sums of w c^2 and of -2 w x c for the vectors of each, as lanes
    place, limits, best, todo, lists    scratch: int32 [16], float32 [groups], float32 [groups * 16], int64 [groups],
                                        int32 [2 * (groups * runs of a book + 16)]
    """
    pairs, groups = size // 2, BLOCK // size
    depth = levels.shape[1]
    most = runs.size // groups
    half_size = lists.size // 2
    top_vectors = (tops + LANES - 1) // LANES
    base = book * (vectors.size // levels.shape[0])
    inverse = 1 / center
    unit = np.float32(UNITS * UNITS)
    remaining = groups
    for g in range(groups):
        for j in range(pairs):
            i = start + g * size + 2 * j
            low = min(max(x[i] * inverse, -_FAR), _FAR)
            high = min(max(x[i + 1] * inverse, -_FAR), _FAR)
            place[g * pairs + j] = _both((low + OFFSET) * UNITS, (high + OFFSET) * UNITS)
        rho = min(facts[g * FACTS + _MEAN_SQUARE] * inverse * inverse / _VARIANCE, _RHO_MAX)
        guess = expected[0] + rho * (expected[1] + rho * (expected[2] + rho * expected[3]))
        limits[g] = share * unit * facts[g * FACTS + _MEAN_W] * guess
        todo[g] = g
    for _ in range(_ATTEMPTS):
        # Entries of the lists are group << 16 | box or run. Level by level for all groups at once: searches of a single
        # group would have to wait for one comparison after the other.
        count = 0
        for i in range(remaining):
            for k in range(top_vectors):
                lists[count] = todo[i] << 16 | k
                count += 1
        box_mask = (1 << min(tops, LANES)) - 1
        list_start, next_list = 0, half_size
        for level in range(depth):
            list_end = next_list
            for i in range(list_start, list_start + count):
                g, box = np.int64(lists[i]) >> 16, np.int64(lists[i]) & 0xFFFF
                at = levels[book, level] + box * (2 * LANES * size)
                if size == 8:
                    near = _bits(_bounds_of_8(boxes, at, place, stretch, g * pairs) <= limits[g]) & box_mask
                else:
                    near = _bits(_bounds_of_4(boxes, at, place, stretch, g * pairs) <= limits[g]) & box_mask
                append_at = list_end
                list_end += _count_bits(near)
                while True:
                    near = _append(lists, append_at, (g << 16) + LANES * box, near)
                    if near == 0:
                        break
                    append_at += _AT_ONCE
            count = list_end - next_list
            list_start, next_list = next_list, list_start
            box_mask = (1 << LANES) - 1
        for i in range(remaining):
            counts[todo[i]] = 0
            store(best, todo[i] * LANES, splat(_NOTHING))
        for i in range(list_start, list_start + count):
            g, run = np.int64(lists[i]) >> 16, np.int64(lists[i]) & 0xFFFF
            at = base + run * (LANES * size)
            if size == 8:
                p, q = _squares_of_8(vectors, at, squares, g * pairs), _products_of_8(vectors, at, products, g * pairs)
            else:
                p, q = _squares_of_4(vectors, at, squares, g * pairs), _products_of_4(vectors, at, products, g * pairs)
            p, q = p * facts[g * FACTS + _BY_SQUARES], q * facts[g * FACTS + _BY_PRODUCTS]
            entry = g * most + counts[g]
            counts[g] += 1
            runs[entry] = run
            store(sums, entry * 2 * LANES, p)
            store(sums, entry * 2 * LANES + LANES, q)
            score = (p * center + q) * center
            so_far = load(best, g * LANES)
            store(best, g * LANES, select(score < so_far, score, so_far))
        retries = 0
        for i in range(remaining):
            g = todo[i]
            if counts[g] == 0:
                limits[g] = 3 * limits[g] + 1
            else:
                distance = _lowest_lane(load(best, g * LANES)) + facts[g * FACTS + _ENERGY]
                needed = share * distance * inverse * inverse / facts[g * FACTS + _MOST_W] * unit
                if limits[g] >= _ENOUGH * needed:
                    continue
                limits[g] = needed
            todo[retries] = g
            retries += 1
        remaining = retries
        if remaining == 0:
            break


@kernel(error_model="numpy")
def least_error(scale, groups, counts, sums):
    """The least sum of w (x - scale * c)^2 less sum w x^2 of a block, with the vectors that `find_near_vectors` found."""
    most = sums.size // (groups * 2 * LANES)
    total = np.float32(0)
    for g in range(groups):
        best = splat(_NOTHING)
        first = g * most * 2 * LANES
        for at in range(first, first + counts[g] * 2 * LANES, 2 * LANES):
            s = (load(sums, at) * scale + load(sums, at + LANES)) * scale
            best = select(s < best, s, best)
        total += _lowest_lane(best)
    return total


@kernel(error_model="numpy")
def best_vectors(scale, groups, counts, runs, sums, out, start):
    """The vectors of least_error, to out[start] and the following, int32, counted in the order of the tree."""
    most = runs.size // groups
    for g in range(groups):
        best, where = splat(_NOTHING), splat(0)
        for i in range(counts[g]):
            at = (g * most + i) * 2 * LANES
            s = (load(sums, at) * scale + load(sums, at + LANES)) * scale
            better = s < best
            best, where = select(better, s, best), select(better, splat(np.float32(i)), where)
        lane = _lowest_bit(_bits(best <= _lowest_lane(best)))
        out[start + g] = LANES * runs[g * most + np.int64(_lane(where, lane))] + lane
