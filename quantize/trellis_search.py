"""Looking for the vectors of a trellis codebook that are nearest to a group of weights, at several scales at once.

The search is not approximate by design but by budget: it opens boxes of the codebook's tree (see trellis_codebook) whose
distance from the group is below a limit, and reads all vectors in them. The limit is a share of the distance that the nearest vector
will probably have; where the answer shows that the guess was too low, the search is repeated with a higher one.

Distances are weighted squares, sum w_i (c_i - y_i)^2 with y = x / scale. Boxes and vectors are compared in 16-bit fixed point, of
which pairs of products are added up in 32 bits: on x86 the instructions vpmaddwd and vpdpwssd, which LLVM finds by
itself in the plain form written here; other processors give the same integers.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function

from ..formats.kernels import kernel
from .arithmetic import operation
from .lanes import F32, LANES, MASK, load, select, spread, store
from .trellis_codebook import OFFSET, UNITS

WIDTH = 2 * LANES  # int16 numbers in a row of a table: two coordinates of 16 vectors
_SHORT, _INT = ir.IntType(16), ir.IntType(32)
_SHORTS, _INTS = ir.VectorType(_SHORT, WIDTH), ir.VectorType(_INT, WIDTH)
_SUMS = ir.VectorType(_INT, LANES)
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_FAR = np.float32(250)  # coordinates are cut off here; those of vectors end at 126
_SHORT_MAX, _USHORT_MAX = np.float32(32767), np.float32(65535)
_SQUARE_MAX = np.float32(8191)  # times 8 squares of 126: still an int32
_NOTHING = np.float32(3e38)
_TINY = np.float32(1e-37)
_VARIANCE = np.float32(1365)  # of the values of codebooks: four bytes of 0 to 63
_RHO_MAX = np.float32(1e4)
_ATTEMPTS = 24
_ENOUGH = np.float32(0.6)  # of the limit that the distance found asks for


def _row(context, builder, array_type, array, index, number):
    """Row `number` of a table from array[index] on: <32 x i16>."""
    data = context.make_array(array_type)(context, builder, array).data
    place = builder.gep(data, [builder.add(index, ir.Constant(index.type, number * WIDTH))])
    return builder.load(builder.bitcast(place, _SHORTS.as_pointer()), align=2)


def _pair(context, builder, array_type, array, number):
    """Element `number` of an int32 row, two int16 in one, sixteen times: <32 x i16>."""
    data = context.make_array(array_type)(context, builder, array).data
    value = builder.load(builder.gep(data, [ir.Constant(_INT, number)]))
    none = ir.Constant(_SUMS, ir.Undefined)
    first = builder.insert_element(none, value, ir.Constant(_INT, 0))
    return builder.bitcast(builder.shuffle_vector(first, none, ir.Constant(_SUMS, [0] * LANES)), _SHORTS)


def _add_products(builder, total, a, b):
    """total + products of pairs of int16, added two by two: <16 x i32>."""
    products = builder.mul(builder.sext(a, _INTS), builder.sext(b, _INTS))
    none = ir.Constant(_INTS, ir.Undefined)
    even, odd = (
        builder.shuffle_vector(products, none, ir.Constant(_SUMS, list(range(start, WIDTH, 2)))) for start in (0, 1)
    )
    both = builder.add(even, odd)
    return both if total is None else builder.add(total, both)


def _less(builder, a, b):
    """a - b of uint16, 0 where b is larger."""
    kind = ir.FunctionType(_SHORTS, [_SHORTS, _SHORTS])
    return builder.call(get_or_insert_function(builder.module, kind, f"llvm.usub.sat.v{WIDTH}i16"), [a, b])


def _upper_product(builder, a, b):
    product = builder.mul(builder.zext(a, _INTS), builder.zext(b, _INTS))
    return builder.trunc(builder.lshr(product, ir.Constant(_INTS, [16] * WIDTH)), _SHORTS)


def _bounds(pairs):
    @operation
    def bounds(typingctx, boxes, at, place, stretch):
        """Squared distances of a point from the sixteen boxes at boxes[at], as float32 lanes.

        place, stretch: int32 rows of pairs of uint16, the point's coordinates and what distances along them are multiplied by / 2**16.
        """

        def generate(context, builder, sig, args):
            kinds, total = sig.args, None
            for j in range(pairs):
                low, high = (_row(context, builder, kinds[0], args[0], args[1], 2 * j + end) for end in (0, 1))
                here = _pair(context, builder, kinds[2], args[2], j)
                distance = builder.or_(_less(builder, low, here), _less(builder, here, high))
                scaled = _upper_product(builder, distance, _pair(context, builder, kinds[3], args[3], j))
                total = _add_products(builder, total, scaled, scaled)
            return builder.sitofp(total, _FLOATS)

        return F32(boxes, types.intp, place, stretch), generate

    return bounds


def _dots(pairs, squared):
    @operation
    def dots(typingctx, vectors, at, factors):
        """Sums of the factors (an int32 row of pairs of int16) times the coordinates of the sixteen vectors at vectors[at], or
        times their squares, as float32 lanes."""

        def generate(context, builder, sig, args):
            total = None
            for j in range(pairs):
                c = _row(context, builder, sig.args[0], args[0], args[1], j)
                factor = _pair(context, builder, sig.args[2], args[2], j)
                total = _add_products(builder, total, builder.mul(c, c) if squared else c, factor)
            return builder.sitofp(total, _FLOATS)

        return F32(vectors, types.intp, factors), generate

    return dots


_bounds_of_8, _bounds_of_4 = _bounds(4), _bounds(2)
_squares_of_8, _squares_of_4 = _dots(4, True), _dots(2, True)
_products_of_8, _products_of_4 = _dots(4, False), _dots(2, False)


@operation
def _bits(typingctx, mask):
    """A mask as a number whose bit l is lane l."""

    def generate(context, builder, sig, args):
        return builder.zext(builder.bitcast(args[0], ir.IntType(LANES)), ir.IntType(64))

    return types.int64(MASK), generate


@operation
def _lowest_bit(typingctx, word):
    """Number of the lowest bit that is set in an int64; 64 for 0."""

    def generate(context, builder, sig, args):
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.int64), generate


@operation
def _count_bits(typingctx, word):
    """How many bits are set in an int64."""

    def generate(context, builder, sig, args):
        return builder.ctpop(args[0])

    return types.int64(types.int64), generate


@operation
def _lowest_lane(typingctx, a):
    """The smallest of sixteen float32 lanes, none of which is NaN."""

    def generate(context, builder, sig, args):
        kind = ir.FunctionType(ir.FloatType(), [args[0].type])
        reduce = get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fmin.v{LANES}f32")
        return builder.call(reduce, args, fastmath=("nnan",))

    return types.float32(F32), generate


@kernel
def _find_runs(boxes, levels, tops, size, place, stretch, limit, a, b):
    """Runs of vectors whose boxes lie within the limit: (how many, the row that holds their numbers: a or b)."""
    count = tops
    for i in range(tops):
        a[i] = i
    for level in range(levels.size):
        found = 0
        for i in range(count):
            at = levels[level] + a[i] * (2 * LANES * size)
            if size == 8:
                near = _bits(_bounds_of_8(boxes, at, place, stretch) <= limit)
            else:
                near = _bits(_bounds_of_4(boxes, at, place, stretch) <= limit)
            # Four at a time without a branch: what lies beyond those found is written over by the next.
            first, found = found, found + _count_bits(near)
            while True:
                for k in range(4):
                    b[first + k] = LANES * a[i] + _lowest_bit(near)
                    near &= near - 1
                first += 4
                if near == 0:
                    break
        a, b = b, a
        count = found
    return count, a


@operation
def _as_float(typingctx, bits):
    """The float32 of these 32 bits."""

    def generate(context, builder, sig, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), generate


@operation
def _lane(typingctx, a, number):
    """One of sixteen float32 lanes."""

    def generate(context, builder, sig, args):
        return builder.extract_element(args[0], args[1])

    return types.float32(F32, types.int64), generate


@kernel
def _both(low, high):
    """Two int16 or uint16 numbers as a pair."""
    return (np.int32(low) & 0xFFFF) | np.int32(high) << 16


@kernel
def prepare(x, w, size, stretch, squares, products, facts):
    """What the search needs to know of a block's groups, whatever the scale.

    x, w      float32 [n]: weights, and what their squared errors are multiplied by, above 0
    stretch, squares, products    int32 [n / size, size / 2], out: pairs of square roots of w, of w, of w * x, in fixed point
    facts     float32 [n / size, 5], out: largest w, largest |w * x|, mean x^2, geometric mean of w over the largest, sum w x^2
    """
    bits = w.view(np.int32)
    for g in range(x.size // size):
        most_w = most_wx = xx = wxx = np.float32(0)
        exponents = np.int64(0)
        for i in range(g * size, g * size + size):
            wx = w[i] * x[i]
            most_w = max(most_w, w[i])
            most_wx = max(most_wx, abs(wx))
            xx += x[i] * x[i]
            wxx += wx * x[i]
            exponents += bits[i]
        most_wx = max(most_wx, _TINY)
        for j in range(size // 2):
            i = g * size + 2 * j
            w0, w1 = w[i] / most_w, w[i + 1] / most_w
            stretch[g, j] = _both(np.sqrt(w0) * _USHORT_MAX, np.sqrt(w1) * _USHORT_MAX)
            squares[g, j] = _both(np.rint(w0 * _SQUARE_MAX), np.rint(w1 * _SQUARE_MAX))
            to_short = _SHORT_MAX / most_wx
            products[g, j] = _both(np.rint(w[i] * x[i] * to_short), np.rint(w[i + 1] * x[i + 1] * to_short))
        # The mean of floats' bit patterns is that of their logarithms, nearly.
        mean_w = np.int32(exponents // size)
        facts[g, 0], facts[g, 1], facts[g, 2], facts[g, 4] = most_w, most_wx, xx / np.float32(size), wxx
        facts[g, 3] = _as_float(mean_w) / most_w


@kernel
def search(
    x, size, stretch, squares, products, facts, center, scales, share, expected, tree, place, lists, sums, scores, indices
):
    """For each scale finds the vectors c of the codebook with the least sum w_i (x_i - scale * c_i)^2 for the groups of a block.

    x         float32 [n]; size: 8 or 4, the length of a group
    stretch, squares, products, facts    from `prepare`
    center    the scale that decides which boxes are opened: among the scales, not 0
    scales    float32 [scales], out: scores, float32 [scales]: that sum less sum w_i x_i^2, over the block
    share     of the expected distance, up to which boxes are opened
    expected  float32 [4]: distance as a polynomial of the mean square of a group over that of the codebook
    tree      boxes, levels, tops, vectors of the Book
    indices   int32 [scales, n / size], out: the vectors, counted in the order of the tree
    place, lists, sums    scratch: int32 [4], int64 [2, runs], float32 [2, 16 * runs]
    """
    boxes, levels, tops, vectors = tree
    inverse = 1 / center
    unit = np.float32(UNITS * UNITS)
    scores[:] = 0
    for g in range(x.size // size):
        most_w, most_wx, xx, share_w, wxx = facts[g]
        for j in range(size // 2):
            low = min(max(x[g * size + 2 * j] * inverse, -_FAR), _FAR)
            high = min(max(x[g * size + 2 * j + 1] * inverse, -_FAR), _FAR)
            place[j] = _both((low + OFFSET) * UNITS, (high + OFFSET) * UNITS)
        rho = min(xx * inverse * inverse / _VARIANCE, _RHO_MAX)
        limit = share * unit * share_w * (expected[0] + rho * (expected[1] + rho * (expected[2] + rho * expected[3])))
        a, b = most_w / _SQUARE_MAX, -2 * most_wx / _SHORT_MAX
        count = 0
        runs = lists[0]
        for _ in range(_ATTEMPTS):
            count, runs = _find_runs(boxes, levels, tops, size, place, stretch[g], limit, lists[0], lists[1])
            best = spread(_NOTHING)
            for i in range(count):
                at = runs[i] * (LANES * size)
                if size == 8:
                    p, q = _squares_of_8(vectors, at, squares[g]), _products_of_8(vectors, at, products[g])
                else:
                    p, q = _squares_of_4(vectors, at, squares[g]), _products_of_4(vectors, at, products[g])
                store(sums[0], LANES * i, p)
                store(sums[1], LANES * i, q)
                s = p * (a * center * center) + q * (b * center)
                best = select(s < best, s, best)
            if count == 0:
                limit = 3 * limit + 1
                continue
            reached = (_lowest_lane(best) + wxx) * inverse * inverse / most_w * unit
            if limit >= _ENOUGH * share * reached:
                break
            limit = share * reached
        for k in range(scales.size):
            ak, bk = a * scales[k] * scales[k], b * scales[k]
            best, where = spread(_NOTHING), spread(0)
            for i in range(count):
                s = load(sums[0], LANES * i) * ak + load(sums[1], LANES * i) * bk
                better = s < best
                best = select(better, s, best)
                where = select(better, spread(np.float32(i)), where)
            least = _lowest_lane(best)
            lane = _lowest_bit(_bits(best <= least))
            scores[k] += least
            indices[k, g] = LANES * runs[np.int64(_lane(where, lane))] + lane
