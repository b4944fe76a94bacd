"""Eight-bit floats E4M3 (a sign, four bits of exponent, three of mantissa; no infinity) to float32, inside kernels."""

from __future__ import annotations

from typing import Any

from numba import types

from ..compile import intrinsic
from ..lane_types import F32, LANES, element_pointer, is_row
from ..llvm import F32X16, I8, I16, constant, vector
from .half_precision import half_to_float

_NAN, _NAN_HALF = 0x7F, 0x7E00  # magnitudes


@intrinsic
def load_e4m3(typingctx: Any, array: Any, index: Any) -> Any:
    """Sixteen consecutive codes of a uint8 row, as float32 lanes."""
    if not is_row(array, types.uint8):
        return None

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = element_pointer(context, builder, signature.args[0], args[0], args[1], I8)
        codes = builder.zext(builder.load(pointer, align=1), vector(I16, LANES))

        def words(value: int) -> Any:
            return constant(codes.type, value)

        # As float16, whose exponent has one bit more, the number is too small by 2^8; subnormal ones cost nothing there.
        magnitude = builder.and_(codes, words(0x7F))
        is_nan = builder.icmp_unsigned("==", magnitude, words(_NAN))
        half = builder.select(is_nan, words(_NAN_HALF), builder.shl(magnitude, words(7)))
        half = builder.or_(half, builder.shl(builder.and_(codes, words(0x80)), words(8)))
        return builder.fmul(half_to_float(builder, half), constant(F32X16, 256.0))

    return F32(array, types.intp), generate
