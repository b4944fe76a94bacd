"""Dot products of bytes whose sums are multiplied by scales as integers, as pieces of LLVM code."""

from __future__ import annotations

from typing import Any

from ..llvm import I16X32, I32X16, constant
from ..target import Forms, Target, target
from .dot_products import add_byte_dots, add_signed_byte_dots, add_word_pairs, byte_pairs, signed_byte_pairs


class _ScaledPairs:
    """Sums of two products fit 16 bits, and are multiplied by their scale two at a time."""

    @staticmethod
    def scales(builder: Any, scales: Any) -> Any:
        wide = builder.zext(scales, I32X16)
        return builder.or_(builder.shl(wide, constant(I32X16, 16)), wide)

    @staticmethod
    def add(builder: Any, total: Any, a: Any, b: Any, scales: Any, largest: int | None, of: Target) -> Any:
        products = (signed_byte_pairs if largest is None else byte_pairs)(builder, a, b, of)
        return add_word_pairs(builder, total, products, builder.bitcast(scales, I16X32), of)


class _ScaledFours:
    """Sums of four products are multiplied by their scale as 32-bit integers."""

    @staticmethod
    def scales(builder: Any, scales: Any) -> Any:
        return builder.sext(scales, I32X16)

    @staticmethod
    def add(builder: Any, total: Any, a: Any, b: Any, scales: Any, largest: int | None, of: Target) -> Any:
        nothing = constant(I32X16, 0)
        if largest is None:
            products = add_signed_byte_dots(builder, nothing, a, b, of)
        else:
            products = add_byte_dots(builder, nothing, a, b, largest, of)
        return builder.add(total, builder.mul(products, scales))


_SCALED: Forms[type[_ScaledPairs] | type[_ScaledFours]] = ((("neon",), _ScaledFours), ((), _ScaledPairs))


def scales_of_dots(builder: Any, scales: Any, of: Target | None = None) -> Any:
    """<16 x i32>: scales, <16 x i16>, in the form that `add_scaled_dots` takes; lanes may be permuted."""
    return (of or target()).choose(_SCALED).scales(builder, scales)


def add_scaled_dots(
    builder: Any, total: Any, a: Any, b: Any, scales: Any, largest: int | None, of: Target | None = None
) -> Any:
    """<16 x i32> total + scale * the sums of four products of <64 x i8> each; scales from `scales_of_dots`.

    largest: a is unsigned, 0 to that, 128 or less; None, for targets that `multiplies_signed`: a is signed, -128 to 127. b is
    -127 to 127.
    """
    of = of or target()
    return of.choose(_SCALED).add(builder, total, a, b, scales, largest, of)
