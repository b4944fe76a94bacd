"""float16 to float32 and back, as pieces of LLVM code: by an instruction, or in integer arithmetic to the same bits."""

from __future__ import annotations

from typing import Any

from ..llvm import F16, F32, I16, I32, like
from ..target import Target, target

_SIGN, _INFINITY, _QUIET = 0x80000000, 0x7F800000, 0x00400000


def half_to_float(builder: Any, bits: Any, of: Target | None = None) -> Any:
    """float32 of the float16 whose bits an i16 holds; a number or a vector of them. NaN become quiet."""
    if (of or target()).has_half:
        return builder.fpext(builder.bitcast(bits, like(bits.type, F16)), like(bits.type, F32))
    number = _Numbers(bits.type)
    wide = builder.zext(bits, number.words)
    magnitude = builder.shl(builder.and_(wide, number(0x7FFF)), number(13))
    # As float32 with the exponent of a float16 the number is too small by 2^112; for subnormal ones too.
    scaled = builder.bitcast(builder.fmul(builder.bitcast(magnitude, number.floats), number.float(2.0**112)), number.words)
    infinite = builder.icmp_unsigned(">=", magnitude, number(0x7C00 << 13))
    nan = builder.icmp_unsigned(">", magnitude, number(0x7C00 << 13))
    special = builder.or_(magnitude, builder.select(nan, number(_INFINITY | _QUIET), number(_INFINITY)))
    sign = builder.shl(builder.and_(wide, number(0x8000)), number(16))
    return builder.bitcast(builder.or_(builder.select(infinite, special, scaled), sign), number.floats)


def float_to_half(builder: Any, value: Any, of: Target | None = None) -> Any:
    """The bits (i16) of the float16 nearest to a float32, ties to even; a number or a vector of them. What is too large becomes
    infinite, NaN become quiet."""
    shorts = like(value.type, I16)
    if (of or target()).has_half:
        return builder.bitcast(builder.fptrunc(value, like(value.type, F16)), shorts)
    number = _Numbers(value.type)
    bits = builder.bitcast(value, number.words)
    magnitude = builder.and_(bits, number(~_SIGN & 0xFFFFFFFF))
    # Normal: the exponent is rebased, and half of the last place added (less one where the last place is even).
    odd = builder.and_(builder.lshr(magnitude, number(13)), number(1))
    rebased = builder.sub(builder.add(magnitude, builder.add(odd, number(0xFFF))), number(112 << 23))
    normal = builder.lshr(rebased, number(13))
    # Subnormal: adding 0.5 leaves as many digits as a float16 has there, rounded by the addition.
    shifted = builder.fadd(builder.bitcast(magnitude, number.floats), number.float(0.5))
    subnormal = builder.sub(builder.bitcast(shifted, number.words), number(126 << 23))
    payload = builder.and_(builder.lshr(magnitude, number(13)), number(0x3FF))
    nan = builder.icmp_unsigned(">", magnitude, number(_INFINITY))
    special = builder.select(nan, builder.or_(payload, number(0x7E00)), number(0x7C00))
    result = builder.select(builder.icmp_unsigned("<", magnitude, number(113 << 23)), subnormal, normal)
    result = builder.select(builder.icmp_unsigned(">=", magnitude, number(143 << 23)), special, result)
    sign = builder.and_(builder.lshr(bits, number(16)), number(0x8000))
    return builder.trunc(builder.or_(result, sign), shorts)


class _Numbers:
    """Constants of the types that go with a type: as many 32-bit words and floats."""

    def __init__(self, ir_type: Any):
        self.words, self.floats = like(ir_type, I32), like(ir_type, F32)

    def __call__(self, value: int) -> Any:
        return self._constant(self.words, value)

    def float(self, value: float) -> Any:
        return self._constant(self.floats, value)

    @staticmethod
    def _constant(ir_type: Any, value: Any) -> Any:
        return ir_type([value] * ir_type.count) if hasattr(ir_type, "count") else ir_type(value)
