"""Instructions of ARM processors (NEON on aarch64, registers of 128 bits) as pieces of LLVM code.

Which of them the target has is up to the caller: `dot_products` and `permute` choose.
"""

from __future__ import annotations

from typing import Any

from ..llvm import I8, I16, I32, call, shuffle, vector

_BYTES, _SHORTS, _WORDS = vector(I8, 16), vector(I16, 8), vector(I32, 4)


def sdot(builder: Any, total: Any, a: Any, b: Any) -> Any:
    """<4 x i32>: total + the sum of four products of signed bytes (FEAT_DotProd)."""
    return call(builder, "llvm.aarch64.neon.sdot.v4i32.v16i8", _WORDS, total, a, b)


def usdot(builder: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    """<4 x i32>: total + the sum of four products of an unsigned and a signed byte (FEAT_I8MM)."""
    return call(builder, "llvm.aarch64.neon.usdot.v4i32.v16i8", _WORDS, total, unsigned, signed)


def usmmla(builder: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    """<4 x i32>: total [2, 2] + unsigned [2, 8] times signed [2, 8] transposed, bytes (FEAT_I8MM)."""
    return call(builder, "llvm.aarch64.neon.usmmla.v4i32.v16i8", _WORDS, total, unsigned, signed)


def smull_pairs(builder: Any, a: Any, b: Any) -> Any:
    """<8 x i16>: sums of two products of signed bytes, which have to fit (smull, smull2, addp)."""
    halves = []
    for first in (0, 8):
        low, high = (builder.sext(shuffle(builder, v, None, range(first, first + 8)), _SHORTS) for v in (a, b))
        halves.append(builder.mul(low, high))
    return addp(builder, *halves)


def sqrdmulh(builder: Any, a: Any, b: Any) -> Any:
    """<8 x i16>: (a * b + 2**14) >> 15; not both may be -2**15."""
    return call(builder, "llvm.aarch64.neon.sqrdmulh.v8i16", _SHORTS, a, b)


def addp(builder: Any, a: Any, b: Any) -> Any:
    """Sums of neighbouring numbers of a, then of b: <16 x i8> or <8 x i16>."""
    return call(builder, f"llvm.aarch64.neon.addp.v{a.type.count}i{a.type.element.width}", a.type, a, b)


def saddlp(builder: Any, value: Any) -> Any:
    """Sums of two neighbouring signed numbers of twice the width: <8 x i16> of <16 x i8>, <4 x i32> of <8 x i16>. Added to
    something, it is one instruction with the addition (sadalp)."""
    narrow = value.type
    wide = vector({8: I16, 16: I32}[narrow.element.width], narrow.count // 2)
    name = f"llvm.aarch64.neon.saddlp.v{wide.count}i{wide.element.width}.v{narrow.count}i{narrow.element.width}"
    return call(builder, name, wide, value)


def tbl(builder: Any, tables: list[Any], codes: Any) -> Any:
    """Lane l: byte codes[l] of one to four tables of sixteen bytes laid end to end, 0 where the code is beyond them."""
    return call(builder, f"llvm.aarch64.neon.tbl{len(tables)}.v16i8", _BYTES, *tables, codes)
