"""Rows of a key/value cache: writing those of float types, and decoding these to float32 for the products."""

from __future__ import annotations

import numpy as np

from ......simd.compile import kernel
from ......simd.lanes import LANES, load, load_half, splat, store
from ......simd.memory import CACHE_LINE, fill, prefetch_lines, view
from .tiles import PANEL, load_bfloat16, store_bfloat16, store_float16, transpose

# The types that a cache may have, and the numbers that kernels know them by. Those from q8_0 on are products of blocks of 32.
TYPE_IDS = {name: i for i, name in enumerate(("f32", "f16", "bf16", "q8_0", "q6_0", "q5_0", "q4_0", "iq4_nl", "q8_KV"))}
# Rows that are in no cache: blocks of 32 numbers of 12 bits, as 16-bit integers behind their float32 scale.
WORDS = len(TYPE_IDS)
_F32, _F16, _BF16 = (TYPE_IDS[name] for name in ("f32", "f16", "bf16"))
_CHUNKS = PANEL // LANES
_AHEAD = 128  # rows: those of the next block of keys are asked for, which processors do not do in time by themselves


@kernel
def ask_ahead(address, step, rows):
    """Asks for the memory of `rows` rows that are to be read _AHEAD rows later."""
    following = address + _AHEAD * step
    for at in range(following, following + rows * step, CACHE_LINE):
        prefetch_lines(at, CACHE_LINE)


@kernel
def _chunk_offset(chunk, panel_step):
    """Index of the sixteen numbers `chunk` of a row in panels that are panel_step elements apart."""
    return chunk // _CHUNKS * panel_step + chunk % _CHUNKS * LANES


@kernel
def decode_rows(type_id, address, step, count, width, out, start, row_step, panel_step):
    """Decodes `count` rows of `width` numbers to out, a float32 row.

    type_id: of a float type; address: of the first row, the next one `step` bytes on. Row r begins at
    out[start + r * row_step], and each further PANEL numbers panel_step after the ones before. width: a multiple of 16.
    """
    chunks = width // LANES
    if type_id == _F32:
        for r in range(count):
            ask_ahead(address + r * step, step, 1)
            numbers = view(address + r * step, width, np.float32)
            for i in range(chunks):
                store(out, start + r * row_step + _chunk_offset(i, panel_step), load(numbers, i * LANES))
        return
    for r in range(count):
        ask_ahead(address + r * step, step, 1)
        words = view(address + r * step, width, np.uint16)
        for i in range(chunks):
            value = load_half(words, i * LANES) if type_id == _F16 else load_bfloat16(words, i * LANES)
            store(out, start + r * row_step + _chunk_offset(i, panel_step), value)


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
