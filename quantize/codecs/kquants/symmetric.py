"""q3_K and q6_K: superblocks of 256 with a quantised scale for each 16 elements (docs/formats/encoders.md, k-quants)."""

from __future__ import annotations

import numpy as np

from ....formats import TYPES
from ....simd.compile import kernel
from ....simd.lanes import LANES, clamp, load, min_lanes, round_product_lanes, round_to_half, select, splat, store, store_half
from ..block_lanes import importance_weights, square_weights, sum_of_squares, transpose_blocks, transpose_importance
from ..codec import Codec
from ..importance import importance_rows
from ..row_decoder import row_decoder
from ..scale_search import largest_magnitude, symmetric_scale, symmetric_scale_by_sweeps

SUPERBLOCK = 256
_TILE = LANES * SUPERBLOCK
_BLOCKS = 16


@kernel
def _encode_q6_K(x, importance, out):
    """x float32 [rows, n] -> out uint8 [superblocks, 210]."""
    x_lanes = np.empty(_TILE, np.float32)
    w_lanes = np.empty(_TILE, np.float32)
    code_lanes = np.empty(_TILE, np.float32)
    scale_lanes, amax = np.empty(LANES * _BLOCKS, np.float32), np.empty(LANES, np.float32)
    codes, scale_codes = np.empty(_TILE, np.uint8), np.empty(LANES * _BLOCKS, np.uint8)
    half_words = np.empty(LANES, np.uint16)
    for first in range(0, out.shape[0], LANES):
        transpose_blocks(x, first, SUPERBLOCK, x_lanes)
        if importance.shape[0] == 0:
            square_weights(x_lanes, 0, SUPERBLOCK, w_lanes)
        else:  # the only k-quant with importance itself as weights, as in llama.cpp
            transpose_importance(importance, x, first, SUPERBLOCK, w_lanes)
        for b in range(_BLOCKS):
            store(scale_lanes, LANES * b, symmetric_scale(x_lanes, w_lanes, LANES * 16 * b, 16, 32, code_lanes))
        signed_max, scale_amax = largest_magnitude(scale_lanes, 0, _BLOCKS)
        store(amax, 0, scale_amax)
        all_zero = scale_amax < 1e-15
        inverse = -128 / select(all_zero, splat(1), signed_max)
        d = 1 / inverse
        store_half(half_words, 0, select(all_zero, splat(0), d))
        d = round_to_half(d)
        for b in range(_BLOCKS):
            scale_code = min_lanes(round_product_lanes(inverse, load(scale_lanes, LANES * b)), splat(127))
            store(scale_codes, LANES * b, scale_code)
            _requantise(x_lanes, code_lanes, LANES * 16 * b, d * scale_code, 32, codes)
        for lane in range(min(LANES, out.shape[0] - first)):
            _pack_q6_K(half_words[lane], scale_codes, codes, lane, out[first + lane])
            if amax[lane] < np.float32(1e-15):
                out[first + lane] = 0


@kernel
def _requantise(x_lanes, code_lanes, at, scale, nmax, codes):
    """The stored codes of 16 elements at the scale that a decoder uses; where that is 0, the codes of the search."""
    nonzero = abs(scale) > 0
    scale = select(nonzero, scale, splat(1))
    for i in range(at, at + LANES * 16, LANES):
        q = clamp(round_product_lanes(load(x_lanes, i) / scale, splat(1)), -nmax, nmax - 1)
        store(codes, i, select(nonzero, q, load(code_lanes, i)) + nmax)


@kernel
def _pack_q6_K(half_word, scale_codes, codes, lane, out):
    """Writes the superblock of one lane."""
    for h in range(2):
        for j in range(64):
            at = 128 * h + j
            out[64 * h + j] = (codes[LANES * at + lane] & 15) | (codes[LANES * (at + 64) + lane] & 15) << 4
        for j in range(32):
            byte = 0
            for k in range(4):
                byte |= (codes[LANES * (128 * h + 32 * k + j) + lane] >> 4) << (2 * k)
            out[128 + 32 * h + j] = byte
    for b in range(_BLOCKS):
        out[192 + b] = scale_codes[LANES * b + lane]
    out[208], out[209] = half_word & 255, half_word >> 8


