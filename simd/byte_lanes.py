"""Sixteen bytes side by side, and numbers at any byte address, for use inside kernels: how decoders unpack rows of codes.

Positions are indices into a uint8 row and are not checked: a load of sixteen bytes or of a word reads all of them, needed or
not. Operators on bytes are defined in lane_types.py.
"""

from __future__ import annotations

from numba import types

from .compile import intrinsic
from .instructions.dot_products import add_byte_dots
from .instructions.integers import bytes_and_sums, bytes_of_rows, bytes_of_words, rounded, truncated_bytes
from .instructions.permute import permute_bytes
from .lane_types import BYTES, F32, LANES, MASK, element_pointer, is_row
from .llvm import F32X16, I8, I8X64, I16, I32, I32X16, I64, constant, shuffle, split_vector, undefined, vector

# --- memory ---------------------------------------------------------------------------------------------------------


@intrinsic
def load_bytes(typingctx, row, index):
    """Sixteen consecutive bytes of a uint8 or int8 row."""
    if not is_row(row, types.uint8, types.int8):
        return None

    def generate(context, builder, signature, args):
        return builder.load(element_pointer(context, builder, signature.args[0], args[0], args[1], I8), align=1)

    return BYTES(row, types.intp), generate


@intrinsic
def store_bytes(typingctx, row, index, value):
    """Writes sixteen bytes to a uint8 row."""
    if not is_row(row, types.uint8):
        return None

    def generate(context, builder, signature, args):
        builder.store(args[2], element_pointer(context, builder, signature.args[0], args[0], args[1], I8), align=1)
        return context.get_dummy_value()

    return types.void(row, types.intp, BYTES), generate


@intrinsic
def transpose_bytes(typingctx, source, index, target, start, step):
    """Sixteen times sixteen lanes of bytes, source[index ... index + 255] of a uint8 row, as runs of another: lane l of them,
    in order, to the sixteen bytes from target[start + l * step] on."""
    if not (is_row(source, types.uint8) and is_row(target, types.uint8)):
        return None

    def generate(context, builder, signature, args):
        types_of, (source, index, target, start, step) = signature.args, args
        at = [
            element_pointer(context, builder, types_of[0], source, builder.add(index, I64(LANES * i)), I8) for i in range(LANES)
        ]
        rows = [builder.load(pointer, align=1) for pointer in at]
        half, size = LANES // 2, 1
        while size < LANES:  # each time a row's number loses its highest bit to the number of its bytes
            pairs = [(rows[i], rows[i + half]) for i in range(half)]
            woven = [[LANES * k + first + i for i in range(half) for k in (0, 1)] for first in (0, half)]
            rows = [shuffle(builder, a, b, order) for a, b in pairs for order in woven]
            size *= 2
        for i, row in enumerate(rows):
            place = builder.add(start, builder.mul(step, I64(i)))
            builder.store(row, element_pointer(context, builder, types_of[2], target, place, I8), align=1)
        return context.get_dummy_value()

    return types.void(source, types.intp, target, types.intp, types.intp), generate


@intrinsic
def store_run_sums(typingctx, row, index, sums, start):
    """Sixteen sums of sixteen signed bytes each, -127 to 127, row[index ... index + 255] of a uint8 row, to sums[start ...
    start + 15] of an int16 row."""
    if not (is_row(row, types.uint8) and is_row(sums, types.int16)):
        return None

    def generate(context, builder, signature, args):
        (row_type, _, sums_type, _), (row, index, sums, start) = signature.args, args
        vectors = []
        for i in range(0, LANES * LANES, 4 * LANES):
            at = element_pointer(context, builder, row_type, row, builder.add(index, I64(i)), I8, 4 * LANES)
            codes = builder.load(at, align=1)
            vectors.append(add_byte_dots(builder, constant(I32X16, 0), constant(I8X64, 1), codes, 1))
        while len(vectors) > 1:  # sums of neighbours, in their order
            sides = [range(first, 2 * LANES, 2) for first in range(2)]
            vectors = [
                builder.add(*(shuffle(builder, a, b, side) for side in sides))
                for a, b in zip(vectors[::2], vectors[1::2], strict=True)
            ]
        to = element_pointer(context, builder, sums_type, sums, start, I16)
        builder.store(builder.trunc(vectors[0], vector(I16, LANES)), to, align=2)
        return context.get_dummy_value()

    return types.void(row, types.intp, sums, types.intp), generate


