"""Largest and smallest numbers inside kernels: of magnitudes with NaN, and of sixteen blocks at a time."""

from __future__ import annotations

from functools import reduce

from llvmlite import ir
from numba import types

from . import llvm
from .compile import intrinsic
from .instructions.integers import nan_marks
from .lane_types import F32, FLOAT, LANES, element_pointer, is_row
from .llvm import I32, I32X16, I64, concat, constant, shuffle, vector
from .target import target

_BLOCK = 32


def _larger_magnitude(builder, a, b):
    """As integers, which order magnitudes as the numbers are; infinity is above these, NaN above infinity."""
    floats, words = a.type, vector(I32, a.type.count)
    a, b = builder.and_(builder.bitcast(a, words), constant(words, 0x7FFFFFFF)), builder.bitcast(b, words)
    return builder.bitcast(builder.select(builder.icmp_unsigned(">", a, b), a, b), floats)


def _chosen(sign):
    return lambda builder, a, b: builder.select(builder.fcmp_ordered(sign, a, b), a, b)


def _larger_bits(compare):
    """Of the bits as integers, `compare`: the name of the builder's comparison."""

    def larger(builder, a, b):
        words = vector(I32, a.type.count)
        is_larger = getattr(builder, compare)(">", builder.bitcast(a, words), builder.bitcast(b, words))
        return builder.bitcast(builder.select(is_larger, builder.bitcast(a, words), builder.bitcast(b, words)), a.type)

    return larger


@intrinsic
def max_magnitude(typingctx, a, b):
    """The larger of |a| and b per lane, float32 lanes, b not negative: infinity is above all numbers, NaN above infinity."""

    def generate(context, builder, signature, args):
        return _larger_magnitude(builder, *args)

    return F32(F32, F32), generate


@intrinsic
def reduce_max_magnitude(typingctx, a):
    """The largest of sixteen float32 lanes that are not negative; NaN if one of them is."""

    def generate(context, builder, signature, args):
        reduction = llvm.function(builder, f"llvm.vector.reduce.umax.v{LANES}i32", I32, I32X16)
        return builder.bitcast(builder.call(reduction, [builder.bitcast(args[0], I32X16)]), llvm.F32)

    return types.float32(F32), generate


# Lanes of the vectors that trees of comparisons go through: where they are those of a register, few vectors wait for others.
_LANES_AT_ONCE = ((("avx512f",), 16), (("avx2",), 8), ((), 16))


def _of_blocks(*choosers, of_bits):
    """An intrinsic (row, start): of sixteen blocks of 32 elements of a float32 row, the first at `start`, the number of each
    that `larger(builder, a, b)` chooses, as lanes: those of one chooser, or a tuple. Of equal ones (zeros of either sign) it is
    the same place in every block, whatever the processor. of_bits: the choosers compare bits, none of which are equal."""

    @intrinsic
    def extremes(typingctx, row, start):
        if not is_row(row, types.float32):
            return None

        def generate(context, builder, signature, args):
            width = min(LANES, target().choose(_LANES_AT_ONCE))
            part = vector(FLOAT, width)

            def of_block(larger, vectors):
                """Lane l: of the elements whose numbers are l modulo `width`."""
                if larger is _larger_magnitude:
                    return reduce(lambda a, b: larger(builder, b, a), [constant(part, 0.0), *vectors])
                while len(vectors) > 1:
                    half = len(vectors) // 2
                    vectors = [larger(builder, a, b) for a, b in zip(vectors[:half], vectors[half:], strict=True)]
                return vectors[0]

            def chosen(block, step):
                """Lane l: of block `block` + (l & -step mod width), among the lanes of its vectors that are l modulo `step`;
                for each chooser."""
                if step == width:
                    places = [builder.add(args[1], I64(_BLOCK * block + i)) for i in range(0, _BLOCK, width)]
                    pointers = [element_pointer(context, builder, row, args[0], at, FLOAT, width) for at in places]
                    vectors = [builder.load(p, align=4) for p in pointers]
                    return [of_block(larger, vectors) for larger in choosers]
                of_other = [width * bool(lane & step) for lane in range(width)]
                if of_bits and width == 8 and step > 1:  # then one side is a blend, which takes no unit for shuffles
                    sides = [[(lane ^ bit) + of_other[lane] for lane in range(width)] for bit in (0, step)]
                else:
                    sides = [[(lane & ~step | bit) + of_other[lane] for lane in range(width)] for bit in (0, step)]
                own, other = chosen(block, 2 * step), chosen(block + step, 2 * step)
                return [
                    larger(builder, *(shuffle(builder, *pair, side) for side in sides))
                    for larger, *pair in zip(choosers, own, other, strict=True)
                ]

            parts = [chosen(block, 1) for block in range(0, LANES, width)]
            lanes = [concat(builder, each) for each in zip(*parts, strict=True)]
            return lanes[0] if len(lanes) == 1 else context.make_tuple(builder, signature.return_type, lanes)

        result = F32 if len(choosers) == 1 else types.UniTuple(F32, len(choosers))
        return result(row, types.intp), generate

    return extremes


