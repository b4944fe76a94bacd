"""Decoders of iq1_s and iq1_m: values are d * scale * (level + shift), layouts those of llama.cpp (docs/formats/layouts.md)."""

from __future__ import annotations

from functools import cache

import numpy as np

from ....simd.byte_lanes import f16_to_f32, load_f16, load_u16, load_u32, load_u64
from ....simd.compile import kernel
from ....simd.lanes import LANES, load, mask_from_bits, select, splat, store
from ..codec import kernel_decoder
from .codebooks import codebook
from .grid_lanes import unpack_2bit_levels
from .grid_search import SUPERBLOCK, nibble_tables
from .iq1_search import SHIFT

CODEBOOK = "iq1s"


@kernel
def _decode_s(q, points, tables, out):
    """iq1_s: q uint8 [bytes] -> out float32 [elements].

    points: uint16, packed levels of the grid points; tables: nibble_tables(...).
    """
    levels = load(tables, 0)
    for s in range(out.size // SUPERBLOCK):
        at = 50 * s
        d = load_f16(q, at)
        for block in range(8):
            low_bytes, word = load_u32(q, at + 2 + 4 * block), load_u16(q, at + 34 + 2 * block)
            scale = d * np.float32(2 * (word >> 12 & 7) + 1)
            shift = -SHIFT if word >> 15 else SHIFT
            for h in range(2):
                first = points[np.uint64(low_bytes & 255 | (word & 7) << 8)]
                second = points[np.uint64(low_bytes >> 8 & 255 | (word >> 3 & 7) << 8)]
                store(out, SUPERBLOCK * s + 32 * block + LANES * h, (unpack_2bit_levels(first, second, levels) + shift) * scale)
                low_bytes, word = low_bytes >> 16, word >> 6


@kernel
def _decode_m(q, points, tables, out):
    """iq1_m, as _decode_s."""
    levels, lower_lanes = load(tables, 0), mask_from_bits(255)
    for s in range(out.size // SUPERBLOCK):
        at = 56 * s
        words = load_u64(q, at + 48)  # twelve bits of scale codes and four of d in each sixteen
        d = f16_to_f32(words >> 12 & 15 | words >> 24 & 240 | words >> 36 & 0xF00 | words >> 48 & 0xF000)
        for h in range(SUPERBLOCK // LANES):
            low_bytes, qh = load_u16(q, at + 2 * h), np.int64(q[np.uint64(at + 32 + h)])
            scale = d * np.float32(2 * (words >> (16 * (h // 4) + 3 * (h % 4)) & 7) + 1)
            shift1, shift2 = -SHIFT if qh & 8 else SHIFT, -SHIFT if qh & 128 else SHIFT
            first = points[np.uint64(low_bytes & 255 | (qh & 7) << 8)]
            second = points[np.uint64(low_bytes >> 8 | (qh >> 4 & 7) << 8)]
            shift = select(lower_lanes, splat(shift1), splat(shift2))
            store(out, SUPERBLOCK * s + LANES * h, (unpack_2bit_levels(first, second, levels) + shift) * scale)


@cache
def decoder_tables() -> tuple[np.ndarray, np.ndarray]:
    """The arguments `points` and `tables` of the decoder kernels."""
    return codebook(CODEBOOK).points, nibble_tables(codebook(CODEBOOK))


def decode_iq1_s(q: np.ndarray, n: int) -> np.ndarray:
    """iq1_s: uint8 [rows, n / 256 * 50] -> float32 [rows, n]."""
    return kernel_decoder(_decode_s, *decoder_tables())(q, n)


def decode_iq1_m(q: np.ndarray, n: int) -> np.ndarray:
    """iq1_m: uint8 [rows, n / 256 * 56] -> float32 [rows, n]."""
    return kernel_decoder(_decode_m, *decoder_tables())(q, n)