# --- numbers --------------------------------------------------------------------------------------------------------


def _load_integer(stored):
    """An intrinsic (row, index) that loads an unsigned little-endian integer of the IR type `stored` from any byte of a uint8
    row, as int64 (of 64 bits: the same bits)."""

    @intrinsic
    def load(typingctx, row, index):
        if not is_row(row, types.uint8):
            return None

        def generate(context, builder, signature, args):
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            number = builder.load(builder.bitcast(builder.gep(data, [args[1]]), stored.as_pointer()), align=1)
            return builder.zext(number, I64) if stored is I32 else number

        return types.int64(row, types.intp), generate

    return load


load_u32, load_u64 = _load_integer(I32), _load_integer(I64)


# --- unpacking and conversion ---------------------------------------------------------------------------------------


@intrinsic
def bytes_from_words(typingctx, low, high):
    """The bytes of two 64-bit integers."""

    def generate(context, builder, signature, args):
        words = undefined(vector(I64, 2))
        for i in range(2):
            words = builder.insert_element(words, args[i], I32(i))
        return builder.bitcast(words, BYTES.vector)

    return BYTES(types.int64, types.int64), generate


@intrinsic
def i8_to_float(typingctx, value):
    """Bytes as float32 lanes -128 to 127."""
    if value != BYTES:
        return None

    def generate(context, builder, signature, args):
        return builder.sitofp(builder.sext(args[0], I32X16), F32X16)

    return F32(BYTES), generate


@intrinsic
def low_bytes(typingctx, value):
    """The low byte of each float32's bits: of y + ROUNDING_CONSTANT, y rounded to an integer."""
    if value != F32:
        return None

    def generate(context, builder, signature, args):
        return builder.trunc(builder.bitcast(args[0], I32X16), BYTES.vector)

    return BYTES(F32), generate


@intrinsic
def truncated_nibbles(typingctx, low, high):
    """Bytes of two float32 lanes from 0 to below 32, truncated to integers: the low four bits of each."""
    if low != F32 or high != F32:
        return None

    def generate(context, builder, signature, args):
        low, high = (builder.fptosi(arg, I32X16) for arg in args)
        both = builder.or_(builder.and_(low, constant(I32X16, 15)), builder.shl(high, constant(I32X16, 4)))
        return builder.trunc(both, BYTES.vector)

    return BYTES(F32, F32), generate


def _stored_nibbles(bits):
    """An intrinsic (row, index, step, eight lanes): four pairs of float32 lanes from 0 to below 128, truncated to
    integers and limited to 2^bits - 1. Writes the low four bits of pair k, those of its second lanes above, to sixteen bytes
    from row[index + k * step] on. Returns lanes with marks where there is NaN (`block_reductions.has_nan`); with five bits a
    tuple, first the fifth ones: bit 16 k + l of two integers, for first and second lanes."""

    @intrinsic
    def store(typingctx, row, index, step, a0, b0, a1, b1, a2, b2, a3, b3):
        if not is_row(row, types.uint8):
            return None

        result = types.Tuple((types.int64, types.int64, F32)) if bits > 4 else F32

        def generate(context, builder, signature, args):
            codes, marks, high_bits, wide = [], [], [], vector(I8, 4 * LANES)
            for half in range(2):
                code, marked = truncated_bytes(builder, args[3 + half :: 2])
                marks.append(marked)
                highest = constant(wide, (1 << bits) - 1)
                code = builder.select(builder.icmp_unsigned("<", code, highest), code, highest)
                fifth = builder.icmp_unsigned(">", code, constant(wide, 15))
                high_bits.append(builder.bitcast(fifth, I64) if bits > 4 else I64(0))
                codes.append(builder.and_(code, constant(wide, 15)) if bits > 4 else code)
            both = builder.or_(codes[0], builder.shl(codes[1], constant(wide, 4)))
            for k, nibbles in enumerate(split_vector(builder, both, 4)):
                place = builder.add(args[1], builder.mul(args[2], I64(k)))
                builder.store(nibbles, element_pointer(context, builder, row, args[0], place, I8), align=1)
            marked = builder.bitcast(builder.or_(*marks), F32X16)
            return context.make_tuple(builder, result, [*high_bits, marked]) if bits > 4 else marked

        return result(row, types.intp, types.intp, *[F32] * 8), generate

    return store


