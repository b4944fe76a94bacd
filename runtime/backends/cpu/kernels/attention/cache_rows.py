"""Rows of a key/value cache: writing them, and reading them, of whatever type, as float32 that the products can take."""

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
from ......simd.lanes import LANES, load, load_half, splat, store
from ......simd.memory import view
from .tiles import PANEL, load_bfloat, store_as_bfloat, store_as_half, transpose

# The types a cache may have, by the numbers that kernels know them by.
KINDS = {name: i for i, name in enumerate(("f32", "f16", "bf16", "q8_0", "q6_0", "q4_0", "iq4_nl", "q8_KV"))}
_F32, _F16, _BF16, _Q8_0, _Q6_0, _Q4_0, _IQ4_NL, _Q8_KV = KINDS.values()
_IQ4 = IQ4_VALUES.astype(np.int8).view(np.uint8)
_CHUNKS = PANEL // LANES


@kernel
def _place(chunk, panel_step):
    """Where the sixteen numbers `chunk` of a row go in panels that are panel_step elements apart."""
    return chunk // _CHUNKS * panel_step + chunk % _CHUNKS * LANES


@kernel
def decode_rows(kind, address, step, count, width, out, to, row_step, panel_step):
    """Writes `count` rows of `width` numbers to out, a float32 row.

    kind: of KINDS; address: of the first row, the next one `step` bytes on. Row r begins at out[to + r * row_step], and each
    further PANEL numbers panel_step after the ones before. width: a multiple of 16, of 32 for types in blocks.
    """
    chunks = width // LANES
    if kind == _F32:
        for r in range(count):
            numbers = view(address + r * step, width, np.float32)
            for i in range(chunks):
                store(out, to + r * row_step + _place(i, panel_step), load(numbers, i * LANES))
        return
    if kind in (_F16, _BF16):
        for r in range(count):
            words = view(address + r * step, width, np.uint16)
            for i in range(chunks):
                value = load_half(words, i * LANES) if kind == _F16 else load_bfloat(words, i * LANES)
                store(out, to + r * row_step + _place(i, panel_step), value)
        return
    if kind == _Q8_KV:
        for r in range(count):
            bytes_ = view(address + r * step, 8 + width, np.uint8)
            d = load_f32(bytes_, 0)
            for i in range(chunks):
                store(out, to + r * row_step + _place(i, panel_step), i8_to_float(load_bytes(bytes_, 8 + i * LANES)) * d)
        return
    size = 34 if kind == _Q8_0 else 26 if kind == _Q6_0 else 18
    for r in range(count):
        bytes_ = view(address + r * step, width // 32 * size, np.uint8)
        for block in range(width // 32):
            at, start = block * size, to + r * row_step
            d = load_f16(bytes_, at)
            if kind == _Q8_0:
                low, high = i8_to_float(load_bytes(bytes_, at + 2)) * d, i8_to_float(load_bytes(bytes_, at + 18)) * d
            elif kind == _Q6_0:
                four, rest = load_bytes(bytes_, at + 10), load_u64(bytes_, at + 2)
                two = bytes_from_words(rest, rest >> 4)
                low = (u8_to_float(four & 15 | (two & 3) << 4) - 32) * d
                high = (u8_to_float(four >> 4 | (two >> 2 & 3) << 4) - 32) * d
            elif kind == _Q4_0:
                four = load_bytes(bytes_, at + 2)
                low, high = (u8_to_float(four & 15) - 8) * d, (u8_to_float(four >> 4) - 8) * d
            else:
                four, table = load_bytes(bytes_, at + 2), load_bytes(_IQ4, 0)
                low, high = i8_to_float(lookup_bytes(table, four & 15)) * d, i8_to_float(lookup_bytes(table, four >> 4)) * d
            store(out, start + _place(2 * block, panel_step), low)
            store(out, start + _place(2 * block + 1, panel_step), high)


@kernel
def decode_columns(kind, address, step, count, width, out, to, scratch):
    """Writes `count` rows of `width` numbers as columns of panels [panels, width, PANEL] from out[to] on.

    The last panel's columns up to a multiple of sixteen become 0; what is beyond stays as it is. scratch: float32, at least
    16 * width elements; other arguments as for decode_rows.
    """
    for first in range(0, count, LANES):
        rows = min(LANES, count - first)
        decode_rows(kind, address + first * step, step, rows, width, scratch, 0, width, PANEL)
        for i in range(rows * width, LANES * width, LANES):
            store(scratch, i, splat(0))
        target = out.ctypes.data + 4 * (to + first // PANEL * width * PANEL + first % PANEL)
        for i in range(0, width, LANES):
            transpose(scratch.ctypes.data + 4 * i, 4 * width, target + 4 * PANEL * i, 4 * PANEL)


@kernel
def store_row(kind, row, to):
    """Writes a row of numbers to an address as f32, f16 or bf16, filled up with zeros to a multiple of sixteen numbers."""
    width = row.size
    whole, end = width // LANES * LANES, np.zeros(LANES, np.float32)
    for j in range(0, width, LANES):
        if j < whole:
            numbers = load(row, j)
        else:
            for e in range(width - whole):
                end[e] = row[j + e]
            numbers = load(end, 0)
        if kind == _F32:
            store(view(to, j + LANES, np.float32), j, numbers)
        elif kind == _F16:
            store_as_half(view(to, j + LANES, np.uint16), j, numbers)
        else:
            store_as_bfloat(view(to, j + LANES, np.uint16), j, numbers)
