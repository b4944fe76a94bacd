"""q3_K and q6_K: superblocks of 256 with a quantised scale for each 16 elements (docs/formats/encoders.md, k-quants)."""

from __future__ import annotations

import numpy as np

from ....simd.compile import kernel
from ....simd.lanes import LANES, clamp, load, min_lanes, round_product_lanes, round_to_half, select, splat, store, store_half
from ..block_lanes import importance_weights, square_weights, sum_of_squares, transpose_blocks, transpose_importance
from ..codec import Codec
from ..lane_packing import BLOCK_ITEMS, lane_codec, put_lanes, put_words, take_blocks
from ..scale_search import largest_magnitude, symmetric_scale, symmetric_scales_by_sweeps

SUPERBLOCK = 256
_TILE = LANES * SUPERBLOCK
_BLOCKS = 16
_FIELDS = ("codes", "scales", "d")


@kernel(items=BLOCK_ITEMS)
def _encode_q6_K(x, importance, parts, lane_bytes, out):
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
        put_lanes(codes, 0, parts[0], lane_bytes)
        put_lanes(scale_codes, 0, parts[1], lane_bytes)
        put_words(half_words, 0, parts[2], lane_bytes)
        take_blocks(lane_bytes, first, out)
        for lane in range(min(LANES, out.shape[0] - first)):
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


@kernel(items=BLOCK_ITEMS)
def _encode_q3_K(x, importance, parts, lane_bytes, out):
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
            for b in range(0, _BLOCKS, 4):
                scales = symmetric_scales_by_sweeps(x_lanes, LANES * 16 * b, 16, 4, code_lanes)
                store(scale_lanes, LANES * b, scales[0])
                store(scale_lanes, LANES * (b + 1), scales[1])
                store(scale_lanes, LANES * (b + 2), scales[2])
                store(scale_lanes, LANES * (b + 3), scales[3])
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
        put_lanes(codes, 0, parts[0], lane_bytes)
        put_lanes(stored_scale_codes, 0, parts[1], lane_bytes)
        put_words(half_words, 0, parts[2], lane_bytes)
        take_blocks(lane_bytes, first, out)


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


CODECS: dict[str, Codec] = {
    "q3_k": lane_codec("q3_K", _encode_q3_K, _FIELDS),
    "q6_k": lane_codec("q6_K", _encode_q6_K, _FIELDS),
}
