"""Unsigned eight-bit floats E4M3 (four bits of exponent, three of mantissa) to float32, as a piece of LLVM code."""

from __future__ import annotations

from typing import Any

from ..llvm import F32, constant, like


def half_ue4m3_to_float(builder: Any, codes: Any) -> Any:
    """Half of the number of each code, as `formats.layouts.tables.HALF_UE4M3` has it: <n x i32>, 0 to 255, -> <n x float>.

    The highest bit is ignored; 0x7F, no number, counts as 0.
    """

    def words(value: int) -> Any:
        return constant(codes.type, value)

    floats = like(codes.type, F32)
    # As float32 with an exponent of four bits the number is too small by 2^120; for subnormal ones too.
    bits = builder.shl(builder.and_(codes, words(0x7F)), words(20))
    bits = builder.select(builder.icmp_unsigned("==", codes, words(0x7F)), words(0), bits)
    return builder.fmul(builder.bitcast(bits, floats), constant(floats, 2.0**119))