store_nibbles, store_five_bits = _stored_nibbles(4), _stored_nibbles(5)


@intrinsic
def store_rounded(typingctx, row, index, a, b, c, d):
    """Writes four values of lanes, from -127 to 127, rounded with ties to even, to 64 consecutive bytes of a uint8 row. Returns
    lanes whose bits, as integers, have the sum of all of them."""
    if not is_row(row, types.uint8):
        return None

    def generate(context, builder, signature, args):
        pointer = element_pointer(context, builder, signature.args[0], args[0], args[1], I8, 4 * LANES)
        codes, sums = bytes_and_sums(builder, [rounded(builder, value) for value in args[2:]])
        builder.store(codes, pointer, align=1)
        return builder.bitcast(sums, F32X16)

    return F32(row, types.intp, F32, F32, F32, F32), generate


@intrinsic
def store_truncated(typingctx, row, first, second, a, b, c, d):
    """Writes four values of lanes, from above -129 to below 128, truncated to integers, to a uint8 row: two from row[first] on
    and two from row[second] on."""
    if not is_row(row, types.uint8):
        return None

    def generate(context, builder, signature, args):
        codes = bytes_of_words(builder, [builder.fptosi(value, I32X16) for value in args[3:]])
        for half, index in zip(split_vector(builder, codes, 2), args[1:3], strict=True):
            pointer = element_pointer(context, builder, signature.args[0], args[0], index, I8, 2 * LANES)
            builder.store(half, pointer, align=1)
        return context.get_dummy_value()

    return types.void(row, types.intp, types.intp, F32, F32, F32, F32), generate


@intrinsic
def store_rounded_rows(typingctx, row, index, a, b, c, d, e, f, g, h):
    """Writes lanes of each of eight rows, from -127 to 127, rounded with ties to even, to 128 consecutive bytes of a uint8 row:
    four bytes of each row in turn."""
    if not is_row(row, types.uint8):
        return None

    def generate(context, builder, signature, args):
        pointer = element_pointer(context, builder, signature.args[0], args[0], args[1], I8, 8 * LANES)
        builder.store(bytes_of_rows(builder, [rounded(builder, value) for value in args[2:]]), pointer, align=1)
        return context.get_dummy_value()

    return types.void(row, types.intp, *[F32] * 8), generate


@intrinsic
def nonzero(typingctx, value):
    """The mask of bytes that are not 0."""
    if value != BYTES:
        return None

    def generate(context, builder, signature, args):
        return builder.icmp_unsigned("!=", args[0], constant(BYTES.vector, 0))

    return MASK(BYTES), generate


@intrinsic
def lookup_bytes(typingctx, table, codes):
    """Lane l: lane codes[l] of `table`; codes below 16."""
    if table != BYTES or codes != BYTES:
        return None

    def generate(context, builder, signature, args):
        return permute_bytes(builder, *args)

    return BYTES(BYTES, BYTES), generate
