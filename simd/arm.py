"""Instructions of ARM processors (NEON on aarch64, registers of 128 bits) as pieces of LLVM code.

Which of them the target has is up to the caller: `dot_products` and `permute` choose.
"""

from __future__ import annotations

from typing import Any

from .llvm import I8, I32, call, vector

_BYTES, _WORDS = vector(I8, 16), vector(I32, 4)


def sdot(builder: Any, total: Any, a: Any, b: Any) -> Any:
    """<4 x i32>: total + the sum of four products of signed bytes (FEAT_DotProd)."""
    return call(builder, "llvm.aarch64.neon.sdot.v4i32.v16i8", _WORDS, total, a, b)


def usdot(builder: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    """<4 x i32>: total + the sum of four products of an unsigned and a signed byte (FEAT_I8MM)."""
    return call(builder, "llvm.aarch64.neon.usdot.v4i32.v16i8", _WORDS, total, unsigned, signed)


def smmla(builder: Any, total: Any, a: Any, b: Any) -> Any:
    """<4 x i32>: total [2, 2] + a [2, 8] times b [2, 8] transposed, signed bytes (FEAT_I8MM)."""
    return call(builder, "llvm.aarch64.neon.smmla.v4i32.v16i8", _WORDS, total, a, b)


def tbl(builder: Any, tables: list[Any], codes: Any) -> Any:
    """Lane l: byte codes[l] of one to four tables of sixteen bytes laid end to end, 0 where the code is beyond them."""
    return call(builder, f"llvm.aarch64.neon.tbl{len(tables)}.v16i8", _BYTES, *tables, codes)
