"""Super-blocks of 256 with quantised block scales: q4_K, q6_K (spec C.0, D.2)."""

from __future__ import annotations

import numpy as np

from ..formats import TYPES
from ..formats.kernels import kernel
from .codec import Codec
from .importance import as_rows
from .lanes import LANES, clamp, load, narrow_half, nearest, select, smaller, spread, sqrt_lanes, store, store_half
from .legacy import half_scales
from .scale_search import largest, offset_scale, offset_scale_weighted, signed_scale, unsigned_scale
from .tiles import sum_of_squares, take_blocks, take_importance, weigh_by_square, weigh_lanes

SUPER = 256
_TILE = LANES * SUPER


@kernel
def _encode_q6_K(x, importance, out):
    """out: uint8 [super-blocks, 210]."""
    X, W, C = np.empty(_TILE, np.float32), np.empty(_TILE, np.float32), np.empty(_TILE, np.float32)
    S, tops = np.empty(LANES * 16, np.float32), np.empty(LANES, np.float32)
    codes, scale_codes, halves = np.empty(_TILE, np.uint8), np.empty(LANES * 16, np.uint8), np.empty(LANES, np.uint16)
    for first in range(0, out.shape[0], LANES):
        take_blocks(x, first, SUPER, X)
        if importance.shape[0] == 0:
            weigh_by_square(X, 0, SUPER, W)
        else:  # the one k-quant that takes importance as it is
            take_importance(importance, x, first, SUPER, W)
        for b in range(16):
            store(S, LANES * b, signed_scale(X, W, LANES * 16 * b, 16, 32, C))
        extreme, magnitude = largest(S, 0, 16)
        store(tops, 0, magnitude)
        dead = magnitude < 1e-15
        inverse = -128 / select(dead, spread(1), extreme)
        d = 1 / inverse
        store_half(halves, 0, select(dead, spread(0), d))
        d = narrow_half(d)
        for b in range(16):
            scale_code = smaller(nearest(inverse, load(S, LANES * b)), spread(127))
            store(scale_codes, LANES * b, scale_code)
            block_scale = d * scale_code
            live = abs(block_scale) > 0
            block_scale = select(live, block_scale, spread(1))
            for i in range(LANES * 16 * b, LANES * 16 * (b + 1), LANES):
                q = clamp(nearest(load(X, i) / block_scale, spread(1)), -32, 31)
                store(codes, i, select(live, q, load(C, i)) + 32)
        for lane in range(min(LANES, out.shape[0] - first)):
            _pack_q6_K(halves[lane], scale_codes, codes, lane, out[first + lane])
            if tops[lane] < np.float32(1e-15):
                out[first + lane] = 0


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
    for b in range(16):
        out[192 + b] = scale_codes[LANES * b + lane]
    out[208], out[209] = half & 255, half >> 8


