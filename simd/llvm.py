"""The builder of vector code: pieces of LLVM code that every processor has, for operations that are compiled into kernels.

Functions take llvmlite's IRBuilder first and write instructions at its place. Addresses are int64 and are not checked. Vectors
may be of any length; LLVM maps them to one, two or more registers. What only some processors have is in `dot_products`,
`permute` and `half_precision`, each with a form for every other processor.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core.cgutils import get_or_insert_function

CACHE_LINE = 64  # bytes
LANES = int(os.environ.get("GGUFMILL_LANES", "16"))  # 1 where lanes are threads of a GPU (see simd.cuda.compile_items)
I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
_BITS = {F16: 16, F32: 32, ir.DoubleType(): 64}


def vector(element: ir.Type, count: int) -> ir.VectorType:
    return ir.VectorType(element, count)


I8X64, I16X32, I32X16, F32X16 = vector(I8, 64), vector(I16, 32), vector(I32, LANES), vector(F32, LANES)


def constant(ir_type: ir.Type, values: Any) -> ir.Constant:
    """A constant vector: one number in every lane (`ir_type`: the vector type), or the numbers of a sequence (`ir_type`: that
    of the vector or of an element)."""
    if isinstance(values, (int, float)):
        return _known_constant(ir_type, [values] * ir_type.count)  # type: ignore[attr-defined]
    numbers = [v.item() if isinstance(v, np.generic) else v for v in values]
    return _known_constant(ir_type if isinstance(ir_type, ir.VectorType) else vector(ir_type, len(numbers)), numbers)


_constants: dict[tuple[str, str], ir.Constant] = {}  # by type and numbers as text: 0.0 is not -0.0


def _known_constant(ir_type: ir.Type, numbers: Any) -> ir.Constant:
    """A constant that is made once, and written as LLVM's text once: kernels shuffle by the same lanes again and again."""
    key = str(ir_type), str(numbers)
    if key not in _constants:
        if isinstance(ir_type, ir.VectorType):
            numbers = [_known_constant(ir_type.element, number) for number in numbers]
        _constants[key] = ir.Constant(ir_type, numbers)
    return _constants[key]


def bits_of(ir_type: ir.Type) -> int:
    """How many bits a number or a vector has."""
    if isinstance(ir_type, ir.VectorType):
        return ir_type.count * bits_of(ir_type.element)
    return ir_type.width if isinstance(ir_type, ir.IntType) else _BITS[ir_type]


def like(ir_type: ir.Type, element: ir.Type) -> ir.Type:
    """The type with `element` in place of the numbers of a type: a vector of as many, or a single one."""
    return vector(element, ir_type.count) if isinstance(ir_type, ir.VectorType) else element


# --- memory ---------------------------------------------------------------------------------------------------------


def pointer(builder: Any, address: Any, ir_type: ir.Type) -> Any:
    """An address as a pointer to the IR type."""
    return builder.inttoptr(address, ir_type.as_pointer())


def _at(builder: Any, address: Any, offset: Any) -> Any:
    if isinstance(offset, int):
        return builder.add(address, I64(offset)) if offset else address
    return builder.add(address, offset)


def load(builder: Any, address: Any, ir_type: ir.Type, offset: Any = 0) -> Any:
    """A value of the IR type from address + offset bytes (a number or an i64), which need not be aligned."""
    return builder.load(pointer(builder, _at(builder, address, offset), ir_type), align=1)


def store(builder: Any, value: Any, address: Any, offset: Any = 0) -> None:
    """Writes a value to address + offset bytes, which need not be aligned."""
    builder.store(value, pointer(builder, _at(builder, address, offset), value.type), align=1)


def prefetch(builder: Any, address: Any, offset: int, locality: int) -> None:
    """Asks for the cache line at address + offset, to be read; where no memory is, nothing happens. locality: into which cache,
    3 the first level, 1 the last."""
    place = pointer(builder, builder.add(address, I64(offset)), I8)
    call(builder, "llvm.prefetch.p0", ir.VoidType(), place, I32(0), I32(locality), I32(1))


# --- lanes ----------------------------------------------------------------------------------------------------------


def undefined(ir_type: ir.Type) -> ir.Constant:
    return ir.Constant(ir_type, ir.Undefined)


def shuffle(builder: Any, a: Any, b: Any, lanes: Sequence[int] | np.ndarray | range) -> Any:
    """Lanes of a and b, laid end to end, by number. b None: of a alone."""
    return builder.shuffle_vector(a, undefined(a.type) if b is None else b, constant(I32, [int(lane) for lane in lanes]))


