"""Bit planes of superblocks of 256 codes, and decoding through value tables (docs/formats/layouts.md).

A plane holds some bits of all 256 codes, those of several codes to a byte.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from ....simd.byte_lanes import i8_to_float, load_bytes, load_f16, load_f32, load_u64, lookup_bytes, nonzero, store_bytes
from ....simd.compile import kernel
from ....simd.lanes import LANES, select, store
from ....simd.table_lookup import lookup64
from .scale_codes import read_header

# A plane is (bits per code, stride): the codes in one byte lie `stride` apart, in a range of 8 / bits * stride codes. Of the
# planes below P1 is (1, 32), P2 (2, 32), N64 (4, 32) and N32 (4, 16).

_CODES = 256


# Strides, shifts and masks are spelled out below: with numbers in their place the loops become vector code.


@kernel
def _take_pairs(codes, data):
    """Plane (2, 32) of the low two bits of 256 codes."""
    for half in range(2):
        for j in range(32):
            at = 128 * half + j
            a, b, c, d = codes[at] & 3, codes[at + 32] & 3, codes[at + 64] & 3, codes[at + 96] & 3
            data[32 * half + j] = a | (b << 2) | (c << 4) | (d << 6)


@kernel
def _take_bits(codes, data):
    """Plane (1, 32) of the lowest bit of 256 codes."""
    for j in range(32):
        a, b, c, d = codes[j] & 1, codes[j + 32] & 1, codes[j + 64] & 1, codes[j + 96] & 1
        e, f, g, h = codes[j + 128] & 1, codes[j + 160] & 1, codes[j + 192] & 1, codes[j + 224] & 1
        data[j] = a | (b << 1) | (c << 2) | (d << 3) | (e << 4) | (f << 5) | (g << 6) | (h << 7)


@kernel
def _take_wide_nibbles(codes, data):
    """Plane (4, 32) of the low four bits of 256 codes."""
    for run in range(4):
        for j in range(32):
            data[32 * run + j] = (codes[64 * run + j] & 15) | ((codes[64 * run + j + 32] & 15) << 4)


@kernel
def _take_narrow_nibbles(codes, data):
    """Plane (4, 16) of the low four bits of 256 codes."""
    for run in range(8):
        for j in range(16):
            data[16 * run + j] = (codes[32 * run + j] & 15) | ((codes[32 * run + j + 16] & 15) << 4)


@kernel
def _take_plane(codes, bits, stride, data):
    if bits == 1:
        _take_bits(codes, data)
    elif bits == 2:
        _take_pairs(codes, data)
    elif stride == 32:
        _take_wide_nibbles(codes, data)
    else:
        _take_narrow_nibbles(codes, data)


@kernel
def _without_low_bits(codes, bits, out):
    if bits == 2:
        for j in range(_CODES):
            out[j] = codes[j] >> 2
    else:
        for j in range(_CODES):
            out[j] = codes[j] >> 4


@kernel
def pack_codes(codes, planes, blocks):
    """Writes the planes of uint8 codes [superblocks, 256] into uint8 blocks [superblocks, bytes].

    planes: (plane, offset in a block) of the low bits, then of the remaining bits (bits 0: none).
    """
    (low, low_at), (high, high_at) = planes
    rest = np.empty(_CODES, np.uint8)
    for u in range(codes.shape[0]):
        _take_plane(codes[u], low[0], low[1], blocks[u, low_at:])
        if high[0]:
            _without_low_bits(codes[u], low[0], rest)
            _take_plane(rest, high[0], high[1], blocks[u, high_at:])


@kernel
def _lookup32(low, high, codes):
    """Entries, as float32 lanes, of a table of 32 bytes, given as its first and last sixteen."""
    return i8_to_float(select(nonzero(codes & 16), lookup_bytes(high, codes & 15), lookup_bytes(low, codes & 15)))


@kernel
def decode_rows(q, meta, size, header, planes, shift, entries, table, float_table, out):
    """out[r, e] = d * integer scale of its block * table[flag of its block, code e] for rows q, uint8 [rows, row_bytes].

    meta            bytes of the row's float32 or float16 scale d before its superblocks; 0: each superblock has a float16 d
    size            bytes of a superblock
    header          the number by which read_header knows the type's scale codes
    planes          int64 [2, 4] from planes_to_read
    shift           binary logarithm of the elements of a block
    entries         entries per table: 16 or 32 in the int8 row `table`, or 64 in the float32 row `float_table`
    out             float32 [rows, n]

    Arrays are only passed to intrinsics: counting references to them would take longer than the decoding.
    """
    codes, block_scales = np.empty(_CODES, np.uint8), np.empty(LANES, np.float32)
    bytes_, flat = q.reshape(-1), out.reshape(-1)
    for r in range(q.shape[0]):
        start = q.shape[1] * r
        d = load_f32(bytes_, start) if meta == 4 else load_f16(bytes_, start)
        for s in range(out.shape[1] // _CODES):
            at, out_at = start + meta + size * s, out.shape[1] * r + _CODES * s
            if meta == 0:
                d = load_f16(bytes_, at)
            a, b, c = load_u64(bytes_, at), load_u64(bytes_, at + 8), load_u64(bytes_, at + 16)
            flags, int_scales = read_header(header, a, b, c)
            store(block_scales, 0, int_scales * d)
            codes[:] = 0
            for p in range(2):
                bits, stride, offset, code_bit = planes[p]
                run = 0
                for i in range(0, 32 * bits, stride):
                    for j in range(0, stride, LANES):
                        part = load_bytes(bytes_, at + offset + i + j)
                        for k in range(run + j, run + 8 // bits * stride, stride):
                            store_bytes(codes, k, load_bytes(codes, k) | (part & ((1 << bits) - 1)) << code_bit)
                            part = part >> bits
                    run += 8 // bits * stride
            for j in range(0, _CODES, LANES):
                block = j >> shift
                table_start = (flags >> block & 1) * entries
                if entries == 64:
                    y = lookup64(float_table, table_start, codes, j)
                else:
                    y = _lookup32(load_bytes(table, table_start), load_bytes(table, table_start + LANES), load_bytes(codes, j))
                store(flat, out_at + j, y * block_scales[block])


def planes_of(codes: np.ndarray) -> tuple[tuple[tuple[int, int], int], ...]:
    """(plane, offset) of the low bits of codes and, if they are separate, of the rest; codes: bit addresses [256, width]."""
    cuts = [0, *(np.flatnonzero((np.diff(codes, axis=1) != 1).any(axis=0)) + 1).tolist(), codes.shape[1]]
    planes = []
    for first, stop in pairwise(cuts):
        stride = int(np.argmax(np.diff(codes[:, first]) != 8)) + 1
        planes.append(((stop - first, stride), int(codes[0, first]) // 8))
    return tuple(planes)


def planes_to_read(planes) -> np.ndarray:
    """The argument `planes` of decode_rows: bits, stride, offset in a block and lowest bit in a code, of both planes."""
    (low, low_at), (high, high_at) = planes
    return np.array([[*low, low_at, 0], [high[0], max(high[1], LANES), high_at, low[0]]])