# Of sixteen blocks of 32 elements of a float32 row, (row, start), as lanes: their smallest and largest elements, which may miss
# NaN; the negative and the positive one of largest magnitude, or that of the other sign where there is none; and the largest
# magnitudes. Of these two NaN is the largest.
block_extremes = _of_blocks(_chosen("<"), _chosen(">"), of_bits=False)
block_farthest = _of_blocks(_larger_bits("icmp_unsigned"), _larger_bits("icmp_signed"), of_bits=True)
block_magnitude = _of_blocks(_larger_magnitude, of_bits=True)


@intrinsic
def max_of_eight(typingctx, a, b, c, d, e, f, g, h):
    """Lanes l and l + 8: the largest lane of the value number l, of eight values of float32 lanes that are not negative;
    infinity is above all numbers, NaN above infinity."""

    def generate(context, builder, signature, args):
        values, step = list(args), 4
        while step:
            order = [[lane & ~step | bit for lane in range(LANES)] for bit in (0, step)]
            pairs = [(values[i], values[i + step]) for i in range(step)]
            sides = [[[lane + LANES * bool(i & step) for i, lane in enumerate(lanes)] for lanes in order]] * step
            values = [
                _larger_magnitude(builder, *(shuffle(builder, *pair, lanes) for lanes in side))
                for pair, side in zip(pairs, sides, strict=True)
            ]
            step //= 2
        return _larger_magnitude(builder, values[0], shuffle(builder, values[0], None, [lane ^ 8 for lane in range(LANES)]))

    return F32(*[F32] * 8), generate


@intrinsic
def sum_bits(typingctx, a, b):
    """Float32 lanes whose bits, as integers, are the sum of those of a and b."""

    def generate(context, builder, signature, args):
        return builder.bitcast(builder.add(*(builder.bitcast(arg, I32X16) for arg in args)), F32.vector)

    return F32(F32, F32), generate


@intrinsic
def or_bits(typingctx, a, b):
    """Float32 lanes that have the bits of a and those of b."""

    def generate(context, builder, signature, args):
        return builder.bitcast(builder.or_(*(builder.bitcast(arg, I32X16) for arg in args)), F32.vector)

    return F32(F32, F32), generate


@intrinsic
def nan_bits(typingctx, a, b):
    """Float32 lanes with marks, as `store_nibbles` returns them, of two values of lanes."""

    def generate(context, builder, signature, args):
        return builder.bitcast(nan_marks(builder, *args), F32.vector)

    return F32(F32, F32), generate


@intrinsic
def has_nan(typingctx, marks):
    """Whether there was NaN among the numbers that marks, of all of them by `or_bits`, were made of."""

    def generate(context, builder, signature, args):
        negative = builder.and_(builder.bitcast(args[0], I32X16), constant(I32X16, 0x80808080))
        mask = builder.bitcast(builder.icmp_unsigned("!=", negative, constant(I32X16, 0)), ir.IntType(LANES))
        return builder.icmp_unsigned("!=", mask, ir.IntType(LANES)(0))

    return types.boolean(F32), generate


@intrinsic
def reduce_sum_bits(typingctx, a):
    """The sum of the bits of sixteen float32 lanes as integers, modulo 2^32, as int32."""

    def generate(context, builder, signature, args):
        reduction = llvm.function(builder, f"llvm.vector.reduce.add.v{LANES}i32", I32, I32X16)
        return builder.call(reduction, [builder.bitcast(args[0], I32X16)])

    return types.int32(F32), generate
