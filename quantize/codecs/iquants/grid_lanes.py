"""Operations on packed level codes: what the search for grid points does with sixteen candidates or sixteen elements at a time.

The levels of one grid point are packed into 16 bits: eight levels of two bits (iq1, iq2) or four of four bits (iq3), the first
element lowest. A *pick table* is sixteen floats that belong to one nibble of such a code; a look-up is one permutation with
AVX-512, two with AVX2, and goes through memory elsewhere, always with the same results.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core.cgutils import alloca_once, get_or_insert_function

from ....simd.compile import intrinsic
from ....simd.lanes import F32, LANES

_I32, _FLOAT = ir.IntType(32), ir.FloatType()
_WORDS, _FLOATS, _SHORTS = (ir.VectorType(kind, LANES) for kind in (_I32, _FLOAT, ir.IntType(16)))
_HALF = LANES // 2


def _constant(numbers) -> ir.Constant:
    return ir.Constant(ir.VectorType(_I32, len(numbers)), list(numbers))


def _shuffle(builder, a, b, places):
    return builder.shuffle_vector(a, b, _constant(places))


def _undefined(kind) -> ir.Constant:
    return ir.Constant(kind, ir.Undefined)


def _permute(context, builder, table, places):
    """Lane l: table[places[l] & 15], of a vector of sixteen floats."""
    features = context.codegen().magic_tuple()[2]
    if "+avx512f" in features:
        kind = ir.FunctionType(_FLOATS, [_FLOATS, _WORDS])
        return builder.call(get_or_insert_function(builder.module, kind, "llvm.x86.avx512.permvar.sf.512"), [table, places])
    if "+avx2" in features:
        return _permute_halves(builder, table, places)
    places = builder.and_(places, _constant([LANES - 1] * LANES))
    memory = alloca_once(builder, _FLOATS)
    builder.store(table, memory)
    floats = builder.bitcast(memory, _FLOAT.as_pointer())
    out = _undefined(_FLOATS)
    for lane in range(LANES):
        entry = builder.load(builder.gep(floats, [builder.extract_element(places, _I32(lane))]))
        out = builder.insert_element(out, entry, _I32(lane))
    return out


def _permute_halves(builder, table, places):
    half, words = ir.VectorType(_FLOAT, _HALF), ir.VectorType(_I32, _HALF)
    kind = ir.FunctionType(half, [half, words])
    permute = get_or_insert_function(builder.module, kind, "llvm.x86.avx2.permps")
    low, high = (_shuffle(builder, table, table, range(start, start + _HALF)) for start in (0, _HALF))
    parts = []
    for start in (0, _HALF):
        where = _shuffle(builder, places, places, range(start, start + _HALF))
        upper = builder.and_(where, ir.Constant(words, [_HALF] * _HALF))
        is_upper = builder.icmp_unsigned("!=", upper, ir.Constant(words, [0] * _HALF))
        parts.append(builder.select(is_upper, builder.call(permute, [high, where]), builder.call(permute, [low, where])))
    return _shuffle(builder, parts[0], parts[1], range(LANES))


@intrinsic
def pick_sum(typingctx, codes, index, t0, t1, t2, t3):
    """Lane l: t0[nibble 0] + t1[nibble 1] + t2[nibble 2] + t3[nibble 3] of codes[index + l], codes being a row of uint16."""

    def generate(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        place = builder.bitcast(builder.gep(data, [args[1]]), _SHORTS.as_pointer())
        word = builder.zext(builder.load(place, align=2), _WORDS)
        parts = []
        for p, table in enumerate(args[2:]):
            shifted = builder.lshr(word, _constant([4 * p] * LANES)) if p else word
            parts.append(_permute(context, builder, table, shifted))
        return builder.fadd(builder.fadd(parts[0], parts[1]), builder.fadd(parts[2], parts[3]))

    return F32(codes, types.intp, F32, F32, F32, F32), generate


def _unpacker(bits: int):
    """The operation that takes eight levels of `bits` bits from each of two words to sixteen values of a table."""

    @intrinsic
    def values(typingctx, first, second, table):
        """Lane l < 8: table[l-th level of `first`], lane l >= 8: table[(l - 8)-th level of `second`]; levels are looked up by
        their low four bits, so a table of two-bit levels repeats itself four times."""

        def generate(context, builder, signature, args):
            empty = _undefined(_WORDS)
            halves = builder.insert_element(builder.insert_element(empty, args[0], _I32(0)), args[1], _I32(1))
            words = _shuffle(builder, halves, empty, [0] * _HALF + [1] * _HALF)
            shifts = [bits * (lane % _HALF) for lane in range(LANES)]
            return _permute(context, builder, args[2], builder.lshr(words, _constant(shifts)))

        return F32(types.uint32, types.uint32, F32), generate

    return values


values_of_pairs, values_of_nibbles = _unpacker(2), _unpacker(4)
