"""Super-blocks of 256 with a quantised scale for each 16 elements: q3_K, q6_K (spec C.0, D.2)."""

from __future__ import annotations

import numpy as np

from ....formats import TYPES
from ....simd.byte_lanes import bytes_from_words, i8_to_float, load_bytes, load_f16, load_u32, load_u64, u8_to_float
from ....simd.compile import kernel
from ....simd.lanes import LANES, clamp, load, min_lanes, round_product_lanes, round_to_half, select, splat, store, store_half
from ..block_lanes import importance_weights, square_weights, sum_of_squares, transpose_blocks, transpose_importance
from ..importance import importance_rows
from ..registry import Codec, kernel_decoder
from ..scale_search import largest_magnitude, symmetric_scale, symmetric_scale_by_sweeps

SUPER = 256
_TILE = LANES * SUPER
_BLOCKS = 16


@kernel
def _encode_q6_K(x, importance, out):
    """out: uint8 [super-blocks, 210]."""
    X, W, C = np.empty(_TILE, np.float32), np.empty(_TILE, np.float32), np.empty(_TILE, np.float32)
    S, tops = np.empty(LANES * _BLOCKS, np.float32), np.empty(LANES, np.float32)
    codes, scale_codes = np.empty(_TILE, np.uint8), np.empty(LANES * _BLOCKS, np.uint8)
    halves = np.empty(LANES, np.uint16)
    for first in range(0, out.shape[0], LANES):
        transpose_blocks(x, first, SUPER, X)
        if importance.shape[0] == 0:
            square_weights(X, 0, SUPER, W)
        else:  # the one k-quant that takes importance as it is
            transpose_importance(importance, x, first, SUPER, W)
        for b in range(_BLOCKS):
            store(S, LANES * b, symmetric_scale(X, W, LANES * 16 * b, 16, 32, C))
        extreme, magnitude = largest_magnitude(S, 0, _BLOCKS)
        store(tops, 0, magnitude)
        dead = magnitude < 1e-15
        inverse = -128 / select(dead, splat(1), extreme)
        d = 1 / inverse
        store_half(halves, 0, select(dead, splat(0), d))
        d = round_to_half(d)
        for b in range(_BLOCKS):
            scale_code = min_lanes(round_product_lanes(inverse, load(S, LANES * b)), splat(127))
            store(scale_codes, LANES * b, scale_code)
            _round_codes(X, C, LANES * 16 * b, d * scale_code, 32, codes)
        for lane in range(min(LANES, out.shape[0] - first)):
            _pack_q6_K(halves[lane], scale_codes, codes, lane, out[first + lane])
            if tops[lane] < np.float32(1e-15):
                out[first + lane] = 0


@kernel
def _round_codes(X, C, at, scale, nmax, codes):
    """The stored codes of 16 elements with the scale that a decoder will see; where that is 0, those of the search stay."""
    live = abs(scale) > 0
    scale = select(live, scale, splat(1))
    for i in range(at, at + LANES * 16, LANES):
        q = clamp(round_product_lanes(load(X, i) / scale, splat(1)), -nmax, nmax - 1)
        store(codes, i, select(live, q, load(C, i)) + nmax)


@kernel
def _pack_q6_K(half, scale_codes, codes, lane, out):
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
    out[208], out[209] = half & 255, half >> 8


