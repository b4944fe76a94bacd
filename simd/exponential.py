"""e to the power of x inside kernels, for one float32 and for sixteen lanes, with the same bits.

`math.exp` in a kernel is a call of the C library per number, some forty times slower.
"""

from __future__ import annotations

import numpy as np
from numba import types

from .compile import intrinsic, kernel
from .lanes import F32, fma_lanes, max_lanes, select, splat
from .llvm import I32, I32X16, constant
from .scalar import ROUNDING_CONSTANT, fma

_LOG2_E = np.float32(1.44269504)
# ln 2 as the sum of two float32: the first has so few bits that its products with small integers are exact.
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_LOWEST, _HIGHEST = np.float32(-87.3), np.float32(88.7)  # results beyond are subnormal or infinite
# e^r = 1 + r + r^2 p(r) for |r| <= ln 2 / 2: p as published with Cephes (S. L. Moshier, expf).
_P0, _P1, _P2, _P3, _P4, _P5 = (
    np.float32(c) for c in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
)


@intrinsic
def _times_power(typingctx, value, rounded):
    """value * 2^n, of one float32 or of lanes, where `rounded` is n + ROUNDING_CONSTANT: n is added to the exponent's bits."""
    ir_type, shift = (I32X16, constant(I32X16, 23)) if value == F32 else (I32, I32(23))

    def generate(context, builder, signature, args):
        bits, exponent = (builder.bitcast(arg, ir_type) for arg in args)
        return builder.bitcast(builder.add(bits, builder.shl(exponent, shift)), args[0].type)

    return (F32(F32, F32) if value == F32 else types.float32(types.float32, types.float32)), generate


@kernel(inline="always")
def exp(x):
    """e^x of a float32, within 1e-7 of it; 0 below -87.3, infinity above 88.7, NaN of NaN."""
    rounded = fma(x, _LOG2_E, ROUNDING_CONSTANT)
    n = rounded - np.float32(ROUNDING_CONSTANT)
    r = fma(n, -_LN2_LOW, fma(n, -_LN2_HIGH, x))
    p = fma(fma(fma(fma(fma(_P0, r, _P1), r, _P2), r, _P3), r, _P4), r, _P5)
    result = _times_power(fma(p, r * r, r) + np.float32(1), rounded)
    result = result if x >= _LOWEST else np.float32(0)
    result = result if x <= _HIGHEST else np.float32(np.inf)
    return result if x == x else x


@kernel
def _within_range(x):
    """e^x of sixteen lanes from _LOWEST to _HIGHEST; unspecified outside that range."""
    rounded = fma_lanes(x, splat(_LOG2_E), splat(ROUNDING_CONSTANT))
    n = rounded - ROUNDING_CONSTANT
    r = fma_lanes(n, splat(-_LN2_LOW), fma_lanes(n, splat(-_LN2_HIGH), x))
    p = fma_lanes(splat(_P0), r, splat(_P1))
    p = fma_lanes(p, r, splat(_P2))
    p = fma_lanes(p, r, splat(_P3))
    p = fma_lanes(p, r, splat(_P4))
    p = fma_lanes(p, r, splat(_P5))
    return _times_power(fma_lanes(p, r * r, r) + 1, rounded)


@kernel
def exp_lanes(x):
    """e^x of sixteen float32 lanes, each with the bits that `exp` gives."""
    result = select(x >= _LOWEST, _within_range(x), splat(0))
    result = select(x <= _HIGHEST, result, splat(np.float32(np.inf)))
    return select(x == x, result, x)


@kernel
def one_plus_exp_lanes(x):
    """1 + e^x of sixteen float32 lanes, with the bits of exp_lanes(x) + 1 but for NaN, of which it is 1."""
    x = max_lanes(x, splat(_LOWEST))
    return select(x <= _HIGHEST, _within_range(x), splat(np.float32(np.inf))) + 1
