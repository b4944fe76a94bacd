"""Instructions of x86 processors as pieces of LLVM code; their widths follow from their arguments.

Which of them the target has is up to the caller: `dot_products` and `permute` choose.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from ..llvm import F32, I1, I8, I16, I32, bits_of, call, vector

_PSHUFB = {512: "avx512.pshuf.b.512", 256: "avx2.pshuf.b", 128: "ssse3.pshuf.b.128"}
_PMADDWD = {512: "avx512.pmaddw.d.512", 256: "avx2.pmadd.wd", 128: "sse2.pmadd.wd"}
_PMADDUBSW = {512: "avx512.pmaddubs.w.512", 256: "avx2.pmadd.ub.sw", 128: "ssse3.pmadd.ub.sw.128"}
_PMULHRSW = {512: "avx512.pmul.hr.sw.512", 256: "avx2.pmul.hr.sw", 128: "ssse3.pmul.hr.sw.128"}
_PSIGNB = {256: "avx2.psign.b", 128: "ssse3.psign.b.128"}
_PACKS = {
    (I16, 512): "avx512.packssdw.512",
    (I16, 256): "avx2.packssdw",
    (I8, 512): "avx512.packsswb.512",
    (I8, 256): "avx2.packsswb",
}
_VPERMPS = {512: "avx512.permvar.sf.512", 256: "avx2.permps"}


def _call(builder: Any, name: str, result: ir.Type, *args: Any) -> Any:
    return call(builder, f"llvm.x86.{name}", result, *args)


# --- conversions ----------------------------------------------------------------------------------------------------


def cvtps2dq(builder: Any, value: Any) -> Any:
    """<16 x i32> or <8 x i32>: floats rounded, ties to even (AVX-512, AVX)."""
    result = vector(I32, value.type.count)
    if bits_of(value.type) == 256:
        return _call(builder, "avx.cvt.ps2dq.256", result, value)
    mode = I32(4)  # that of the processor's state
    return _call(builder, "avx512.mask.cvtps2dq.512", result, value, ir.Constant(result, None), I16(-1), mode)


def cvttps2dq(builder: Any, value: Any) -> Any:
    """As cvtps2dq, rounded towards zero; -2^31 for NaN."""
    result = vector(I32, value.type.count)
    if bits_of(value.type) == 256:
        return _call(builder, "avx.cvtt.ps2dq.256", result, value)
    return _call(builder, "avx512.mask.cvttps2dq.512", result, value, ir.Constant(result, None), I16(-1), I32(4))


def packs(builder: Any, low: Any, high: Any) -> Any:
    """Two vectors of i32 as one of i16, or two of i16 as one of i8, clipped: in each 128 bits those of `low`, then those of
    `high` (AVX512BW, AVX2)."""
    to = {I32: I16, I16: I8}[low.type.element]
    return _call(builder, _PACKS[to, bits_of(low.type)], vector(to, 2 * low.type.count), low, high)


# --- products -------------------------------------------------------------------------------------------------------


def vpermi2w(builder: Any, low: Any, indices: Any, high: Any) -> Any:
    """<32 x i16>: words of two tables of 32, by the low six bits of the indices (AVX512BW)."""
    return _call(builder, "avx512.vpermi2var.hi.512", low.type, low, indices, high)


def vpermi2b(builder: Any, low: Any, indices: Any, high: Any) -> Any:
    """<64 x i8>: bytes of two tables of 64, by the low seven bits of the indices (AVX512-VBMI)."""
    return _call(builder, "avx512.vpermi2var.qi.512", low.type, low, indices, high)


def vpshufbitqmb(builder: Any, words: Any, bits: Any) -> Any:
    """<64 x i1>: of each byte of `bits` that bit of its 64-bit word (AVX512-BITALG)."""
    return _call(builder, "avx512.vpshufbitqmb.512", vector(I1, 64), words, bits)


def vpmultishiftqb(builder: Any, shifts: Any, words: Any) -> Any:
    """<16, 32 or 64 x i8>: of each byte of `shifts` eight bits of its 64-bit word from that bit on, around the end
    (AVX512-VBMI)."""
    return _call(builder, f"avx512.pmultishift.qb.{bits_of(shifts.type)}", shifts.type, shifts, words)


def vpdpbusd(builder: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    """i32 lanes: total + the sum of four products of an unsigned and a signed byte (AVX512-VNNI, AVX-VNNI)."""
    words = (builder.bitcast(v, total.type) for v in (unsigned, signed))
    return _call(builder, f"avx512.vpdpbusd.{bits_of(total.type)}", total.type, total, *words)


def vpdpwssd(builder: Any, total: Any, a: Any, b: Any) -> Any:
    """i32 lanes: total + the sum of two products of i16 (AVX512-VNNI)."""
    words = (builder.bitcast(v, total.type) for v in (a, b))
    return _call(builder, f"avx512.vpdpwssd.{bits_of(total.type)}", total.type, total, *words)


def pmaddwd(builder: Any, a: Any, b: Any) -> Any:
    """i32 lanes: sums of two products of i16 (SSE2, AVX2, AVX512BW)."""
    bits = bits_of(a.type)
    return _call(builder, _PMADDWD[bits], vector(I32, bits // 32), a, b)


def pmaddubsw(builder: Any, unsigned: Any, signed: Any) -> Any:
    """i16 lanes: sums of two products of an unsigned and a signed byte, saturated (SSSE3, AVX2, AVX512BW)."""
    bits = bits_of(unsigned.type)
    return _call(builder, _PMADDUBSW[bits], vector(I16, bits // 16), unsigned, signed)


def pmulhrsw(builder: Any, a: Any, b: Any) -> Any:
    """i16 lanes: (a * b + 2**14) >> 15 (SSSE3, AVX2, AVX512BW)."""
    return _call(builder, _PMULHRSW[bits_of(a.type)], a.type, a, b)


class BFloat(ir.types.Type):
    """LLVM's 16-bit brain float, which llvmlite does not have."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