@kernel
def _decode_q6_K(q, scales, out):
    for s in range(q.shape[0]):
        block, row, d = q[s], out[s], scales[s]
        for h in range(2):
            for b in range(2):
                for k in range(4):
                    block_scale = d * np.float32(np.int8(block[192 + 8 * h + 2 * k + b]))
                    for j in range(16):
                        byte = block[64 * h + 32 * (k % 2) + 16 * b + j] >> (4 * (k // 2))
                        high = (block[128 + 32 * h + 16 * b + j] >> (2 * k)) & 3
                        row[128 * h + 32 * k + 16 * b + j] = block_scale * np.float32(np.int32((byte & 15) | high << 4) - 32)


@kernel
def _encode_q4_K(x, importance, out):
    """out: uint8 [super-blocks, 144]."""
    X, W, C = np.empty(_TILE, np.float32), np.empty(_TILE, np.float32), np.empty(_TILE, np.float32)
    small = LANES * 8
    scales, lows, sums = np.empty(small, np.float32), np.empty(small, np.float32), np.empty(small, np.float32)
    scale_codes, low_codes = np.empty(small, np.float32), np.empty(small, np.float32)
    w64, wx64 = np.empty(LANES * 32, np.float64), np.empty(LANES * 32, np.float64)
    codes, packed, halves = np.empty(_TILE, np.uint8), np.empty(2 * small, np.uint8), np.empty(2 * LANES, np.uint16)
    for first in range(0, out.shape[0], LANES):
        take_blocks(x, first, SUPER, X)
        if importance.shape[0] == 0:
            for c in range(8):
                at = LANES * 32 * c
                rms = sqrt_lanes(sum_of_squares(X, at, 32) / 32)
                for i in range(at, at + LANES * 32, LANES):
                    store(W, i, rms + abs(load(X, i)))
                scale, low = offset_scale(X, W, at, 32, 15, -1.0, 0.1, 20, C)
                store(scales, LANES * c, scale)
                store(lows, LANES * c, low)
            d = _round_scales(scales, scale_codes)
            dmin = _round_scales(lows, low_codes)
        else:
            take_importance(importance, x, first, SUPER, W)
            sigma2 = 2 * sum_of_squares(X, 0, SUPER) / SUPER
            weigh_lanes(X, W, 0, SUPER, sigma2, W)
            for c in range(8):
                at = LANES * 32 * c
                total = spread(0)
                for i in range(at, at + LANES * 32, LANES):
                    total = total + load(W, i)
                store(sums, LANES * c, total)
                scale, low = offset_scale_weighted(X, W, at, 32, 15, -0.9, 0.05, 36, w64, wx64, C)
                store(scales, LANES * c, scale)
                store(lows, LANES * c, low)
            d = unsigned_scale(scales, sums, 0, 8, 63, scale_codes)
            dmin = unsigned_scale(lows, sums, 0, 8, 63, low_codes)
        store_half(halves, 0, d)
        store_half(halves, LANES, dmin)
        d, dmin = narrow_half(d), narrow_half(dmin)
        for c in range(8):
            scale_code, low_code = load(scale_codes, LANES * c), load(low_codes, LANES * c)
            store(packed, LANES * c, scale_code)
            store(packed, small + LANES * c, low_code)
            scale, low = d * scale_code, dmin * low_code
            live = abs(scale) > 0
            scale = select(live, scale, spread(1))
            for i in range(LANES * 32 * c, LANES * 32 * (c + 1), LANES):
                q = clamp(nearest((load(X, i) + low) / scale, spread(1)), 0, 15)
                store(codes, i, select(live, q, load(C, i)))
        for lane in range(min(LANES, out.shape[0] - first)):
            _pack_q4_K(halves, packed, codes, lane, out[first + lane])


@kernel
def _round_scales(s, codes):
    """Eight scales (or minima) to six bits by their largest; writes the codes, returns the scale of scales."""
    top = spread(0)
    for c in range(8):
        v = load(s, LANES * c)
        top = select(v > top, v, top)
    live = top > 0
    inverse = select(live, 63 / select(live, top, spread(1)), spread(0))
    for c in range(8):
        store(codes, LANES * c, clamp(nearest(inverse, load(s, LANES * c)), 0, 63))
    return top / 63


@kernel
def _pack_q4_K(halves, packed, codes, lane, out):
    for k in range(2):
        out[2 * k], out[2 * k + 1] = halves[LANES * k + lane] & 255, halves[LANES * k + lane] >> 8
    lows = LANES * 8
    for c in range(4):
        scale, low = packed[LANES * c + lane], packed[lows + LANES * c + lane]
        scale4, low4 = packed[LANES * (c + 4) + lane], packed[lows + LANES * (c + 4) + lane]
        out[4 + c] = scale | (scale4 >> 4) << 6
        out[8 + c] = low | (low4 >> 4) << 6
        out[12 + c] = (scale4 & 15) | (low4 & 15) << 4
    for g in range(4):
        for j in range(32):
            at = 64 * g + j
            out[16 + 32 * g + j] = codes[LANES * at + lane] | codes[LANES * (at + 32) + lane] << 4


@kernel
def _decode_q4_K(q, scales, lows, out):
    for s in range(q.shape[0]):
        block, row, d, dmin = q[s], out[s], scales[s], lows[s]
        S = block[4:16]
        for c in range(8):
            if c < 4:
                scale_code, low_code = S[c] & 63, S[c + 4] & 63
            else:
                scale_code, low_code = (S[c + 4] & 15) | (S[c - 4] >> 6) << 4, (S[c + 4] >> 4) | (S[c] >> 6) << 4
            scale, low = d * np.float32(scale_code), dmin * np.float32(low_code)
            for j in range(32):
                byte = block[16 + 32 * (c // 2) + j] >> (4 * (c % 2))
                row[32 * c + j] = scale * np.float32(byte & 15) - low


def _encoder(name: str, run):
    def encode(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
        rows, n = x.shape
        out = np.empty((rows, TYPES[name].row_bytes(n)), np.uint8)
        run(x, as_rows(importance), out.reshape(-1, TYPES[name].block_bytes))
        return out

    return encode


def _decode_q6(q: np.ndarray, n: int) -> np.ndarray:
    blocks = q.reshape(-1, TYPES["q6_K"].block_bytes)
    out = np.empty((len(blocks), SUPER), np.float32)
    _decode_q6_K(blocks, half_scales(blocks, 208), out)
    return out.reshape(-1, n)


def _decode_q4(q: np.ndarray, n: int) -> np.ndarray:
    blocks = q.reshape(-1, TYPES["q4_K"].block_bytes)
    out = np.empty((len(blocks), SUPER), np.float32)
    _decode_q4_K(blocks, half_scales(blocks), half_scales(blocks, 2), out)
    return out.reshape(-1, n)


CODECS: dict[str, Codec] = {
    "q4_k": Codec(_encoder("q4_K", _encode_q4_K), _decode_q4),
    "q6_k": Codec(_encoder("q6_K", _encode_q6_K), _decode_q6),
}
