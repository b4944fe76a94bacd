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
from ......simd.lanes import LANES, load, load_half, mask_from_bits, reduce_sum, select, splat, store
from ......simd.llvm import I8, I16, I16X32, I32, I32X16, I64, concat, constant, shuffle, vector
from ......simd.llvm import load as load_at
from ......simd.llvm import store as store_at
from ......simd.memory import fill, view
from .cache_rows import TYPE_IDS, ask_ahead
from .tiles import PANEL

BLOCK = 32
_TABLES = np.concatenate([IQ4_VALUES, np.arange(-8, 8)]).astype(np.int8).view(np.uint8)  # of the codes of iq4_nl and q4_0
_Q8_0, _Q6_0, _Q5_0, _Q4_0, _IQ4_NL, _Q8_KV = (TYPE_IDS[name] for name in ("q8_0", "q6_0", "q5_0", "q4_0", "iq4_nl", "q8_KV"))
_BLOCK_BYTES = np.array(
    [0 if TYPES[name].is_float else TYPES[name].row_bytes(2 * BLOCK) - TYPES[name].row_bytes(BLOCK) for name in TYPE_IDS]
)


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
def _codes(type_id, at, step, rows, width, scratch):
    """(address, row step, block step) in bytes of the codes, signed bytes, of sixteen rows, of which those from `rows` on are
    zeros: as they are in the cache, or unpacked to scratch, of LANES * width bytes."""
    ask_ahead(at, step, rows)
    block_bytes = _BLOCK_BYTES[type_id]
    first = 8 if type_id == _Q8_KV else 2
    if rows == LANES and block_bytes >= BLOCK:
        return at + first, step, np.int64(block_bytes)
    out = view(scratch, LANES * width, np.uint8)
    fill(out, 0)
    for r in range(rows):
        row = view(at + r * step, step, np.uint8)
        for block in range(width // BLOCK):
            from_, to = block * block_bytes, r * width + block * BLOCK
            if block_bytes >= BLOCK:
                store_bytes(out, to, load_bytes(row, first + from_))
                store_bytes(out, to + LANES, load_bytes(row, first + from_ + LANES))
            else:
                _unpack_block(type_id, row, from_, out, to)
    return scratch, np.int64(width), np.int64(BLOCK)


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
    if type_id == _Q8_KV:
        fill(scales, 0)
        for r in range(count):
            for block in range(blocks):
                scales[(r // PANEL * blocks + block) * PANEL + r % PANEL] = view(at + r * step, 1, np.float32)[0]
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


# --- panels -----------------------------------------------------------------------------------------------------------


@intrinsic
def _widen_columns(typingctx, codes, row_step, to, to_step):
    """Writes a block of sixteen keys as sixteen vectors of words, `to_step` bytes apart: lane l has two numbers of key l."""

    def generate(context, builder, signature, args):
        b = builder
        codes, row_step, to, to_step = args
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
        eight = constant(I16X32, 8)
        for i, column in enumerate(columns):
            numbers = b.bitcast(column, I16X32)
            for j, words in enumerate((b.ashr(b.shl(numbers, eight), eight), b.ashr(numbers, eight))):
                store_at(b, b.bitcast(words, I32X16), to, b.mul(to_step, I64(2 * i + j)))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic
def _pair_codes(typingctx, a, b, to):
    """Writes sixteen codes of one key and as many of the next as sixteen words of one of each."""

    def generate(context, builder, signature, args):
        low, high = (builder.sext(load_at(builder, at, vector(I8, LANES)), I32X16) for at in args[:2])
        words = builder.or_(builder.and_(low, constant(I32X16, 0xFFFF)), builder.shl(high, constant(I32X16, 16)))
        store_at(builder, words, args[2])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


@kernel
def key_words(type_id, at, step, count, width, to, scratch):
    """Writes the codes of `count` keys of `width` numbers as panels of words [panels, width / 2, PANEL] to an address.

    at: of the first row, the next one `step` bytes on; scratch: address of LANES * width bytes.
    """
    for first in range(0, count, LANES):
        codes, row_step, block_step = _codes(type_id, at + first * step, step, min(LANES, count - first), width, scratch)
        target = to + 4 * (first // PANEL * (width // 2) * PANEL + first % PANEL)
        for block in range(width // BLOCK):
            _widen_columns(codes + block * block_step, row_step, target + 4 * block * (BLOCK // 2) * PANEL, 4 * PANEL)


@kernel
def value_words(type_id, at, step, count, width, padded, to, scratch):
    """Writes the codes of `count` values as panels of words [padded / PANEL, (count + 1) // 2, PANEL] to an address: numbers
    beyond `width` are zeros. Other arguments as for key_words."""
    pairs = (count + 1) // 2
    if width < padded:
        panel = width // PANEL * pairs * PANEL
        fill(view(to + 4 * panel, padded * pairs - panel, np.int32), 0)
    for first in range(0, count, LANES):
        rows = min(LANES, count - first)
        codes, row_step, block_step = _codes(type_id, at + first * step, step, rows, width, scratch)
        for column in range(0, width, LANES):
            source = codes + column // BLOCK * block_step + column % BLOCK
            target = to + 4 * ((column // PANEL * pairs + first // 2) * PANEL + column % PANEL)
            for pair in range((rows + 1) // 2):
                row = source + 2 * pair * row_step
                _pair_codes(row, row + row_step, target + 4 * PANEL * pair)
