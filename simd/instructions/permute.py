"""Look-ups in small tables of bytes and of floats, as pieces of LLVM code, with the best permutation that the target has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core.cgutils import alloca_once

from ..llvm import (
    F32,
    F32X16,
    I1,
    I8,
    I32,
    I32X16,
    I64,
    LANES,
    bits_of,
    by_parts,
    concat,
    constant,
    shuffle,
    split_vector,
    undefined,
    vector,
)
from ..target import Target, target
from . import arm, x86

_PSHUFB_BITS = ((("avx512bw",), 512), (("avx2",), 256), (("ssse3",), 128), ((), 0))


# --- bytes ----------------------------------------------------------------------------------------------------------


def lookup_bytes(builder: Any, entries: Sequence[int], codes: Any, of: Target | None = None) -> Any:
    """Per byte entries[code] of a constant table of up to 64 entries, 0 to 255; codes, <16 n x i8>, below their number."""
    of = of or target()
    size = 1 << max(4, (len(entries) - 1).bit_length())
    table = [int(entry) for entry in entries] + [0] * (size - len(entries))
    sixteens = [table[i : i + 16] for i in range(0, size, 16)]
    if size > 16 and codes.type.count == 64 and of.has("avx512vbmi"):
        return x86.vpermb(builder, constant(I8, (table * 4)[:64]), codes)
    if of.has("neon"):
        tables = [constant(I8, sixteen) for sixteen in sixteens]
        return by_parts(builder, 128, lambda b, part: arm.tbl(b, tables, part), codes)
    parts = [_lookup_sixteen(builder, sixteen, codes, of) for sixteen in sixteens]
    return _by_bits(builder, parts, codes)


def _lookup_sixteen(builder: Any, entries: list[int], codes: Any, of: Target) -> Any:
    """Per byte entries[code & 15]."""
    bits = min(of.choose(_PSHUFB_BITS), bits_of(codes.type))
    if bits:
        table = constant(I8, entries * (bits // 128))
        return by_parts(builder, bits, lambda b, part: x86.pshufb(b, table, part), codes)
    low = builder.and_(codes, constant(codes.type, 15))
    values: Any = constant(codes.type, entries[0])
    for code, entry in enumerate(entries[1:], 1):
        equal = builder.icmp_unsigned("==", low, constant(codes.type, code))
        values = builder.select(equal, constant(codes.type, entry), values)
    return values


def _by_bits(builder: Any, parts: list[Any], codes: Any) -> Any:
    """Lane l of part codes[l] // 16; a power of two of parts."""
    bit = 16
    while len(parts) > 1:
        mask, zero = constant(codes.type, bit), constant(codes.type, 0)
        upper = builder.icmp_unsigned("!=", builder.and_(codes, mask), zero)
        parts = [builder.select(upper, high, low) for low, high in zip(parts[::2], parts[1::2], strict=True)]
        bit *= 2
    return parts[0]


def permute_bytes(builder: Any, table: Any, codes: Any, of: Target | None = None) -> Any:
    """Lane l: byte codes[l] of a table; both <16 x i8>, codes below 16."""
    of = of or target()
    if of.has("ssse3"):
        return x86.pshufb(builder, table, codes)
    if of.has("neon"):
        return arm.tbl(builder, [table], codes)
    values: Any = undefined(table.type)
    for lane in range(LANES):
        code = builder.zext(builder.extract_element(codes, I32(lane)), I32)
        values = builder.insert_element(values, builder.extract_element(table, code), I32(lane))
    return values


# --- masks ----------------------------------------------------------------------------------------------------------


def mask_of_bits(builder: Any, bits: Any, of: Target | None = None) -> Any:
    """<n x i1> of an integer of n bits, n a multiple of 8: lane l is bit l."""
    return (of or target()).choose(_MASKS)(builder, bits)


def _bits_as_lanes(builder: Any, bits: Any) -> Any:
    return builder.bitcast(bits, vector(I1, bits.type.width))


