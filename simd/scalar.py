"""Single operations with the roundings of the reference encoders: fused multiply-add and rounding of exact products.

The reference is compiled with contraction on (spec D.10), so running sums are fused; whoever wants its bytes has to place
the fused operations by hand, because numba never contracts on its own.
"""

from __future__ import annotations

from numba import types

from .compile import intrinsic, kernel

# Adding and subtracting 1.5 * 2**23 rounds a float32 of magnitude below 2**22 to the nearest integer, ties to even.
ROUNDING_CONSTANT = 12582912.0


@intrinsic
def fma(typingctx, a, b, c):
    """float32 a * b + c with one rounding (the numbers are taken as float32)."""

    def generate(context, builder, signature, args):
        return builder.fma(*args)

    f32 = types.float32
    return f32(f32, f32, f32), generate


@kernel
def round_product(a, b):
    """The integer nearest to the exact product of two float32, ties to even, as float32 (|product| below 2**22)."""
    return fma(a, b, ROUNDING_CONSTANT) - types.float32(ROUNDING_CONSTANT)
