"""Operations on single numbers inside kernels: fused multiply-add and rounding as in the reference encoders, and bits.

The reference encoders are compiled with contraction of a * b + c on (docs/formats/encoders.md, "Rounding and checks"), so their
running sums are fused. numba never contracts by itself: kernels that are to give the same bytes call `fma` where they are.
"""

from __future__ import annotations

from numba import types

from .compile import intrinsic, kernel
from .llvm import F32, I1, call

# Adding and subtracting 1.5 * 2**23 rounds a float32 of magnitude below 2**22 to the nearest integer, ties to even.
ROUNDING_CONSTANT = 12582912.0
ROUNDING_BITS = 0x4B400000  # its bits as a float32; those of the sum with an integer are their sum


@intrinsic
def fma(typingctx, a, b, c):
    """a * b + c rounded once; arguments of other types are converted to float32."""

    def generate(context, builder, signature, args):
        return builder.fma(*args)

    f32 = types.float32
    return f32(f32, f32, f32), generate


@kernel
def round_product(a, b):
    """The integer nearest to the exact product of two float32, ties to even, as float32 (|product| below 2**22)."""
    return fma(a, b, ROUNDING_CONSTANT) - types.float32(ROUNDING_CONSTANT)


@intrinsic
def lowest_bit(typingctx, bits):
    """The number of the lowest bit that is set in an int64; 64 for 0."""

    def generate(context, builder, signature, args):
        return builder.cttz(args[0], I1(0))

    return types.int64(types.int64), generate


@intrinsic
def count_bits(typingctx, bits):
    """How many bits are set in an int64."""

    def generate(context, builder, signature, args):
        return builder.ctpop(args[0])

    return types.int64(types.int64), generate


@intrinsic
def float_from_bits(typingctx, bits):
    """The float32 that has the bits of an int32."""

    def generate(context, builder, signature, args):
        return builder.bitcast(args[0], F32)

    return types.float32(types.int32), generate


@intrinsic
def rotate_right(typingctx, word, count):
    """A uint32 whose bits are moved down by `count` (uint32, below 32), those at the lower end to the upper one: by one
    instruction, which LLVM does not find in two shifts."""
    if word != types.uint32 or count != types.uint32:
        return None

    def generate(context, builder, signature, args):
        word, count = args
        return call(builder, "llvm.fshr.i32", word.type, word, word, count)

    return types.uint32(types.uint32, types.uint32), generate