def _bits_tested(builder: Any, bits: Any) -> Any:
    """Each byte goes to eight lanes, which test a bit each: LLVM would take single bits out one after the other."""
    count = bits.type.width
    lanes = shuffle(builder, builder.bitcast(bits, vector(I8, count // 8)), None, [lane // 8 for lane in range(count)])
    tested = builder.and_(lanes, constant(I8, [1 << lane % 8 for lane in range(count)]))
    return builder.icmp_unsigned("!=", tested, constant(tested.type, 0))


def bits_of_bytes(builder: Any, source: Any, which: np.ndarray, bits: np.ndarray, of: Target | None = None) -> Any:
    """<64 x i1>: of each lane bit bits[lane] of byte which[lane] of <32 x i8>. AVX512-BITALG has an instruction for it where
    each lane's byte is one of the four that go with its eight lanes."""
    of = of or target()
    if of.has("avx512bitalg") and (which // 4 == np.arange(64) // 8).all():
        words = builder.zext(builder.bitcast(source, vector(I32, 8)), vector(I64, 8))
        return x86.vpshufbitqmb(builder, builder.bitcast(words, vector(I8, 64)), constant(I8, which % 4 * 8 + bits))
    masked = builder.and_(shuffle(builder, source, None, which), constant(I8, 1 << bits))
    return builder.icmp_unsigned("!=", masked, constant(I8, [0] * 64))


_MASKS = ((("neon",), _bits_tested), ((), _bits_as_lanes))


# --- floats ---------------------------------------------------------------------------------------------------------


def lookup_floats(builder: Any, tables: list[Any], indices: Any, of: Target | None = None) -> Any:
    """Lane l: float indices[l] of one, two or four tables, <16 x float>, laid end to end.

    indices: <16 x i32> below 16 times their number; of a single table the low four bits count.
    """
    of = of or target()
    if of.has("avx512f"):
        return _avx512_floats(builder, tables, indices)
    lookup = of.choose(_FLOAT_LOOKUPS)
    if lookup is None:
        return _floats_in_memory(builder, tables, indices)
    return _by_bits(builder, [lookup(builder, table, indices) for table in tables], indices)


def looks_up_floats(of: Target | None = None) -> bool:
    """Whether there are instructions for `lookup_floats`, which otherwise puts tables in memory."""
    of = of or target()
    return of.has("avx512f") or of.choose(_FLOAT_LOOKUPS) is not None


def _avx512_floats(builder: Any, tables: list[Any], indices: Any) -> Any:
    if len(tables) == 1:
        return x86.vpermps(builder, tables[0], indices)
    if len(tables) == 2:
        return x86.vpermi2ps(builder, tables[0], indices, tables[1])
    low, high = (_avx512_floats(builder, half, indices) for half in (tables[:2], tables[2:]))
    return builder.select(builder.icmp_unsigned("<", indices, constant(I32X16, 2 * LANES)), low, high)


def _avx2_floats(builder: Any, table: Any, indices: Any) -> Any:
    """Both halves of the table are looked up by the low three bits; the fourth chooses."""
    low, high = split_vector(builder, table, 2)
    parts = []
    for part in split_vector(builder, indices, 2):
        upper = builder.icmp_unsigned("!=", builder.and_(part, constant(part.type, 8)), constant(part.type, 0))
        parts.append(builder.select(upper, x86.vpermps(builder, high, part), x86.vpermps(builder, low, part)))
    return concat(builder, parts)


def _neon_floats(builder: Any, table: Any, indices: Any) -> Any:
    """The four bytes of a float are looked up in four registers of bytes."""
    tables = split_vector(builder, builder.bitcast(table, vector(I8, 64)), 4)
    index = builder.and_(indices, constant(I32X16, LANES - 1))
    byte_indices = builder.add(builder.mul(index, constant(I32X16, 0x04040404)), constant(I32X16, 0x03020100))
    codes = builder.bitcast(byte_indices, vector(I8, 64))
    return builder.bitcast(by_parts(builder, 128, lambda b, part: arm.tbl(b, tables, part), codes), F32X16)


_FLOAT_LOOKUPS = ((("avx2",), _avx2_floats), (("neon",), _neon_floats), ((), None))


def _floats_in_memory(builder: Any, tables: list[Any], indices: Any) -> Any:
    memory = alloca_once(builder, ir.ArrayType(F32X16, len(tables)))
    for i, table in enumerate(tables):
        builder.store(table, builder.gep(memory, [I32(0), I32(i)]))
    floats = builder.bitcast(memory, F32.as_pointer())
    return floats_at(builder, floats, builder.and_(indices, constant(I32X16, LANES * len(tables) - 1)))


def floats_at(builder: Any, first: Any, indices: Any) -> Any:
    """Lane l: float indices[l] of those that lie at a pointer, loaded one by one."""
    values: Any = undefined(F32X16)
    for lane in range(LANES):
        entry = builder.load(builder.gep(first, [builder.extract_element(indices, I32(lane))]))
        values = builder.insert_element(values, entry, I32(lane))
    return values


def byte_lookup_instruction(of: Target) -> str:
    """The name of the instruction that lookup_bytes uses: "vpermb (512 bits)"."""
    bits = of.choose(_PSHUFB_BITS)
    names = ((("avx512vbmi",), "vpermb (512 bits)"), (("neon",), "tbl (128 bits)"), (("ssse3",), f"pshufb ({bits} bits)"))
    return of.choose((*names, ((), "portable")))