def concat(builder: Any, parts: Sequence[Any]) -> Any:
    """Vectors of one type laid end to end; their number is a power of two."""
    parts = list(parts)
    while len(parts) > 1:
        count = 2 * parts[0].type.count
        parts = [shuffle(builder, a, b, range(count)) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def split_vector(builder: Any, value: Any, count: int) -> list[Any]:
    """A vector cut into `count` vectors of equal length."""
    if count == 1:
        return [value]
    size = value.type.count // count
    return [shuffle(builder, value, None, range(i * size, (i + 1) * size)) for i in range(count)]


def splat(builder: Any, value: Any, count: int = LANES) -> Any:
    """A scalar in every lane."""
    ir_type = vector(value.type, count)
    return shuffle(builder, builder.insert_element(undefined(ir_type), value, I32(0)), None, [0] * count)


def by_parts(builder: Any, bits: int, function: Callable, *values: Any) -> Any:
    """function(builder, *parts) for parts of the vectors of `bits` bits each, the results laid end to end."""
    count = max(1, bits_of(values[0].type) // bits)
    parts = zip(*(split_vector(builder, value, count) for value in values), strict=True)
    return concat(builder, [function(builder, *part) for part in parts])


def lane_sums(builder: Any, vectors: Sequence[Any]) -> Any:
    """A vector whose lane i is the sum of vector i's lanes; the number of vectors is a power of two, at most LANES. Lanes that
    are half a vector apart are added first, then those a quarter apart: for each vector in the same order, however many there
    are."""
    vectors, of_lanes, size = list(vectors), [[i] * LANES for i in range(len(vectors))], LANES
    while size > 1:  # lanes come in runs of `size`, each of one of the vectors that were given
        unit = LANES if size > 4 else 4  # within which lanes move: the quarter of a vector if that will do
        low = [at + i for start in range(0, LANES, unit) for at in range(start, start + unit, size) for i in range(size // 2)]
        units = [low[at : at + unit // 2] for at in range(0, len(low), unit // 2)]
        lanes = [lane + side for run in units for side in (0, LANES) for lane in run]
        pairs = zip(vectors[::2], vectors[1::2], strict=True) if len(vectors) > 1 else [(vectors[0], vectors[0])]
        of_pairs = zip(of_lanes[::2], of_lanes[1::2], strict=True) if len(vectors) > 1 else [(of_lanes[0], of_lanes[0])]
        high = [lane + size // 2 for lane in lanes]
        vectors = [builder.fadd(shuffle(builder, x, y, lanes), shuffle(builder, x, y, high)) for x, y in pairs]
        of_lanes, size = [[(x + y)[lane] for lane in lanes] for x, y in of_pairs], size // 2
    return shuffle(builder, vectors[0], None, [of_lanes[0].index(i) if i in of_lanes[0] else 0 for i in range(LANES)])


def transposed(builder: Any, rows: Sequence[Any]) -> list[Any]:
    """LANES vectors of LANES words: word i of vector j becomes word j of vector i. Words are moved within quarters of vectors,
    then quarters: shuffles that processors do two at a time."""
    if len(rows) == 1:
        return list(rows)

    def woven(size, high):
        """`size` words of each of two vectors in turn, of the low or the high halves of quarters."""
        firsts = [quarter + 2 * high + i for quarter in range(0, LANES, 4) for i in range(0, 2, size)]
        return [vector * LANES + first + i for first in firsts for vector in range(2) for i in range(size)]

    def quarters(*numbers):
        return [4 * number + i for number in numbers for i in range(4)]

    by_column = []  # [rows / 4][4]: quarter k holds column 4 k + c of four rows
    for r in range(0, LANES, 4):
        pairs = [[shuffle(builder, rows[i], rows[i + 1], woven(1, high)) for high in range(2)] for i in (r, r + 2)]
        by_column.append([shuffle(builder, pairs[0][c // 2], pairs[1][c // 2], woven(2, c % 2)) for c in range(4)])
    done = list(rows)
    for c in range(4):
        of_rows = [columns[c] for columns in by_column]
        for half in range(2):
            first, second = 2 * half, 2 * half + 1
            both = quarters(first, second, 4 + first, 4 + second)
            low, high = (shuffle(builder, of_rows[i], of_rows[i + 1], both) for i in (0, 2))
            for odd in range(2):
                done[4 * (first + odd) + c] = shuffle(builder, low, high, quarters(odd, 2 + odd, 4 + odd, 6 + odd))
    return done


# --- instructions ---------------------------------------------------------------------------------------------------


def function(builder: Any, name: str, result: ir.Type, *args: ir.Type) -> Any:
    """An LLVM intrinsic, declared in the builder's module."""
    return get_or_insert_function(builder.module, ir.FunctionType(result, args), name)


def call(builder: Any, name: str, result: ir.Type, *args: Any) -> Any:
    """Calls an LLVM intrinsic."""
    return builder.call(function(builder, name, result, *(arg.type for arg in args)), args)


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c of float vectors, rounded once."""
    return call(builder, f"llvm.fma.v{a.type.count}{a.type.element.intrinsic_name}", a.type, a, b, c)


def to_float(builder: Any, integers: Any) -> Any:
    """Signed integers as float32."""
    return builder.sitofp(integers, like(integers.type, F32))


def loop(builder: Any, count: Any, body: Callable[[Any], None]) -> None:
    """A loop: body(i) for i (i64) from 0 to count - 1."""
    before, inside, after = builder.block, builder.append_basic_block("body"), builder.append_basic_block("after")
    builder.cbranch(builder.icmp_signed(">", count, I64(0)), inside, after)
    builder.position_at_end(inside)
    i = builder.phi(I64)
    i.add_incoming(I64(0), before)
    body(i)
    following = builder.add(i, I64(1))
    i.add_incoming(following, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, count), inside, after)
    builder.position_at_end(after)
