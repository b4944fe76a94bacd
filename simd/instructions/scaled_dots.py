"""Dot products of bytes whose sums are multiplied by scales as integers, as pieces of LLVM code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..llvm import I16X32, I32, I32X16, concat, constant, shuffle, vector
from ..target import Forms, Target, target
from .dot_products import add_byte_dots, add_signed_byte_dots, add_word_pairs, byte_pairs, signed_byte_pairs

Added = Callable[[Any, Any, Any, Any, Any, int | None, Target], Any]


def _scaled_pairs(builder: Any, total: Any, a: Any, b: Any, scales: Any, largest: int | None, of: Target) -> Any:
    """Sums of two products fit 16 bits, and are multiplied by their scale two at a time."""
    products = (signed_byte_pairs if largest is None else byte_pairs)(builder, a, b, of)
    return add_word_pairs(builder, total, products, builder.bitcast(scales, I16X32), of)


def _scaled_fours(builder: Any, total: Any, a: Any, b: Any, scales: Any, largest: int | None, of: Target) -> Any:
    """Sums of four products are multiplied by their scale as 32-bit integers."""
    nothing = constant(I32X16, 0)
    if largest is None:
        products = add_signed_byte_dots(builder, nothing, a, b, of)
    else:
        products = add_byte_dots(builder, nothing, a, b, largest, of)
    return builder.add(total, builder.mul(products, scales))


_ADD_SCALED: Forms[Added] = ((("neon",), _scaled_fours), ((), _scaled_pairs))


def _words_permuted(builder: Any, scales: Any, orders: Sequence[Sequence[int]]) -> list[Any]:
    """One instruction for 256 bits where lanes take scales from the eight of their half (`Target.permutes_in_halves`)."""

    def permuted(lanes: Sequence[int]) -> Any:
        return builder.bitcast(shuffle(builder, scales, None, [lane for lane in lanes for _ in range(2)]), vector(I32, 8))

    return [concat(builder, [permuted(order[:8]), permuted(order[8:])]) for order in orders]


def _pairs_permuted(builder: Any, scales: Any, orders: Sequence[Sequence[int]]) -> list[Any]:
    wide = builder.zext(scales, I32X16)
    pairs = builder.or_(builder.shl(wide, constant(I32X16, 16)), wide)
    return [shuffle(builder, pairs, None, order) for order in orders]


def _extended(builder: Any, scales: Any, orders: Sequence[Sequence[int]]) -> list[Any]:
    extended = builder.sext(scales, I32X16)
    return [shuffle(builder, extended, None, order) for order in orders]


_PERMUTED_SCALES = (
    (("neon",), _extended),
    (("avx512bw",), _pairs_permuted),
    (("avx2",), _words_permuted),
    ((), _pairs_permuted),
)


def scales_of_dots(builder: Any, scales: Any, orders: Sequence[Sequence[int]], of: Target | None = None) -> list[Any]:
    """<16 x i32>, one for each order of sixteen lanes: lane i has scales[order[i]] of <16 x i16>, in the form that
    `add_scaled_dots` takes."""
    return (of or target()).choose(_PERMUTED_SCALES)(builder, scales, orders)


def add_scaled_dots(
    builder: Any, total: Any, a: Any, b: Any, scales: Any, largest: int | None, of: Target | None = None
) -> Any:
    """<16 x i32> total + scale * the sums of four products of <64 x i8> each; scales from `scales_of_dots`.

    largest: a is unsigned, 0 to that, 128 or less; None, for targets that `multiplies_signed`: a is signed, -128 to 127. b is
    -127 to 127.
    """
    of = of or target()
    return of.choose(_ADD_SCALED)(builder, total, a, b, scales, largest, of)
