"""Sixteen bytes as one value inside kernels, and numbers at any byte address: what decoders take rows of codes apart with.

Operators & | ^ << >> work lane by lane, with lanes or numbers on either side. Addresses are indices into a uint8 row and are
not checked: a load of sixteen bytes or of a word reads all of them, wanted or not.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types

from .compile import intrinsic
from .half_precision import half_to_float
from .lane_types import BYTES, F32, LANES, MASK, define_operator, element_pointer, instruction, is_row, vector_type
from .permute import permute_bytes

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_ROWS = (types.uint8, types.int8)

for _name, _generate in (("and_", "and_"), ("or_", "or_"), ("xor", "xor"), ("lshift", "shl"), ("rshift", "lshr")):
    define_operator(_name, instruction(_generate), kinds={BYTES: types.uint8})
    define_operator("i" + _name.rstrip("_"), instruction(_generate), kinds={BYTES: types.uint8})


@intrinsic
def load_bytes(typingctx, row, at):
    """Sixteen consecutive bytes of a uint8 or int8 row."""
    if not is_row(row, *_ROWS):
        return None

    def generate(context, builder, signature, args):
        return builder.load(element_pointer(context, builder, signature.args[0], args[0], args[1], _I8), align=1)

    return BYTES(row, types.intp), generate


@intrinsic
def store_bytes(typingctx, row, at, value):
    """Writes sixteen bytes to a uint8 row."""
    if not is_row(row, types.uint8):
        return None

    def generate(context, builder, signature, args):
        builder.store(args[2], element_pointer(context, builder, signature.args[0], args[0], args[1], _I8), align=1)
        return context.get_dummy_value()

    return types.void(row, types.intp, BYTES), generate


def _places_apart(context, builder, signature, args):
    """Pointers to four 32-bit words, `step` bytes apart."""
    data, at = context.make_array(signature.args[0])(context, builder, args[0]).data, args[1]
    for _ in range(4):
        yield builder.bitcast(builder.gep(data, [at]), _I32.as_pointer())
        at = builder.add(at, args[2])


@intrinsic
def load_strided_words(typingctx, row, at, step):
    """Sixteen bytes of a uint8 row: four times four, `step` bytes from one four to the next."""
    if not is_row(row, types.uint8):
        return None

    def generate(context, builder, signature, args):
        words = ir.Constant(ir.VectorType(_I32, 4), ir.Undefined)
        for i, place in enumerate(_places_apart(context, builder, signature, args)):
            words = builder.insert_element(words, builder.load(place, align=1), _I32(i))
        return builder.bitcast(words, vector_type(BYTES))

    return BYTES(row, types.intp, types.intp), generate


@intrinsic
def store_strided_words(typingctx, row, at, step, value):
    """Writes sixteen bytes where load_apart reads them."""
    if not is_row(row, types.uint8) or value != BYTES:
        return None

    def generate(context, builder, signature, args):
        words = builder.bitcast(args[3], ir.VectorType(_I32, 4))
        for i, place in enumerate(_places_apart(context, builder, signature, args)):
            builder.store(builder.extract_element(words, _I32(i)), place, align=1)
        return context.get_dummy_value()

    return types.void(row, types.intp, types.intp, BYTES), generate


def _reader(kind, stored, convert):
    """The operation that reads a little-endian number of the IR type `stored` at any byte address."""

    @intrinsic
    def read(typingctx, row, at):
        if not is_row(row, types.uint8):
            return None

        def generate(context, builder, signature, args):
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            place = builder.bitcast(builder.gep(data, [args[1]]), stored.as_pointer())
            return convert(builder, builder.load(place, align=1))

        return kind(row, types.intp), generate

    return read


# (row, byte address) -> unsigned numbers as int64 (eight bytes: the same bits), float16 and float32 as float32.
load_u16 = _reader(types.int64, ir.IntType(16), lambda builder, word: builder.zext(word, _I64))
load_u32 = _reader(types.int64, _I32, lambda builder, word: builder.zext(word, _I64))
load_u64 = _reader(types.int64, _I64, lambda builder, word: word)
load_f16 = _reader(types.float32, ir.IntType(16), half_to_float)
load_f32 = _reader(types.float32, ir.FloatType(), lambda builder, number: number)


@intrinsic
def f16_to_f32(typingctx, bits):
    """The float16 of the low 16 bits of an integer, as float32."""

    def generate(context, builder, signature, args):
        return half_to_float(builder, builder.trunc(args[0], ir.IntType(16)))

    return types.float32(types.int64), generate


def _splitter(width: int):
    @intrinsic
    def fields(typingctx, word):
        """Lane l: the number of `width` bits that begins at bit l * width of an integer."""

        def generate(context, builder, signature, args):
            wide = ir.VectorType(_I64 if width == 4 else _I32, LANES)
            word = args[0] if width == 4 else builder.trunc(args[0], _I32)
            undefined = ir.Constant(wide, ir.Undefined)
            zeros = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
            spread = builder.shuffle_vector(builder.insert_element(undefined, word, _I32(0)), undefined, zeros)
            shifted = builder.lshr(spread, ir.Constant(wide, [width * lane for lane in range(LANES)]))
            return builder.trunc(builder.and_(shifted, ir.Constant(wide, [(1 << width) - 1] * LANES)), vector_type(BYTES))

        return BYTES(types.int64), generate

    return fields


# Sixteen nibbles of 64 bits, pairs of 32 bits, single bits of 16, the lowest first.
unpack_4bit, unpack_2bit, unpack_1bit = _splitter(4), _splitter(2), _splitter(1)


@intrinsic
def bytes_from_words(typingctx, low, high):
    """The bytes of two 64-bit integers."""

    def generate(context, builder, signature, args):
        words = ir.Constant(ir.VectorType(_I64, 2), ir.Undefined)
        for i in range(2):
            words = builder.insert_element(words, args[i], _I32(i))
        return builder.bitcast(words, vector_type(BYTES))

    return BYTES(types.int64, types.int64), generate


@intrinsic
def u8_to_float(typingctx, value):
    """Bytes as float32 lanes 0 to 255."""
    if value != BYTES:
        return None

    def generate(context, builder, signature, args):
        # By way of signed integers, which machines convert faster.
        return builder.sitofp(builder.zext(args[0], ir.VectorType(_I32, LANES)), vector_type(F32))

    return F32(BYTES), generate


@intrinsic
def i8_to_float(typingctx, value):
    """Bytes as float32 lanes -128 to 127."""
    if value != BYTES:
        return None

    def generate(context, builder, signature, args):
        return builder.sitofp(builder.sext(args[0], ir.VectorType(_I32, LANES)), vector_type(F32))

    return F32(BYTES), generate


@intrinsic
def low_bytes(typingctx, value):
    """The low byte of each float32 as it is stored: of y + ROUNDER, that is y rounded to a whole number."""
    if value != F32:
        return None

    def generate(context, builder, signature, args):
        return builder.trunc(builder.bitcast(args[0], ir.VectorType(_I32, LANES)), vector_type(BYTES))

    return BYTES(F32), generate


@intrinsic
def nonzero(typingctx, value):
    """The mask of bytes that are not 0."""
    if value != BYTES:
        return None

    def generate(context, builder, signature, args):
        return builder.icmp_unsigned("!=", args[0], ir.Constant(args[0].type, [0] * LANES))

    return MASK(BYTES), generate


@intrinsic
def lookup_bytes(typingctx, table, codes):
    """Lane l: lane codes[l] of `table`; codes below 16."""
    if table != BYTES or codes != BYTES:
        return None

    def generate(context, builder, signature, args):
        return permute_bytes(builder, *args)

    return BYTES(BYTES, BYTES), generate
