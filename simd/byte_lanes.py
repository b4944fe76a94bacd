"""Sixteen bytes side by side, and numbers at any byte address, for use inside kernels: how decoders unpack rows of codes.

Positions are indices into a uint8 row and are not checked: a load of sixteen bytes or of a word reads all of them, needed or
not. Operators on bytes are defined in lane_types.py.
"""

from __future__ import annotations

from numba import types

from .compile import intrinsic
from .instructions.half_precision import half_to_float
from .instructions.permute import permute_bytes
from .lane_types import BYTES, F32, LANES, MASK, element_pointer, is_row
from .llvm import F32 as FLOAT
from .llvm import F32X16, I8, I16, I32, I32X16, I64, constant, splat, undefined, vector

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


def _scalar_load(result, stored, convert):
    """An intrinsic (row, index) that loads a little-endian number of the IR type `stored` from any byte of a uint8 row."""

    @intrinsic
    def load(typingctx, row, index):
        if not is_row(row, types.uint8):
            return None

        def generate(context, builder, signature, args):
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            pointer = builder.bitcast(builder.gep(data, [args[1]]), stored.as_pointer())
            return convert(builder, builder.load(pointer, align=1))

        return result(row, types.intp), generate

    return load


# Unsigned integers become int64 (of 64 bits: the same bits), float16 and float32 become float32.
load_u16 = _scalar_load(types.int64, I16, lambda builder, number: builder.zext(number, I64))
load_u32 = _scalar_load(types.int64, I32, lambda builder, number: builder.zext(number, I64))
load_u64 = _scalar_load(types.int64, I64, lambda builder, number: number)
load_f16 = _scalar_load(types.float32, I16, half_to_float)
load_f32 = _scalar_load(types.float32, FLOAT, lambda builder, number: number)


# --- unpacking and conversion ---------------------------------------------------------------------------------------


def _unpack(bits: int):
    @intrinsic
    def unpack(typingctx, word):
        """Lane l: the number of `bits` bits that begins at bit l * bits of an integer."""

        def generate(context, builder, signature, args):
            element = I64 if bits == 4 else I32
            wide = vector(element, LANES)
            lanes = splat(builder, args[0] if bits == 4 else builder.trunc(args[0], I32))
            shifted = builder.lshr(lanes, constant(wide, [bits * lane for lane in range(LANES)]))
            return builder.trunc(builder.and_(shifted, constant(wide, (1 << bits) - 1)), BYTES.vector)

        return BYTES(types.int64), generate

    return unpack


# Sixteen numbers of 4 bits out of 64, of 2 bits out of 32, of 1 bit out of 16; the lowest bits come first.
unpack_4bit, unpack_2bit, unpack_1bit = _unpack(4), _unpack(2), _unpack(1)


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
def u8_to_float(typingctx, value):
    """Bytes as float32 lanes 0 to 255."""
    if value != BYTES:
        return None

    def generate(context, builder, signature, args):
        return builder.sitofp(builder.zext(args[0], I32X16), F32X16)  # signed integers are converted faster

    return F32(BYTES), generate


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
