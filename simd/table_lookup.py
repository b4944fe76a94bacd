"""Looking things up in small tables of floats, sixteen at a time, inside kernels.

With AVX-512 a table of 16 or 32 floats is one or two registers, and sixteen look-ups are one permutation. Elsewhere they go
through memory, with the same results. Tables are float32 vectors of 16, 32 or 64 numbers, padded where an entry is not used.
"""

from __future__ import annotations

from functools import cache

from llvmlite import ir
from numba.core import config, types
from numba.core.cgutils import alloca_once, get_or_insert_function
from numba.core.codegen import get_host_cpu_features

from .compile import intrinsic
from .lane_types import F32, LANES, element_pointer, is_row, vector_type

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_FLOATS, _WORDS, _BYTES = (ir.VectorType(kind, LANES) for kind in (ir.FloatType(), _I32, _I8))


@cache
def _permutes() -> bool:
    """Whether the code that numba generates may use AVX-512."""
    asked: str | None = config.CPU_FEATURES  # type: ignore[attr-defined]
    return "+avx512f" in (get_host_cpu_features() if asked is None else asked).split(",")


def _everywhere(number: int) -> ir.Constant:
    return ir.Constant(_WORDS, [number] * LANES)


def _pointer(context, builder, array_type, array, index, vector):
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), vector.as_pointer())


def _registers(context, builder, array_type, array, entries, start=None):
    """A table that begins at array[start], as vectors of sixteen floats."""
    places = [_I64(i) if start is None else builder.add(start, _I64(i)) for i in range(0, entries, LANES)]
    return [builder.load(_pointer(context, builder, array_type, array, place, _FLOATS), align=4) for place in places]


def _through_memory(builder, tables, places):
    whole = alloca_once(builder, ir.ArrayType(_FLOATS, len(tables)))
    for i, table in enumerate(tables):
        builder.store(table, builder.gep(whole, [_I32(0), _I32(i)]))
    floats = builder.bitcast(whole, ir.FloatType().as_pointer())
    out = ir.Constant(_FLOATS, ir.Undefined)
    for lane in range(LANES):
        entry = builder.gep(floats, [builder.extract_element(places, _I32(lane))])
        out = builder.insert_element(out, builder.load(entry), _I32(lane))
    return out


def _look_up(builder, tables, places):
    """Number places[l], a vector of 32-bit integers, of the tables laid end to end, for each lane l."""
    if not _permutes():
        return _through_memory(builder, tables, places)
    if len(tables) == 1:
        kind = ir.FunctionType(_FLOATS, [_FLOATS, _WORDS])
        return builder.call(get_or_insert_function(builder.module, kind, "llvm.x86.avx512.permvar.sf.512"), [tables[0], places])
    if len(tables) == 4:
        low, high = _look_up(builder, tables[:2], places), _look_up(builder, tables[2:], places)
        return builder.select(builder.icmp_unsigned("<", places, _everywhere(2 * LANES)), low, high)
    kind = ir.FunctionType(_FLOATS, [_FLOATS, _WORDS, _FLOATS])
    function = get_or_insert_function(builder.module, kind, "llvm.x86.avx512.vpermi2var.ps.512")
    return builder.call(function, [tables[0], places, tables[1]])


def _count_at_most(builder, numbers, y, entries):
    """How many of the first entries - 1 ascending numbers are <= y, per lane."""
    count = _everywhere(0)
    if _permutes():
        step = entries // 2
        while step:
            middle = _look_up(builder, numbers, builder.add(count, _everywhere(step - 1)))
            above = builder.fcmp_ordered(">=", y, middle)
            count = builder.select(above, builder.add(count, _everywhere(step)), count)
            step //= 2
        return count
    for k in range(entries - 1):
        place = ir.Constant(_WORDS, [k % LANES] * LANES)
        number = builder.shuffle_vector(numbers[k // LANES], ir.Constant(_FLOATS, ir.Undefined), place)
        count = builder.add(count, builder.zext(builder.fcmp_ordered(">=", y, number), _WORDS))
    return count


def _make(entries):
    @intrinsic
    def pick(typingctx, table, start, codes, index):
        """Lane l: table[start + codes[index + l]], codes being uint8."""

        def generate(context, builder, signature, args):
            place = _pointer(context, builder, signature.args[2], args[2], args[3], _BYTES)
            places = builder.zext(builder.load(place, align=1), _WORDS)
            return _look_up(builder, _registers(context, builder, signature.args[0], args[0], entries, args[1]), places)

        return F32(table, types.intp, codes, types.intp), generate

    @intrinsic
    def quantise(typingctx, y, midpoints, table, codes, index):
        """The table entry nearest to y (float32 lanes), the larger one of two; its number goes to codes[index + l] for lane l.

        midpoints: of the table's entries, ascending, infinity where an entry is not used.
        """

        def generate(context, builder, signature, args):
            _, midpoints, table, codes, _ = signature.args
            numbers = _registers(context, builder, midpoints, args[1], entries)
            places = _count_at_most(builder, numbers, args[0], entries)
            place = _pointer(context, builder, codes, args[3], args[4], _BYTES)
            builder.store(builder.trunc(places, _BYTES), place, align=1)
            return _look_up(builder, _registers(context, builder, table, args[2], entries), places)

        return F32(F32, midpoints, table, codes, types.intp), generate

    return pick, quantise


lookup16, nearest_entry16 = _make(16)
lookup32, nearest_entry32 = _make(32)
lookup64, nearest_entry64 = _make(64)


@intrinsic
def lookup_lanes(typingctx, table, index):
    """Per lane table[index]: table a float32 row of 32 entries or more, index float32 lanes of whole numbers 0 to 31."""
    if not is_row(table, types.float32):
        return None

    def generate(context, builder, sig, args):
        vector, numbers = vector_type(F32), ir.VectorType(ir.IntType(32), LANES)
        where = builder.fptosi(args[1], numbers)
        zero = ir.Constant(context.get_value_type(types.intp), 0)
        if "+avx512f" in context.codegen().magic_tuple()[2]:  # the features that numba compiles for
            low = builder.load(element_pointer(context, builder, sig.args[0], args[0], zero, ir.FloatType()), align=4)
            sixteen = ir.Constant(zero.type, LANES)
            high = builder.load(element_pointer(context, builder, sig.args[0], args[0], sixteen, ir.FloatType()), align=4)
            kind = ir.FunctionType(vector, [vector, numbers, vector])
            permute = get_or_insert_function(builder.module, kind, "llvm.x86.avx512.vpermi2var.ps.512")
            return builder.call(permute, [low, where, high])
        data = context.make_array(sig.args[0])(context, builder, args[0]).data
        value = ir.Constant(vector, ir.Undefined)
        for lane in range(LANES):
            place = ir.Constant(ir.IntType(32), lane)
            entry = builder.load(builder.gep(data, [builder.extract_element(where, place)]))
            value = builder.insert_element(value, entry, place)
        return value

    return F32(table, F32), generate
