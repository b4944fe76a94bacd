"""Sixteen bytes side by side, and numbers at any byte address, for use inside kernels: how decoders unpack rows of codes.

Positions are indices into a uint8 row and are not checked: a load of sixteen bytes or of a word reads all of them, needed or
not. Operators on bytes are defined in lane_types.py.
"""

from __future__ import annotations

from numba import types

from .compile import intrinsic
from .instructions.permute import permute_bytes
from .lane_types import BYTES, F32, MASK, element_pointer, is_row
from .llvm import F32X16, I8, I32, I32X16, I64, constant, undefined, vector

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


def _strided_words(context, builder, signature, args):
    """Pointers to four 32-bit words of a row, from args[1] on, args[2] bytes from one to the next."""
    data, index = context.make_array(signature.args[0])(context, builder, args[0]).data, args[1]
    for _ in range(4):
        yield builder.bitcast(builder.gep(data, [index]), I32.as_pointer())
        index = builder.add(index, args[2])


@intrinsic
def store_strided_words(typingctx, row, index, stride, value):
    """Writes sixteen bytes of a uint8 row as four words of four bytes, `stride` bytes from one to the next."""
    if not is_row(row, types.uint8) or value != BYTES:
        return None

    def generate(context, builder, signature, args):
        words = builder.bitcast(args[3], vector(I32, 4))
        for i, pointer in enumerate(_strided_words(context, builder, signature, args)):
            builder.store(builder.extract_element(words, I32(i)), pointer, align=1)
        return context.get_dummy_value()

    return types.void(row, types.intp, types.intp, BYTES), generate


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
