"""Rows of a key/value cache: writing those of float types, and decoding those of any type to float32 for the products."""

from __future__ import annotations

import numpy as np

from ......formats.layouts.tables import IQ4_VALUES
from ......simd.byte_lanes import (
    bytes_from_words,
    i8_to_float,
    load_bytes,
    load_f16,
    load_f32,
    load_u64,
    lookup_bytes,
    u8_to_float,
)
from ......simd.compile import kernel
from ......simd.lanes import LANES, load, load_half, mask_from_bits, select, splat, store
from ......simd.memory import fill, view
from .tiles import PANEL, load_bfloat16, store_bfloat16, store_float16, transpose

# The types that a cache may have, and the numbers that kernels know them by. Those from _Q8_0 to _IQ4_NL have blocks of 32.
TYPE_IDS = {name: i for i, name in enumerate(("f32", "f16", "bf16", "q8_0", "q6_0", "q5_0", "q4_0", "iq4_nl", "q8_KV"))}
_F32, _F16, _BF16, _Q8_0, _Q6_0, _Q5_0, _Q4_0, _IQ4_NL, _Q8_KV = TYPE_IDS.values()
_IQ4 = IQ4_VALUES.astype(np.int8).view(np.uint8)
_CHUNKS = PANEL // LANES


@kernel
def _chunk_offset(chunk, panel_step):
    """Index of the sixteen numbers `chunk` of a row in panels that are panel_step elements apart."""
    return chunk // _CHUNKS * panel_step + chunk % _CHUNKS * LANES


@kernel
def decode_rows(type_id, address, step, count, width, out, start, row_step, panel_step):
    """Decodes `count` rows of `width` numbers to out, a float32 row.

    type_id: of TYPE_IDS; address: of the first row, the next one `step` bytes on. Row r begins at out[start + r * row_step],
    and each further PANEL numbers panel_step after the ones before. width: a multiple of 16, of 32 for types in blocks.
    """
    chunks = width // LANES
    if type_id == _F32:
        for r in range(count):
            numbers = view(address + r * step, width, np.float32)
            for i in range(chunks):
                store(out, start + r * row_step + _chunk_offset(i, panel_step), load(numbers, i * LANES))
        return
    if type_id in (_F16, _BF16):
        for r in range(count):
            words = view(address + r * step, width, np.uint16)
            for i in range(chunks):
                value = load_half(words, i * LANES) if type_id == _F16 else load_bfloat16(words, i * LANES)
                store(out, start + r * row_step + _chunk_offset(i, panel_step), value)
        return
    if type_id == _Q8_KV:
        for r in range(count):
            row = view(address + r * step, 8 + width, np.uint8)
            d = load_f32(row, 0)
            for i in range(chunks):
                value = i8_to_float(load_bytes(row, 8 + i * LANES)) * d
                store(out, start + r * row_step + _chunk_offset(i, panel_step), value)
        return
    block_bytes = 34 if type_id == _Q8_0 else 26 if type_id == _Q6_0 else 22 if type_id == _Q5_0 else 18
    for r in range(count):
        row = view(address + r * step, width // 32 * block_bytes, np.uint8)
        row_start = start + r * row_step
        for block in range(width // 32):
            at = block * block_bytes
            d = load_f16(row, at)
            if type_id == _Q8_0:
                low, high = i8_to_float(load_bytes(row, at + 2)) * d, i8_to_float(load_bytes(row, at + 18)) * d
            elif type_id == _Q6_0:
                low_bits, packed = load_bytes(row, at + 10), load_u64(row, at + 2)
                high_bits = bytes_from_words(packed, packed >> 4)
                low = (u8_to_float(low_bits & 15 | (high_bits & 3) << 4) - 32) * d
                high = (u8_to_float(low_bits >> 4 | (high_bits >> 2 & 3) << 4) - 32) * d
            elif type_id == _Q5_0:
                codes, packed = load_bytes(row, at + 6), view(address + r * step + at + 2, 1, np.uint32)[0]
                low = u8_to_float(codes & 15) + select(mask_from_bits(np.int64(packed)), splat(0), splat(-16))
                high = u8_to_float(codes >> 4) + select(mask_from_bits(np.int64(packed >> 16)), splat(0), splat(-16))
                low, high = low * d, high * d
            elif type_id == _Q4_0:
                codes = load_bytes(row, at + 2)
                low, high = (u8_to_float(codes & 15) - 8) * d, (u8_to_float(codes >> 4) - 8) * d
            else:
                codes, table = load_bytes(row, at + 2), load_bytes(_IQ4, 0)
                low, high = i8_to_float(lookup_bytes(table, codes & 15)) * d, i8_to_float(lookup_bytes(table, codes >> 4)) * d
            store(out, row_start + _chunk_offset(2 * block, panel_step), low)
            store(out, row_start + _chunk_offset(2 * block + 1, panel_step), high)


@kernel
def decode_columns(type_id, address, step, count, width, out, start, scratch):
    """Decodes `count` rows of `width` numbers to the columns of panels [panels, width, PANEL] from out[start] on.

    The last panel's columns up to a multiple of sixteen become 0; those beyond stay as they are. scratch: float32, at least
    16 * width elements; other arguments as for decode_rows.
    """
    for first in range(0, count, LANES):
        rows = min(LANES, count - first)
        decode_rows(type_id, address + first * step, step, rows, width, scratch, 0, width, np.int64(PANEL))
        for i in range(rows * width, LANES * width, LANES):
            store(scratch, i, splat(0))
        target = out.ctypes.data + 4 * (start + first // PANEL * width * PANEL + first % PANEL)
        for i in range(0, width, LANES):
            transpose(scratch.ctypes.data + 4 * i, 4 * width, target + 4 * PANEL * i, 4 * PANEL)


@kernel
def store_row(type_id, row, address):
    """Writes a float32 row to an address as f32, f16 or bf16, followed by zeros up to a multiple of sixteen numbers."""
    width = row.size
    full, last = width // LANES * LANES, np.empty(LANES, np.float32)
    fill(last, 0)
    for j in range(0, width, LANES):
        if j < full:
            numbers = load(row, j)
        else:
            for e in range(width - full):
                last[e] = row[j + e]
            numbers = load(last, 0)
        if type_id == _F32:
            store(view(address, j + LANES, np.float32), j, numbers)
        elif type_id == _F16:
            store_float16(view(address, j + LANES, np.uint16), j, numbers)
        else:
            store_bfloat16(view(address, j + LANES, np.uint16), j, numbers)
