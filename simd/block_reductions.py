"""Largest and smallest numbers inside kernels: of magnitudes with NaN, and of sixteen blocks at a time."""

from __future__ import annotations

from functools import reduce

from llvmlite import ir
from numba import types

from . import llvm
from .compile import intrinsic
from .lane_types import F32, LANES, element_pointer, is_row
from .llvm import F32X16, I32, I32X16, I64, constant, shuffle

_BLOCK = 32
_ZERO = constant(F32X16, 0.0)


def _larger_magnitude(builder, a, b):
    """As integers, which order magnitudes as the numbers are; infinity is above these, NaN above infinity."""
    a = builder.and_(builder.bitcast(a, I32X16), constant(I32X16, 0x7FFFFFFF))
    b = builder.bitcast(b, I32X16)
    return builder.bitcast(builder.select(builder.icmp_unsigned(">", a, b), a, b), F32X16)


def _chosen(sign):
    return lambda builder, a, b: builder.select(builder.fcmp_ordered(sign, a, b), a, b)


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


def _of_blocks(larger):
    """An intrinsic (row, start): of sixteen blocks of 32 elements of a float32 row, the first at `start`, the number of each
    that `larger(builder, a, b)` chooses, as lanes. Of equal ones (zeros of either sign) it is the same place in every block."""

    @intrinsic
    def extremes(typingctx, row, start):
        if not is_row(row, types.float32):
            return None

        def generate(context, builder, signature, args):
            magnitudes = larger is _larger_magnitude

            def chosen(block, step):
                """Lane l: of block `block` + (l & -step mod 16), among the lanes of its vectors that are l modulo `step`."""
                if step == LANES:
                    places = [builder.add(args[1], I64(_BLOCK * block + i)) for i in range(0, _BLOCK, LANES)]
                    pointers = [element_pointer(context, builder, row, args[0], at, F32X16.element) for at in places]
                    vectors = [builder.load(p, align=4) for p in pointers]
                    return reduce(lambda a, b: larger(builder, b, a), [_ZERO, *vectors] if magnitudes else vectors[::-1])
                own, other = chosen(block, 2 * step), chosen(block + step, 2 * step)
                of_other = [LANES * bool(lane & step) for lane in range(LANES)]
                below, above = (
                    shuffle(builder, own, other, [(lane & ~step | bit) + of_other[lane] for lane in range(LANES)])
                    for bit in (0, step)
                )
                return larger(builder, below, above)

            return chosen(0, 1)

        return F32(row, types.intp), generate

    return extremes


# Of sixteen blocks of 32 elements of a float32 row, (row, start): their largest and smallest elements and largest magnitudes,
# as lanes. Only of magnitudes NaN is the largest: the others may miss it.
block_max, block_min, block_magnitude = _of_blocks(_chosen(">")), _of_blocks(_chosen("<")), _of_blocks(_larger_magnitude)


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
        return builder.bitcast(builder.add(*(builder.bitcast(arg, I32X16) for arg in args)), F32X16)

    return F32(F32, F32), generate


@intrinsic
def or_bits(typingctx, a, b):
    """Float32 lanes that have the bits of a and those of b."""

    def generate(context, builder, signature, args):
        return builder.bitcast(builder.or_(*(builder.bitcast(arg, I32X16) for arg in args)), F32X16)

    return F32(F32, F32), generate


@intrinsic
def may_not_be_finite(typingctx, bits):
    """Whether there may be infinity or NaN among numbers, of which `bits` are all `or_bits`: if not, there is none."""

    def generate(context, builder, signature, args):
        exponents = builder.and_(builder.bitcast(args[0], I32X16), constant(I32X16, 0x7F800000))
        full = builder.icmp_unsigned("==", exponents, constant(I32X16, 0x7F800000))
        mask = builder.bitcast(full, ir.IntType(LANES))
        return builder.icmp_unsigned("!=", mask, ir.IntType(LANES)(0))

    return types.boolean(F32), generate


@intrinsic
def reduce_sum_bits(typingctx, a):
    """The sum of the bits of sixteen float32 lanes as integers, modulo 2^32, as int32."""

    def generate(context, builder, signature, args):
        reduction = llvm.function(builder, f"llvm.vector.reduce.add.v{LANES}i32", I32, I32X16)
        return builder.call(reduction, [builder.bitcast(args[0], I32X16)])

    return types.int32(F32), generate