@kernel
def _decode_q6_K(q, out):
    """q: uint8 [bytes]; out: float32 [elements]."""
    scales = np.empty(_BLOCKS, np.float32)
    for s in range(out.size // SUPER):
        at = 210 * s
        store(scales, 0, i8_to_float(load_bytes(q, at + 192)) * load_f16(q, at + 208))
        for h in range(2):
            for b in range(2):
                from_, to, scale = at + 64 * h + 16 * b, SUPER * s + 128 * h + 16 * b, 8 * h + b
                pairs = load_bytes(q, at + 128 + 32 * h + 16 * b)
                for k in range(2):
                    nibbles = load_bytes(q, from_ + 32 * k)
                    low, high = (nibbles & 15) | (pairs & 3) << 4, (nibbles >> 4) | (pairs & 48)
                    store(out, to + 32 * k, (u8_to_float(low) - 32) * scales[scale + 2 * k])
                    store(out, to + 32 * k + 64, (u8_to_float(high) - 32) * scales[scale + 2 * k + 4])
                    pairs = pairs >> 2


@kernel
def _encode_q3_K(x, importance, out):
    """out: uint8 [super-blocks, 110]."""
    X, W, C = np.empty(_TILE, np.float32), np.empty(_TILE, np.float32), np.empty(_TILE, np.float32)
    small = LANES * _BLOCKS
    S, sums, scale_codes = np.empty(small, np.float32), np.empty(small, np.float32), np.empty(small, np.float32)
    codes, packed, halves = np.empty(_TILE, np.uint8), np.empty(small, np.uint8), np.empty(LANES, np.uint16)
    for first in range(0, out.shape[0], LANES):
        transpose_blocks(x, first, SUPER, X)
        if importance.shape[0] == 0:
            for b in range(_BLOCKS):
                store(S, LANES * b, symmetric_scale_by_sweeps(X, LANES * 16 * b, 16, 4, C))
            d = _round_scales(S, scale_codes)
        else:
            transpose_importance(importance, x, first, SUPER, W)
            importance_weights(X, W, 0, SUPER, 2 * sum_of_squares(X, 0, SUPER) / SUPER, W)
            for b in range(_BLOCKS):
                at = LANES * 16 * b
                total = splat(0)
                for i in range(at, at + LANES * 16, LANES):
                    total = total + load(W, i)
                store(sums, LANES * b, total)
                store(S, LANES * b, symmetric_scale(X, W, at, 16, 4, C))
            d = symmetric_scale(S, sums, 0, _BLOCKS, 32, scale_codes)
        store_half(halves, 0, d)
        d = round_to_half(d)
        for b in range(_BLOCKS):
            scale_code = load(scale_codes, LANES * b)
            store(packed, LANES * b, scale_code + 32)
            _round_codes(X, C, LANES * 16 * b, d * scale_code, 4, codes)
        for lane in range(min(LANES, out.shape[0] - first)):
            _pack_q3_K(halves[lane], packed, codes, lane, out[first + lane])


@kernel
def _round_scales(S, codes):
    """Sixteen scales to codes -32 ... 31 by the one of largest magnitude; writes the codes, returns the scale of scales."""
    extreme, magnitude = largest_magnitude(S, 0, _BLOCKS)
    # Below that the inverse is infinite.
    live = magnitude > np.float32(1e-37)
    inverse = select(live, -32 / select(live, extreme, splat(1)), splat(0))
    for b in range(_BLOCKS):
        store(codes, LANES * b, select(live, clamp(round_product_lanes(inverse, load(S, LANES * b)), -32, 31), splat(-32)))
    return select(live, 1 / inverse, splat(0))


@kernel
def _pack_q3_K(half, packed, codes, lane, out):
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
        out[96 + b] = (packed[LANES * b + lane] & 15) | (packed[LANES * (b + 8) + lane] & 15) << 4
    for b in range(4):
        byte = 0
        for k in range(4):
            byte |= (packed[LANES * (4 * k + b) + lane] >> 4) << (2 * k)
        out[104 + b] = byte
    out[108], out[109] = half & 255, half >> 8


@kernel
def _decode_q3_K(q, out):
    scales = np.empty(_BLOCKS, np.float32)
    for s in range(out.size // SUPER):
        at = 110 * s
        low, high = load_u64(q, at + 96), load_u32(q, at + 104)
        low = bytes_from_words(low, low >> 4) & 15
        high = bytes_from_words(high | high >> 2 << 32, high >> 4 | high >> 6 << 32) & 3
        store(scales, 0, (u8_to_float(low | high << 4) - 32) * load_f16(q, at + 108))
        for h in range(2):
            for b in range(2):
                pairs, bits = load_bytes(q, at + 32 + 32 * h + 16 * b), load_bytes(q, at + 16 * b) >> (4 * h)
                for k in range(4):
                    code = (pairs & 3) | (bits & 1) << 2
                    store(out, SUPER * s + 128 * h + 32 * k + 16 * b, (u8_to_float(code) - 4) * scales[8 * h + 2 * k + b])
                    pairs, bits = pairs >> 2, bits >> 1


def _codec(name: str, run, undo) -> Codec:
    size = TYPES[name].block_bytes

    def encode(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
        rows, n = x.shape
        out = np.empty((rows, TYPES[name].row_bytes(n)), np.uint8)
        run(x, importance_rows(importance), out.reshape(-1, size))
        return out

    return Codec(encode, kernel_decoder(undo))


CODECS: dict[str, Codec] = {
    "q3_k": _codec("q3_K", _encode_q3_K, _decode_q3_K),
    "q6_k": _codec("q6_K", _encode_q6_K, _decode_q6_K),
}