def vdpbf16ps(builder: Any, total: Any, a: Any, b: Any) -> Any:
    """float lanes: total + the sum of two products of bf16; a and b hold pairs as i32 (AVX512-BF16)."""
    pairs = vector(BFloat(), 2 * total.type.count)
    numbers = (builder.bitcast(v, pairs) for v in (a, b))
    return _call(builder, f"avx512bf16.dpbf16ps.{bits_of(total.type)}", total.type, total, *numbers)


def cvtne2ps2bf16(builder: Any, high: Any, low: Any) -> Any:
    """Two vectors of float32 rounded to the nearest bf16, ties to even: pairs as i32, those of `low` first (AVX512-BF16).
    Subnormal numbers become 0."""
    count = 2 * low.type.count
    rounded = _call(builder, f"avx512bf16.cvtne2ps2bf16.{16 * count}", vector(BFloat(), count), high, low)
    return builder.bitcast(rounded, vector(I32, count // 2))


def psignb(builder: Any, value: Any, signs: Any) -> Any:
    """Byte lanes: value where signs is positive, 0 where it is 0, -value where it is negative (SSSE3, AVX2; no 512 bits)."""
    return _call(builder, _PSIGNB[bits_of(value.type)], value.type, value, signs)


# --- permutations ---------------------------------------------------------------------------------------------------


def pshufb(builder: Any, table: Any, codes: Any) -> Any:
    """Byte codes[l] & 15 of the sixteen bytes that lane l lies in, codes below 128 (SSSE3, AVX2, AVX512BW)."""
    return _call(builder, _PSHUFB[bits_of(codes.type)], codes.type, table, codes)


def vpermb(builder: Any, table: Any, codes: Any) -> Any:
    """Lane l: byte codes[l] & 63 of the table, <64 x i8> (AVX512-VBMI)."""
    return _call(builder, "avx512.permvar.qi.512", vector(I8, 64), table, codes)


def vpermps(builder: Any, table: Any, indices: Any) -> Any:
    """Lane l: float indices[l] (modulo the lanes) of the table (AVX2, AVX-512)."""
    return _call(builder, _VPERMPS[bits_of(table.type)], table.type, table, indices)


def vpermi2ps(builder: Any, low: Any, indices: Any, high: Any) -> Any:
    """Lane l: float indices[l] & 31 of two tables of sixteen floats laid end to end (AVX-512)."""
    return _call(builder, "avx512.vpermi2var.ps.512", vector(F32, 16), low, indices, high)
