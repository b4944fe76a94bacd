"""Rows of a key/value cache: writing those of float types, and decoding these to float32 for the products."""

from __future__ import annotations

import numpy as np
from numba import types

from ......simd.compile import intrinsic, kernel
from ......simd.lanes import LANES, load, load_half, store
from ......simd.llvm import I32X16, I64
from ......simd.llvm import store as store_at
from ......simd.memory import CACHE_LINE, fill, prefetch_lines, view
from ......simd.target import target
from ..gemm.float_panels import load_floats, transposed
from .tiles import PANEL, load_bfloat16, store_bfloat16, store_float16

# The types that a cache may have, and the numbers that kernels know them by. Those from q8_0 on are products of blocks of 32.
TYPE_IDS = {name: i for i, name in enumerate(("f32", "f16", "bf16", "q8_0", "q6_0", "q5_0", "q4_0", "iq4_nl", "q8_KV"))}
# Types that no cache is of. Blocks of 32 numbers of 12 bits, as 16-bit integers behind their float32 scale:
WORDS = len(TYPE_IDS)
ROW_WORDS = WORDS + 1  # values: as WORDS, of which all blocks of a row have the same scale
BYTES = WORDS + 2  # keys: blocks of q8_0, cached or not, for queries that are rounded to bytes (see byte_keys)
_F32, _F16, _BF16 = (TYPE_IDS[name] for name in ("f32", "f16", "bf16"))
_CHUNKS = PANEL // LANES


@kernel
def ask(address, nbytes):
    """Asks for the cache lines of memory that is read soon."""
    for at in range(address, address + nbytes, CACHE_LINE):
        prefetch_lines(at, CACHE_LINE)


@kernel
def _chunk_offset(chunk, panel_step):
    """Index of the sixteen numbers `chunk` of a row in panels that are panel_step elements apart."""
    return chunk // _CHUNKS * panel_step + chunk % _CHUNKS * LANES


@kernel
def decode_rows(type_id, address, step, count, width, out, start, row_step, panel_step, ahead):
    """Decodes `count` rows of `width` numbers to out, a float32 row.

    type_id: of a float type; address: of the first row, the next one `step` bytes on. Row r begins at
    out[start + r * row_step], and each further PANEL numbers panel_step after the ones before. width: a multiple of 16. ahead:
    memory so many bytes on is asked for; 0: none.
    """
    chunks = width // LANES
    if type_id == _F32:
        for r in range(count):
            ask(address + r * step + ahead, step if ahead else 0)
            numbers = view(address + r * step, width, np.float32)
            for i in range(chunks):
                store(out, start + r * row_step + _chunk_offset(i, panel_step), load(numbers, i * LANES))
        return
    for r in range(count):
        ask(address + r * step + ahead, step if ahead else 0)
        words = view(address + r * step, width, np.uint16)
        for i in range(chunks):
            value = load_half(words, i * LANES) if type_id == _F16 else load_bfloat16(words, i * LANES)
            store(out, start + r * row_step + _chunk_offset(i, panel_step), value)


def _columns(type_name):
    """The operation (source, row_bytes, rows, out, out_step): writes sixteen numbers of up to sixteen rows of a float type as
    columns of float32. Addresses, and bytes from one to the next; the last row stands in for missing ones."""

    @intrinsic
    def write(typingctx, source, row_bytes, rows, out, out_step):
        def generate(context, builder, signature, args):
            b = builder
            source, row_bytes, rows, out, out_step = args
            last, lines = b.sub(rows, I64(1)), []
            for r in range(LANES):
                row = b.select(b.icmp_signed("<", I64(r), last), I64(r), last)
                numbers = load_floats(b, target(), type_name, b.add(source, b.mul(row, row_bytes)))
                lines.append(b.bitcast(numbers, I32X16))
            for i, line in enumerate(transposed(b, lines)):
                store_at(b, line, out, b.mul(out_step, I64(i)))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), generate

    return write


_f32_columns, _f16_columns, _bf16_columns = (_columns(name) for name in ("f32", "f16", "bf16"))


@kernel
def decode_columns(type_id, address, step, count, width, out, ahead):
    """Decodes `count` rows of `width` numbers to the columns of panels [panels, width, PANEL] at an address. Columns behind
    the last one, up to a multiple of sixteen, are as that one; those beyond stay as they are. Other arguments as for
    decode_rows."""
    for first in range(0, count, LANES):
        rows, source = min(LANES, count - first), address + first * step
        ask(source + ahead, rows * step if ahead else 0)
        to = out + 4 * (first // PANEL * width * PANEL + first % PANEL)
        for i in range(0, width, LANES):
            if type_id == _F32:
                _f32_columns(source + 4 * i, step, rows, to + 4 * PANEL * i, 4 * PANEL)
            elif type_id == _F16:
                _f16_columns(source + 2 * i, step, rows, to + 4 * PANEL * i, 4 * PANEL)
            else:
                _bf16_columns(source + 2 * i, step, rows, to + 4 * PANEL * i, 4 * PANEL)


@kernel
def _store_numbers(type_id, address, j, numbers):
    """Writes sixteen numbers of a row, from number j on."""
    if type_id == _F32:
        store(view(address, j + LANES, np.float32), j, numbers)
    elif type_id == _F16:
        store_float16(view(address, j + LANES, np.uint16), j, numbers)
    else:
        store_bfloat16(view(address, j + LANES, np.uint16), j, numbers)


@kernel
def store_row(type_id, row, address):
    """Writes a float32 row to an address as f32, f16 or bf16, followed by zeros up to a multiple of sixteen numbers."""
    width = row.size
    full = width // LANES * LANES
    for j in range(0, full, LANES):
        _store_numbers(type_id, address, j, load(row, j))
    if full < width:
        last = np.empty(LANES, np.float32)
        fill(last, 0)
        for e in range(width - full):
            last[e] = row[full + e]
        _store_numbers(type_id, address, full, load(last, 0))
