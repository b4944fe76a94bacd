"""Decoders of the standard iq1 types (layouts: the decoders of the gguf package): values are d * scale * (level + shift)."""

from __future__ import annotations

from functools import cache

import numpy as np

from ....simd.byte_lanes import f16_to_f32, load_f16, load_u16, load_u32, load_u64
from ....simd.compile import kernel
from ....simd.lanes import LANES, load, mask_from_bits, select, splat, store
from ..registry import kernel_decoder
from .codebooks import codebook
from .grid_lanes import values_of_pairs
from .grid_search import SUPER, patterns
from .iq1_search import SHIFT

BOOK = "iq1s"


@kernel
def _decode_s(q, packed, table, out):
    """iq1_s, q: uint8 [bytes]; packed: uint16, the levels of all points; table: patterns(...); out: float32 [elements]."""
    levels = load(table, 0)
    for s in range(out.size // SUPER):
        at = 50 * s
        d = load_f16(q, at)
        for c in range(8):
            low, word = load_u32(q, at + 2 + 4 * c), load_u16(q, at + 34 + 2 * c)
            scale = d * np.float32(2 * (word >> 12 & 7) + 1)
            shift = -SHIFT if word >> 15 else SHIFT
            for h in range(2):
                first = packed[np.uint64(low & 255 | (word & 7) << 8)]
                second = packed[np.uint64(low >> 8 & 255 | (word >> 3 & 7) << 8)]
                store(out, SUPER * s + 32 * c + LANES * h, (values_of_pairs(first, second, levels) + shift) * scale)
                low, word = low >> 16, word >> 6


@kernel
def _decode_m(q, packed, table, out):
    """As _decode_s for iq1_m."""
    levels, lower = load(table, 0), mask_from_bits(255)
    for s in range(out.size // SUPER):
        at = 56 * s
        words = load_u64(q, at + 48)  # twelve bits of scale codes and four of d in each sixteen
        d = f16_to_f32(words >> 12 & 15 | words >> 24 & 240 | words >> 36 & 0xF00 | words >> 48 & 0xF000)
        for h in range(SUPER // LANES):
            low, high = load_u16(q, at + 2 * h), np.int64(q[np.uint64(at + 32 + h)])
            scale = d * np.float32(2 * (words >> (16 * (h // 4) + 3 * (h % 4)) & 7) + 1)
            shift1, shift2 = -SHIFT if high & 8 else SHIFT, -SHIFT if high & 128 else SHIFT
            first = packed[np.uint64(low & 255 | (high & 7) << 8)]
            second = packed[np.uint64(low >> 8 | (high >> 4 & 7) << 8)]
            shift = select(lower, splat(shift1), splat(shift2))
            store(out, SUPER * s + LANES * h, (values_of_pairs(first, second, levels) + shift) * scale)


@cache
def level_tables() -> tuple[np.ndarray, np.ndarray]:
    """What kernels take for `packed` and `table`."""
    return codebook(BOOK).points, patterns(codebook(BOOK))


def decode_iq1_s(q: np.ndarray, n: int) -> np.ndarray:
    """uint8 [rows, n / 256 * 50] -> float32 [rows, n] (layout: the gguf package's IQ1_S)."""
    return kernel_decoder(_decode_s, *level_tables())(q, n)


def decode_iq1_m(q: np.ndarray, n: int) -> np.ndarray:
    """uint8 [rows, n / 256 * 56] -> float32 [rows, n] (layout: the gguf package's IQ1_M)."""
    return kernel_decoder(_decode_m, *level_tables())(q, n)
