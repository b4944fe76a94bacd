"""Bit planes of super-blocks of 256 codes, and decoding through value tables (spec B).

A plane holds some bits of all 256 codes, those of several codes to a byte.
"""

from __future__ import annotations

import numpy as np

from ..formats.kernels import kernel
from .iqk_lookup import pick16, pick32, pick64
from .lanes import LANES, store

# (bits per code, stride): the codes in one byte lie `stride` apart, in a run of 8 / bits * stride codes.
P1, P2, N64, N32 = (1, 32), (2, 32), (4, 32), (4, 16)

_CODES = 256


# Strides, shifts and masks are spelled out below: with numbers in their place the loops become vector code.


@kernel
def _add_pairs(data, unit, codes):
    """Adds unit * the two bits of plane P2 to 256 codes."""
    three = np.uint8(3)
    for half in range(2):
        for j in range(32):
            b, to = data[32 * half + j], 128 * half + j
            codes[to] += (b & three) * unit
            codes[to + 32] += ((b >> 2) & three) * unit
            codes[to + 64] += ((b >> 4) & three) * unit
            codes[to + 96] += (b >> 6) * unit


@kernel
def _add_bits(data, unit, codes):
    """Adds unit * the bit of plane P1 to 256 codes."""
    for j in range(32):
        b = data[j]
        codes[j] += unit if b & 1 else 0
        codes[j + 32] += unit if b & 2 else 0
        codes[j + 64] += unit if b & 4 else 0
        codes[j + 96] += unit if b & 8 else 0
        codes[j + 128] += unit if b & 16 else 0
        codes[j + 160] += unit if b & 32 else 0
        codes[j + 192] += unit if b & 64 else 0
        codes[j + 224] += unit if b & 128 else 0


@kernel
def _put_wide_nibbles(data, codes):
    """Codes from plane N64."""
    for run in range(4):
        for j in range(32):
            b = data[32 * run + j]
            codes[64 * run + j], codes[64 * run + j + 32] = b & np.uint8(15), b >> np.uint8(4)


@kernel
def _put_narrow_nibbles(data, codes):
    """Codes from plane N32."""
    for run in range(8):
        for j in range(16):
            b = data[16 * run + j]
            codes[32 * run + j], codes[32 * run + j + 16] = b & np.uint8(15), b >> np.uint8(4)


@kernel
def _put_plane(data, bits, stride, codes):
    if bits == 2:
        codes[:] = 0
        _add_pairs(data, np.uint8(1), codes)
    elif stride == 32:
        _put_wide_nibbles(data, codes)
    else:
        _put_narrow_nibbles(data, codes)


@kernel
def _add_plane(data, bits, unit, codes):
    if bits == 1:
        _add_bits(data, unit, codes)
    elif bits == 2:
        _add_pairs(data, unit, codes)


@kernel
def _take_pairs(codes, data):
    """Plane P2 of the low two bits of 256 codes."""
    for half in range(2):
        for j in range(32):
            at = 128 * half + j
            a, b, c, d = codes[at] & 3, codes[at + 32] & 3, codes[at + 64] & 3, codes[at + 96] & 3
            data[32 * half + j] = a | (b << 2) | (c << 4) | (d << 6)


@kernel
def _take_bits(codes, data):
    """Plane P1 of the lowest bit of 256 codes."""
    for j in range(32):
        a, b, c, d = codes[j] & 1, codes[j + 32] & 1, codes[j + 64] & 1, codes[j + 96] & 1
        e, f, g, h = codes[j + 128] & 1, codes[j + 160] & 1, codes[j + 192] & 1, codes[j + 224] & 1
        data[j] = a | (b << 1) | (c << 2) | (d << 3) | (e << 4) | (f << 5) | (g << 6) | (h << 7)


@kernel
def _take_wide_nibbles(codes, data):
    """Plane N64 of the low four bits of 256 codes."""
    for run in range(4):
        for j in range(32):
            data[32 * run + j] = (codes[64 * run + j] & 15) | ((codes[64 * run + j + 32] & 15) << 4)


@kernel
def _take_narrow_nibbles(codes, data):
    """Plane N32 of the low four bits of 256 codes."""
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
    """Writes the planes of uint8 codes [units, 256] into uint8 blocks [units, bytes]; planes as for decode_blocks."""
    (low, low_at), (high, high_at) = planes
    rest = np.empty(_CODES, np.uint8)
    for u in range(codes.shape[0]):
        _take_plane(codes[u], low[0], low[1], blocks[u, low_at:])
        if high[0]:
            _without_low_bits(codes[u], low[0], rest)
            _take_plane(rest, high[0], high[1], blocks[u, high_at:])


@kernel
def decode_blocks(blocks, planes, scales, flags, table, out):
    """out[u, e] = scales[u, b] * table[flags[u, b], code e] for super-blocks u, e in block b.

    blocks: uint8 [units, bytes]; planes: (plane, offset in a block) of the codes' low bits, then of the rest (bits 0: none);
    scales: float32, flags: uint8, both [units, blocks per unit]; table: float32 [2, 16, 32 or 64]; out: float32 [units, 256].
    """
    (low, low_at), (high, high_at) = planes
    codes = np.empty(_CODES, np.uint8)
    per_block = _CODES // scales.shape[1]
    entries = table.shape[1]
    for u in range(blocks.shape[0]):
        _put_plane(blocks[u, low_at:], low[0], low[1], codes)
        _add_plane(blocks[u, high_at:], high[0], np.uint8(1 << low[0]), codes)
        for b in range(scales.shape[1]):
            values, scale = table[flags[u, b]], scales[u, b]
            for j in range(b * per_block, (b + 1) * per_block, LANES):
                if entries == 16:
                    y = pick16(values, codes, j)
                elif entries == 32:
                    y = pick32(values, codes, j)
                else:
                    y = pick64(values, codes, j)
                store(out[u], j, y * scale)
