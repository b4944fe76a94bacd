"""Floats to integers, and these to bytes, as pieces of LLVM code: x86 rounds by an instruction, and packs two vectors into one.

Packing leaves four numbers of each vector in turn in each 128 bits, so that it weaves rows by itself, or a permutation follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from ..llvm import F32X16, I8, I32, I32X16, LANES, by_parts, call, concat, shuffle, split_vector, vector
from ..target import Target, target
from . import x86

_CONVERTED_BITS = ((("avx512f",), 512), (("avx2",), 256), ((), 0))
_PACKED_BITS = ((("avx512bw",), 512), (("avx2",), 256), ((), 0))


def rounded(builder: Any, value: Any, of: Target | None = None) -> Any:
    """<16 x i32>: <16 x float> rounded to the nearest integers, ties to even; any integers for those beyond an int32."""
    bits = (of or target()).choose(_CONVERTED_BITS)
    if bits:
        return by_parts(builder, bits, x86.cvtps2dq, value)
    return builder.fptosi(call(builder, f"llvm.nearbyint.v{LANES}f32", F32X16, value), I32X16)


def bytes_of_words(builder: Any, words: Sequence[Any], of: Target | None = None) -> Any:
    """<64 x i8>: four <16 x i32>, numbers from -128 to 127."""
    bits = (of or target()).choose(_PACKED_BITS)
    if not bits:
        return builder.trunc(concat(builder, words), vector(I8, 4 * LANES))
    parts = [part for value in words for part in split_vector(builder, value, LANES * 32 // bits)]
    lanes, packed = bits // 128, []
    for i in range(0, len(parts), 4):
        woven = builder.bitcast(_packed(builder, parts[i : i + 4]), vector(I32, bits // 32))
        packed.append(shuffle(builder, woven, None, [4 * lane + k for k in range(4) for lane in range(lanes)]))
    return builder.bitcast(concat(builder, packed), vector(I8, 4 * LANES))


def truncated_bytes(builder: Any, values: Sequence[Any], of: Target | None = None) -> tuple[Any, Any]:
    """<64 x i8>: four <16 x float> truncated to integers, from above -1 to below 128; and marks, <16 x i32>: some byte is
    negative if a value is NaN, and else only if one is infinite, whose byte is any."""
    bits = (of or target()).choose(_PACKED_BITS)
    if bits:
        codes = bytes_of_words(builder, [by_parts(builder, bits, x86.cvttps2dq, value) for value in values], of)
        return codes, builder.bitcast(codes, I32X16)
    codes = bytes_of_words(builder, [builder.fptosi(value, I32X16) for value in values], of)
    return codes, builder.or_(nan_marks(builder, *values[:2]), nan_marks(builder, *values[2:]))


def nan_marks(builder: Any, a: Any, b: Any) -> Any:
    """<16 x i32>: -1 where a or b, <16 x float>, is NaN, else 0."""
    return builder.sext(builder.fcmp_unordered("uno", a, b), I32X16)


def bytes_and_sums(builder: Any, words: Sequence[Any], of: Target | None = None) -> tuple[Any, Any]:
    """As `bytes_of_words`, and <16 x i32> that together have the sum of these numbers, which are from -127 to 127."""
    if (of or target()).choose(_PACKED_BITS) == 256:  # numbers of 16 bits are half as many to sum
        halves = [half for value in words for half in split_vector(builder, value, 2)]
        pairs = [x86.packs(builder, *halves[i : i + 2]) for i in range(0, len(halves), 2)]
        total = builder.add(builder.add(*pairs[:2]), builder.add(*pairs[2:]))
        summed = x86.pmaddwd(builder, total, ir.Constant(total.type, [1] * total.type.count))
        sums = concat(builder, [summed, ir.Constant(summed.type, [0] * summed.type.count)])
    else:
        a, b, c, d = words
        sums = builder.add(builder.add(a, b), builder.add(c, d))
    return bytes_of_words(builder, words, of), sums


def bytes_of_rows(builder: Any, rows: Sequence[Any], of: Target | None = None) -> Any:
    """<128 x i8>: eight <16 x i32>, numbers from -128 to 127: four of each in turn."""
    bits = (of or target()).choose(_PACKED_BITS)
    if bits:
        parts = [split_vector(builder, row, LANES * 32 // bits) for row in rows]
        woven = []
        for part in zip(*parts, strict=True):
            low, high = (builder.bitcast(_packed(builder, part[i : i + 4]), vector(I32, bits // 32)) for i in (0, 4))
            order = [bits // 32 * k + 4 * lane + i for lane in range(bits // 128) for k in (0, 1) for i in range(4)]
            woven.append(shuffle(builder, low, high, order))
        words = concat(builder, woven)
    else:
        codes = [builder.bitcast(builder.trunc(row, vector(I8, LANES)), vector(I32, 4)) for row in rows]
        words = shuffle(builder, concat(builder, codes), None, [4 * row + i for i in range(4) for row in range(8)])
    return builder.bitcast(words, vector(I8, 8 * LANES))


def _packed(builder: Any, words: Sequence[Any]) -> Any:
    """Bytes of four vectors of i32: in each 128 bits four of each."""
    a, b, c, d = words
    return x86.packs(builder, x86.packs(builder, a, b), x86.packs(builder, c, d))