@kernel
def _encode_q3_K(x, importance, out):
    """x float32 [rows, n] -> out uint8 [superblocks, 110]."""
    x_lanes = np.empty(_TILE, np.float32)
    w_lanes = np.empty(_TILE, np.float32)
    code_lanes = np.empty(_TILE, np.float32)
    scale_count = LANES * _BLOCKS
    scale_lanes = np.empty(scale_count, np.float32)
    sum_w = np.empty(scale_count, np.float32)
    scale_codes = np.empty(scale_count, np.float32)
    codes = np.empty(_TILE, np.uint8)
    stored_scale_codes = np.empty(scale_count, np.uint8)
    half_words = np.empty(LANES, np.uint16)
    for first in range(0, out.shape[0], LANES):
        transpose_blocks(x, first, SUPERBLOCK, x_lanes)
        if importance.shape[0] == 0:
            for b in range(_BLOCKS):
                store(scale_lanes, LANES * b, symmetric_scale_by_sweeps(x_lanes, LANES * 16 * b, 16, 4, code_lanes))
            d = _quantise_scales(scale_lanes, scale_codes)
        else:
            transpose_importance(importance, x, first, SUPERBLOCK, w_lanes)
            importance_weights(
                x_lanes, w_lanes, 0, SUPERBLOCK, 2 * sum_of_squares(x_lanes, 0, SUPERBLOCK) / SUPERBLOCK, w_lanes
            )
            for b in range(_BLOCKS):
                at = LANES * 16 * b
                sum_ = splat(0)
                for i in range(at, at + LANES * 16, LANES):
                    sum_ = sum_ + load(w_lanes, i)
                store(sum_w, LANES * b, sum_)
                store(scale_lanes, LANES * b, symmetric_scale(x_lanes, w_lanes, at, 16, 4, code_lanes))
            d = symmetric_scale(scale_lanes, sum_w, 0, _BLOCKS, 32, scale_codes)
        store_half(half_words, 0, d)
        d = round_to_half(d)
        for b in range(_BLOCKS):
            scale_code = load(scale_codes, LANES * b)
            store(stored_scale_codes, LANES * b, scale_code + 32)
            _requantise(x_lanes, code_lanes, LANES * 16 * b, d * scale_code, 4, codes)
        for lane in range(min(LANES, out.shape[0] - first)):
            _pack_q3_K(half_words[lane], stored_scale_codes, codes, lane, out[first + lane])


@kernel
def _quantise_scales(scale_lanes, codes):
    """Sixteen scales to codes -32 ... 31 by the one of largest magnitude; writes the codes, returns d."""
    signed_max, amax = largest_magnitude(scale_lanes, 0, _BLOCKS)
    # The inverse of a smaller scale is infinite.
    nonzero = amax > np.float32(1e-37)
    inverse = select(nonzero, -32 / select(nonzero, signed_max, splat(1)), splat(0))
    for b in range(_BLOCKS):
        store(
            codes,
            LANES * b,
            select(nonzero, clamp(round_product_lanes(inverse, load(scale_lanes, LANES * b)), -32, 31), splat(-32)),
        )
    return select(nonzero, 1 / inverse, splat(0))


@kernel
def _pack_q3_K(half_word, scale_codes, codes, lane, out):
    """Writes the superblock of one lane."""
    for j in range(32):
        byte = 0
        for c in range(8):
            byte |= (codes[LANES * (32 * c + j) + lane] >> 2) << c
        out[j] = byte
        for h in range(2):
            byte = 0
            for k in range(4):
                byte |= (codes[LANES * (128 * h + 32 * k + j) + lane] & 3) << (2 * k)
            out[32 + 32 * h + j] = byte
    for b in range(8):
        out[96 + b] = (scale_codes[LANES * b + lane] & 15) | (scale_codes[LANES * (b + 8) + lane] & 15) << 4
    for b in range(4):
        byte = 0
        for k in range(4):
            byte |= (scale_codes[LANES * (4 * k + b) + lane] >> 4) << (2 * k)
        out[104 + b] = byte
    out[108], out[109] = half_word & 255, half_word >> 8


def _codec(name: str, encode_kernel) -> Codec:
    block_bytes = TYPES[name].block_bytes

    def encode(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
        rows, n = x.shape
        out = np.empty((rows, TYPES[name].row_bytes(n)), np.uint8)
        encode_kernel(x, importance_rows(importance), out.reshape(-1, block_bytes))
        return out

    return Codec(encode, row_decoder(name))


CODECS: dict[str, Codec] = {
    "q3_k": _codec("q3_K", _encode_q3_K),
    "q6_k": _codec("q6_K", _encode_q6_K),
}
