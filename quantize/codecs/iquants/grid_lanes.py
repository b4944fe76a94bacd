"""LLVM operations on packed levels, for sixteen candidates or sixteen elements at a time.

The levels of a grid point are packed into 16 bits: eight levels of two bits (iq1, iq2) or four of four bits (iq3), the first
element lowest. A nibble table is sixteen floats, one for each value of one nibble of such a code.
"""

from __future__ import annotations

from numba import types

from ....simd.compile import intrinsic
from ....simd.instructions.permute import lookup_floats
from ....simd.lanes import F32, LANES
from ....simd.llvm import I16, I32, I32X16, constant, shuffle, undefined, vector

_SHORTS = vector(I16, LANES)
_HALF = LANES // 2


@intrinsic
def lookup_sum(typingctx, codes, index, t0, t1, t2, t3):
    """Lane l: t0[nibble 0] + t1[nibble 1] + t2[nibble 2] + t3[nibble 3] of codes[index + l].

    codes: uint16 row; t0 ...: nibble tables, as lanes.
    """

    def generate(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        place = builder.bitcast(builder.gep(data, [args[1]]), _SHORTS.as_pointer())
        word = builder.zext(builder.load(place, align=2), I32X16)
        parts = []
        for p, table in enumerate(args[2:]):
            shifted = builder.lshr(word, constant(I32X16, 4 * p)) if p else word
            parts.append(lookup_floats(builder, [table], shifted))
        return builder.fadd(builder.fadd(parts[0], parts[1]), builder.fadd(parts[2], parts[3]))

    return F32(codes, types.intp, F32, F32, F32, F32), generate


def _make_unpack(bits: int):
    """The operation that takes eight levels of `bits` bits from each of two words to sixteen values of a table."""

    @intrinsic
    def values(typingctx, first, second, table):
        """Lane l < 8: table[l-th level of `first`], lane l >= 8: table[(l - 8)-th level of `second`]; levels are looked up by
        their low four bits, so a table of two-bit levels repeats itself four times."""

        def generate(context, builder, signature, args):
            empty = undefined(I32X16)
            halves = builder.insert_element(builder.insert_element(empty, args[0], I32(0)), args[1], I32(1))
            words = shuffle(builder, halves, None, [0] * _HALF + [1] * _HALF)
            shifts = [bits * (lane % _HALF) for lane in range(LANES)]
            return lookup_floats(builder, [args[2]], builder.lshr(words, constant(I32, shifts)))

        return F32(types.uint32, types.uint32, F32), generate

    return values


unpack_2bit_levels, unpack_4bit_levels = _make_unpack(2), _make_unpack(4)
