"""Keys and values that are cached in blocks as panels of words, for the products of `block_products`.

Panels hold PANEL columns as in `tiles`, but words: int32 with two 16-bit codes, of two numbers of a key, or of two values.
"""

from __future__ import annotations

import numpy as np
from numba import types

from ......formats import TYPES
from ......formats.layouts.tables import IQ4_VALUES
from ......simd.byte_lanes import bytes_from_words, load_bytes, load_u32, load_u64, lookup_bytes, nonzero, store_bytes
from ......simd.compile import intrinsic, kernel
from ......simd.lane_types import F32 as LANES_F32
from ......simd.lane_types import element_pointer
from ......simd.lanes import LANES, load, load_half, mask_from_bits, max_lanes, reduce_max, reduce_sum, select, splat, store
from ......simd.llvm import F32X16, I8, I16, I16X32, I32, I32X16, I64, concat, constant, shuffle, vector
from ......simd.llvm import load as load_at
from ......simd.llvm import store as store_at
from ......simd.memory import fill, view
from ......simd.scalar import ROUNDING_CONSTANT
from .cache_rows import ROW_WORDS, TYPE_IDS, WORDS, ask
from .tiles import PANEL, transpose

BLOCK = 32
_TABLES = np.concatenate([IQ4_VALUES, np.arange(-8, 8)]).astype(np.int8).view(np.uint8)  # of the codes of iq4_nl and q4_0
_Q8_0, _Q6_0, _Q5_0, _Q4_0, _IQ4_NL, _Q8_KV = (TYPE_IDS[name] for name in ("q8_0", "q6_0", "q5_0", "q4_0", "iq4_nl", "q8_KV"))
WORD_BYTES = 4 + 2 * BLOCK  # of a block of WORDS
_WORD_LARGEST = 2047.0
_BLOCK_BYTES = np.array(
    [0 if TYPES[name].is_float else TYPES[name].row_bytes(2 * BLOCK) - TYPES[name].row_bytes(BLOCK) for name in TYPE_IDS]
    + [WORD_BYTES, WORD_BYTES, TYPES["q8_0"].block_bytes]
)
# A query's numbers in the order in which `key_words` has those of keys: 0 and 2, 1 and 3 of four in one word each.
_ORDER = [4 * (i // 4) + (0, 2, 1, 3)[i % 4] for i in range(LANES)]


# --- codes ------------------------------------------------------------------------------------------------------------


@kernel
def _unpack_block(type_id, row, at, out, to):
    """Writes the codes of a block of less than 8 bits as signed bytes."""
    if type_id == _Q6_0:
        low_bits, packed = load_bytes(row, at + 10), load_u64(row, at + 2)
        high_bits = bytes_from_words(packed, packed >> 4)
        low, high = low_bits & 15 | (high_bits & 3) << 4, low_bits >> 4 | (high_bits >> 2 & 3) << 4
        low, high = select(nonzero(low & 32), low & 31, low | 224), select(nonzero(high & 32), high & 31, high | 224)
    elif type_id == _Q5_0:
        codes, packed = load_bytes(row, at + 6), load_u32(row, at + 2)
        low, high = codes & 15, codes >> 4
        low, high = select(mask_from_bits(packed), low, low | 240), select(mask_from_bits(packed >> 16), high, high | 240)
    else:
        codes, table = load_bytes(row, at + 2), load_bytes(_TABLES, 0 if type_id == _IQ4_NL else LANES)
        low, high = lookup_bytes(table, codes & 15), lookup_bytes(table, codes >> 4)
    store_bytes(out, to, low)
    store_bytes(out, to + LANES, high)


@kernel
def _has_words(type_id):
    return type_id in (WORDS, ROW_WORDS)


@kernel
def rows_of_codes(type_id, at, step, rows, width, scratch, ahead):
    """(address, row step, block step) in bytes of the codes, signed bytes or words, of sixteen rows, of which those from `rows`
    on are zeros: as they are in the cache, or unpacked to scratch, of two bytes for each."""
    ask(at + ahead, rows * step if ahead else 0)
    block_bytes = _BLOCK_BYTES[type_id]
    has_words = _has_words(type_id)
    first, size = 8 if type_id == _Q8_KV else 4 if has_words else 2, 2 * BLOCK if has_words else BLOCK
    if rows == LANES and block_bytes >= BLOCK:
        return at + first, step, np.int64(block_bytes)
    row_size = width // BLOCK * size
    out = view(scratch, LANES * row_size, np.uint8)
    fill(out, 0)
    for r in range(rows):
        row = view(at + r * step, step, np.uint8)
        for block in range(width // BLOCK):
            from_, to = block * block_bytes, r * row_size + block * size
            if block_bytes >= BLOCK:
                for i in range(0, size, LANES):
                    store_bytes(out, to + i, load_bytes(row, first + from_ + i))
            else:
                _unpack_block(type_id, row, from_, out, to)
    return scratch, np.int64(row_size), np.int64(size)


@intrinsic
def _copy_half(typingctx, source, to):
    """Copies two bytes from one address to another."""

    def generate(context, builder, signature, args):
        store_at(builder, load_at(builder, args[0], I16), args[1])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@kernel
def read_scales(type_id, at, step, count, width, scales_at, scratch):
    """Writes the scales of `count` rows of `width` numbers, float32 [panels, blocks, PANEL] with 0 behind the last row, to an
    address. Returns 0, or NaN if one of them is. scratch: as for key_words."""
    blocks, panels, block_bytes = width // BLOCK, (count + PANEL - 1) // PANEL, _BLOCK_BYTES[type_id]
    size = panels * blocks * PANEL
    scales, marks = view(scales_at, size, np.float32), splat(0)
    if type_id == _Q8_KV or _has_words(type_id):
        fill(scales, 0)
        block_bytes = 0 if type_id == _Q8_KV else block_bytes  # one scale of a row
        for r in range(count):
            for block in range(blocks):
                d = view(at + r * step + block * block_bytes, 1, np.float32)[0]
                scales[(r // PANEL * blocks + block) * PANEL + r % PANEL] = d
    else:  # all are copied before they are loaded again, which has to wait for what was written just before
        halves = view(scratch, size, np.uint16)
        fill(view(scratch + 2 * (panels - 1) * blocks * PANEL, blocks * PANEL, np.uint16), 0)
        for r in range(count):
            source, to = at + r * step, r // PANEL * blocks * PANEL + r % PANEL
            for block in range(blocks):
                _copy_half(source + block * block_bytes, scratch + 2 * (to + block * PANEL))
        for i in range(0, size, LANES):
            store(scales, i, load_half(halves, i))
    for i in range(0, size, LANES):
        marks = marks + load(scales, i) * 0
    return reduce_sum(marks)


# --- rounding ---------------------------------------------------------------------------------------------------------


def _rounded_words(order):
    """The operation (words, index, value): writes float32 lanes rounded to integers, of less than 16 bits, in this order to a
    uint16 row."""

    @intrinsic
    def store_rounded(typingctx, words, index, value):
        def generate(context, builder, signature, args):
            place = element_pointer(context, builder, signature.args[0], args[0], args[1], I16)
            bits = builder.bitcast(builder.fadd(args[2], constant(F32X16, float(ROUNDING_CONSTANT))), I32X16)
            low = builder.trunc(bits, vector(I16, LANES))
            builder.store(shuffle(builder, low, None, order), place, align=2)
            return context.get_dummy_value()

        return types.void(words, types.intp, LANES_F32), generate

    return store_rounded


store_rounded, store_query = _rounded_words(range(LANES)), _rounded_words(_ORDER)


# --- panels -----------------------------------------------------------------------------------------------------------


def _columns_of_fours(b, codes, row_step):
    """LLVM code that gives a block of sixteen keys as eight <16 x i32>: lane l has four numbers of key l."""
    rows = [load_at(b, codes, vector(I32, 8), b.mul(row_step, I64(row))) for row in range(LANES)]
    columns = [concat(b, [rows[r], rows[r + 8]]) for r in range(8)]
    step = 4
    while step:  # each half is transposed: blocks of step x step beside the diagonal change places
        low = [lane if not lane & step else LANES + lane - step for lane in range(LANES)]
        high = [lane + step if not lane & step else LANES + lane for lane in range(LANES)]
        for r in range(8):
            if not r & step:
                x, y = columns[r], columns[r + step]
                columns[r], columns[r + step] = shuffle(b, x, y, low), shuffle(b, x, y, high)
        step //= 2
    return columns


@intrinsic
def byte_key_columns(typingctx, codes, row_step, to, to_step):
    """Writes a block of sixteen keys as eight vectors of words, `to_step` bytes apart: lane l has four numbers of key l, plus
    128, which makes them unsigned."""

    def generate(context, builder, signature, args):
        b = builder
        codes, row_step, to, to_step = args
        for i, column in enumerate(_columns_of_fours(b, codes, row_step)):
            unsigned = b.xor(column, constant(I32X16, -0x7F7F7F80))  # 0x80 in each byte
            store_at(b, unsigned, to, b.mul(to_step, I64(i)))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic
def _widen_columns(typingctx, codes, row_step, to, to_step):
    """Writes a block of sixteen keys as sixteen vectors of words, `to_step` bytes apart: lane l has two numbers of key l."""

    def generate(context, builder, signature, args):
        b = builder
        codes, row_step, to, to_step = args
        columns = _columns_of_fours(b, codes, row_step)
        eight = constant(I16X32, 8)
        for i, column in enumerate(columns):
            numbers = b.bitcast(column, I16X32)
            for j, words in enumerate((b.ashr(b.shl(numbers, eight), eight), b.ashr(numbers, eight))):
                store_at(b, b.bitcast(words, I32X16), to, b.mul(to_step, I64(2 * i + j)))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


def _pairs(element):
    """The operation (a, b, to): writes sixteen codes of one value, of this type, and as many of the next as sixteen words of
    one of each. Arguments are addresses."""

    @intrinsic
    def pair(typingctx, a, b, to):
        def generate(context, builder, signature, args):
            low, high = (builder.sext(load_at(builder, at, vector(element, LANES)), I32X16) for at in args[:2])
            words = builder.or_(builder.and_(low, constant(I32X16, 0xFFFF)), builder.shl(high, constant(I32X16, 16)))
            store_at(builder, words, args[2])
            return context.get_dummy_value()

        return types.void(*[types.int64] * 3), generate

    return pair


_pair_bytes, _pair_words = _pairs(I8), _pairs(I16)


@kernel
def encode_words(x, run, out):
    """float32 [numbers], of which each `run`, a multiple of 32, get one scale -> blocks of WORDS, uint8 [bytes]. Where there is
    NaN or infinity, the scale is NaN."""
    for first in range(0, x.size, run):
        largest, marks = splat(0), splat(0)
        for i in range(first, first + run, LANES):
            numbers = load(x, i)
            largest, marks = max_lanes(abs(numbers), largest), marks + numbers * 0
        highest = reduce_max(largest)
        inverse = np.float32(_WORD_LARGEST) / highest if highest > np.float32(1e-30) else np.float32(0)
        scale = highest / np.float32(_WORD_LARGEST) + reduce_sum(marks)
        for i in range(first, first + run, BLOCK):
            at = out.ctypes.data + i // BLOCK * WORD_BYTES
            words = view(at, WORD_BYTES // 2, np.uint16)
            view(at, 1, np.float32)[0] = scale
            store_rounded(words, 2, load(x, i) * inverse)
            store_rounded(words, 2 + LANES, load(x, i + LANES) * inverse)


@kernel
def key_words(type_id, at, step, count, width, to, scratch, ahead):
    """Writes the codes of `count` keys of `width` numbers as panels of words [panels, width / 2, PANEL] to an address.

    at: of the first row, the next one `step` bytes on; scratch: address of 2 * LANES * width bytes; ahead: see
    `decode_rows`.
    """
    for first in range(0, count, LANES):
        codes, row_step, block_step = rows_of_codes(
            type_id, at + first * step, step, min(LANES, count - first), width, scratch, ahead
        )
        target = to + 4 * (first // PANEL * (width // 2) * PANEL + first % PANEL)
        for block in range(width // BLOCK):
            source, to_block = codes + block * block_step, target + 4 * block * (BLOCK // 2) * PANEL
            if type_id == WORDS:
                transpose(source, row_step, to_block, 4 * PANEL)
            else:
                _widen_columns(source, row_step, to_block, 4 * PANEL)


@kernel
def value_words(type_id, at, step, count, width, padded, to, scratch, ahead):
    """Writes the codes of `count` values as panels of words [padded / PANEL, (count + 1) // 2, PANEL] to an address: numbers
    beyond `width` are zeros. Other arguments as for key_words."""
    pairs = (count + 1) // 2
    if width < padded:
        panel = width // PANEL * pairs * PANEL
        fill(view(to + 4 * panel, padded * pairs - panel, np.int32), 0)
    for first in range(0, count, LANES):
        rows = min(LANES, count - first)
        codes, row_step, block_step = rows_of_codes(type_id, at + first * step, step, rows, width, scratch, ahead)
        for column in range(0, width, LANES):
            source = codes + column // BLOCK * block_step + column % BLOCK * (2 if _has_words(type_id) else 1)
            target = to + 4 * ((column // PANEL * pairs + first // 2) * PANEL + column % PANEL)
            for pair in range((rows + 1) // 2):
                row = source + 2 * pair * row_step
                if _has_words(type_id):
                    _pair_words(row, row + row_step, target + 4 * PANEL * pair)
                else:
                    _pair_bytes(row, row + row_step, target + 4 * PANEL * pair)
