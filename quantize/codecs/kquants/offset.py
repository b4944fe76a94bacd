"""Super-blocks of 256 whose blocks have a quantised scale and a quantised minimum: q2_K, q4_K, q5_K (spec C.0, D.2).

q4_K and q5_K are found as the reference finds them. With the two bits of q2_K more can be gained: with importance the scales of
a super-block are fitted once more to the codes at the end. And where the reference, without importance, makes rows ternary that
look nearly so, by a rule that depends on how many rows it is given at a time, here each super-block becomes ternary whose
squared error is smaller that way.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ....formats import TYPES
from ....simd.byte_lanes import bytes_from_words, load_bytes, load_f16, load_u32, u8_to_float
from ....simd.compile import kernel
from ....simd.lanes import (
    LANES,
    any_lane,
    clamp,
    fma_lanes,
    load,
    load_half,
    round_product_lanes,
    round_to_half,
    select,
    splat,
    sqrt_lanes,
    store,
    store_half,
)
from ..block_lanes import importance_weights, sum_of_squares, transpose_blocks, transpose_importance
from ..importance import importance_rows
from ..registry import Codec, kernel_decoder
from ..scale_search import largest_magnitude, scale_and_min, scale_and_min_f64, unsigned_scale

SUPER = 256
_TILE = LANES * SUPER
_LOWS = LANES * 16  # where the codes of the minima begin, after those of at most 16 scales


class _Search(NamedTuple):
    """block: elements with a scale of their own; nmax: largest code; top: largest code of a scale or minimum;
    sigma: share of the mean square in the weights with importance; first, steps: start scales without importance (QKX2);
    coarse: what else q2_K does its own way: weights |x| and absolute errors without importance, codes found with scales not yet
    rounded to float16 and a last fit with it; ternary super-blocks.
    """

    block: int
    nmax: int
    top: int
    sigma: float
    first: float
    steps: int
    coarse: bool


_SEARCHES = {
    "q2_K": _Search(16, 3, 15, 0.75, -0.5, 15, True),
    "q4_K": _Search(32, 15, 63, 2, -1.0, 20, False),
    "q5_K": _Search(32, 31, 63, 2, -0.5, 15, False),
}


@kernel
def _encode(x, importance, search, out):
    """search: a _Search; out: uint8 [super-blocks, bytes]."""
    n, nmax, top, coarse = search.block, search.nmax, search.top, search.coarse
    blocks = SUPER // n
    X, W, C = np.empty(_TILE, np.float32), np.empty(_TILE, np.float32), np.empty(_TILE, np.float32)
    scales, lows, sums = np.empty(_LOWS, np.float32), np.empty(_LOWS, np.float32), np.empty(_LOWS, np.float32)
    scale_codes, low_codes = np.empty(_LOWS, np.float32), np.empty(_LOWS, np.float32)
    w64, wx64 = np.empty(LANES * 32, np.float64), np.empty(LANES * 32, np.float64)
    codes, packed, halves = np.empty(_TILE, np.uint8), np.empty(2 * _LOWS, np.uint8), np.empty(2 * LANES, np.uint16)
    for first in range(0, out.shape[0], LANES):
        transpose_blocks(x, first, SUPER, X)
        if importance.shape[0] == 0:
            for b in range(blocks):
                at = LANES * n * b
                rms = splat(0) if coarse else sqrt_lanes(sum_of_squares(X, at, n) / n)
                for i in range(at, at + LANES * n, LANES):
                    store(W, i, rms + abs(load(X, i)))
                scale, low = scale_and_min(X, W, at, n, nmax, search.first, 0.1, search.steps, coarse, C)
                store(scales, LANES * b, scale)
                store(lows, LANES * b, low)
            d = _round_scales(scales, blocks, top, scale_codes)
            dmin = _round_scales(lows, blocks, top, low_codes)
        else:
            transpose_importance(importance, x, first, SUPER, W)
            sigma2 = np.float32(search.sigma) * sum_of_squares(X, 0, SUPER) / SUPER
            importance_weights(X, W, 0, SUPER, sigma2, W)
            for b in range(blocks):
                at = LANES * n * b
                total = splat(0)
                for i in range(at, at + LANES * n, LANES):
                    total = total + load(W, i)
                store(sums, LANES * b, total)
                scale, low = scale_and_min_f64(X, W, at, n, nmax, -0.9, 0.05, 36, w64, wx64, C)
                store(scales, LANES * b, scale)
                store(lows, LANES * b, low)
            d = unsigned_scale(scales, sums, 0, blocks, top, scale_codes)
            dmin = unsigned_scale(lows, sums, 0, blocks, top, low_codes)
        store_half(halves, 0, d)
        store_half(halves, LANES, dmin)
        if not coarse or importance.shape[0] == 0:
            d, dmin = round_to_half(d), round_to_half(dmin)
        for b in range(blocks):
            scale_code, low_code = load(scale_codes, LANES * b), load(low_codes, LANES * b)
            store(packed, LANES * b, scale_code)
            store(packed, _LOWS + LANES * b, low_code)
            scale, low = d * scale_code, dmin * low_code
            live = abs(scale) > 0
            scale = select(live, scale, splat(1))
            for i in range(LANES * n * b, LANES * n * (b + 1), LANES):
                q = clamp(round_product_lanes((load(X, i) + low) / scale, splat(1)), 0, nmax)
                store(codes, i, select(live, q, load(C, i)))
        if coarse:
            if importance.shape[0] == 0:
                W[:] = 1
            else:
                _refit(X, W, codes, packed, halves)
            _prefer_ternary(X, W, codes, packed, halves)
        for lane in range(min(LANES, out.shape[0] - first)):
            if coarse:
                _pack_q2_K(halves, packed, codes, lane, out[first + lane])
            else:
                _pack_head(halves, packed, lane, out[first + lane])
                _pack_codes(codes, lane, nmax, out[first + lane])


@kernel
def _round_scales(s, blocks, top, codes):
    """Scales (or minima) to codes 0 ... top by their largest; writes the codes, returns the scale of scales."""
    most = splat(0)
    for b in range(blocks):
        v = load(s, LANES * b)
        most = select(v > most, v, most)
    live = most > 0
    inverse = select(live, top / select(live, most, splat(1)), splat(0))
    for b in range(blocks):
        store(codes, LANES * b, clamp(round_product_lanes(inverse, load(s, LANES * b)), 0, top))
    return most / top


@kernel
def _error_q2_K(X, W, codes, packed, d, dmin):
    """Weighted squared error of what a decoder will see of sixteen q2_K super-blocks."""
    error = splat(0)
    for b in range(16):
        scale, low = d * load(packed, LANES * b), dmin * load(packed, _LOWS + LANES * b)
        for i in range(LANES * 16 * b, LANES * 16 * (b + 1), LANES):
            miss = scale * load(codes, i) - low - load(X, i)
            error = fma_lanes(load(W, i) * miss, miss, error)
    return error


@kernel
def _prefer_ternary(X, W, codes, packed, halves):
    """Super-blocks of which -m, 0 and m, with m the largest magnitude, are closer than what was found become that."""
    _, top = largest_magnitude(X, 0, SUPER)
    half, m = top * 0.5, round_to_half(top)
    error = _error_q2_K(X, W, codes, packed, load_half(halves, 0), load_half(halves, LANES))
    for i in range(0, _TILE, LANES):
        xi = load(X, i)
        miss = xi - select(xi >= half, m, select(xi <= -half, -m, splat(0)))
        error = fma_lanes(-(load(W, i) * miss), miss, error)
    better = (error > 0) & (top > 0)
    if any_lane(better):
        for i in range(0, _TILE, LANES):
            xi = load(X, i)
            digit = select(xi >= half, splat(2), select(xi <= -half, splat(0), splat(1)))
            store(codes, i, select(better, digit, load(codes, i)))
        for i in range(0, 2 * _LOWS, LANES):
            store(packed, i, select(better, splat(1), load(packed, i)))
        for i in range(0, 2 * LANES, LANES):
            store_half(halves, i, select(better, m, load_half(halves, i)))


@kernel
def _refit(X, W, codes, packed, halves):
    """Fits the two scales of super-blocks anew to their codes, finds the codes again, and keeps what is closer."""
    saa, sab, sbb, sxa, sxb = splat(0), splat(0), splat(0), splat(0), splat(0)
    for b in range(16):
        u, v = load(packed, LANES * b), load(packed, _LOWS + LANES * b)
        s1, s2, s0, sx1, sx0 = splat(0), splat(0), splat(0), splat(0), splat(0)
        for i in range(LANES * 16 * b, LANES * 16 * (b + 1), LANES):
            q, xi, wi = load(codes, i), load(X, i), load(W, i)
            wq = wi * q
            s0, s1, s2 = s0 + wi, s1 + wq, fma_lanes(wq, q, s2)
            sx0, sx1 = fma_lanes(wi, xi, sx0), fma_lanes(wq, xi, sx1)
        saa, sab, sbb = fma_lanes(u * u, s2, saa), fma_lanes(u * v, s1, sab), fma_lanes(v * v, s0, sbb)
        sxa, sxb = fma_lanes(u, sx1, sxa), fma_lanes(v, sx0, sxb)
    determinant = saa * sbb - sab * sab
    solvable = determinant > 1e-6 * saa * sbb
    safe = select(solvable, determinant, splat(1))
    d = (sbb * sxa - sab * sxb) / safe
    dmin = (sab * sxa - saa * sxb) / safe
    solvable = solvable & (d > 0) & (dmin >= 0)
    d_old, dmin_old = load_half(halves, 0), load_half(halves, LANES)
    d, dmin = select(solvable, round_to_half(d), d_old), select(solvable, round_to_half(dmin), dmin_old)
    new = np.empty(_TILE, np.uint8)
    for b in range(16):
        scale, low = d * load(packed, LANES * b), dmin * load(packed, _LOWS + LANES * b)
        live = abs(scale) > 0
        scale = select(live, scale, splat(1))
        for i in range(LANES * 16 * b, LANES * 16 * (b + 1), LANES):
            q = clamp(round_product_lanes((load(X, i) + low) / scale, splat(1)), 0, 3)
            store(new, i, select(live, q, load(codes, i)))
    better = _error_q2_K(X, W, new, packed, d, dmin) < _error_q2_K(X, W, codes, packed, d_old, dmin_old)
    if any_lane(better):
        for i in range(0, _TILE, LANES):
            store(codes, i, select(better, load(new, i), load(codes, i)))
        store_half(halves, 0, select(better, d, d_old))
        store_half(halves, LANES, select(better, dmin, dmin_old))


@kernel
def _pack_q2_K(halves, packed, codes, lane, out):
    for b in range(16):
        out[b] = packed[LANES * b + lane] | packed[_LOWS + LANES * b + lane] << 4
    for h in range(2):
        for j in range(32):
            byte = 0
            for k in range(4):
                byte |= codes[LANES * (128 * h + 32 * k + j) + lane] << (2 * k)
            out[16 + 32 * h + j] = byte
    for k in range(2):
        out[80 + 2 * k], out[81 + 2 * k] = halves[LANES * k + lane] & 255, halves[LANES * k + lane] >> 8


@kernel
def _pack_head(halves, packed, lane, out):
    for k in range(2):
        out[2 * k], out[2 * k + 1] = halves[LANES * k + lane] & 255, halves[LANES * k + lane] >> 8
    for c in range(4):
        scale, low = packed[LANES * c + lane], packed[_LOWS + LANES * c + lane]
        scale4, low4 = packed[LANES * (c + 4) + lane], packed[_LOWS + LANES * (c + 4) + lane]
        out[4 + c] = scale | (scale4 >> 4) << 6
        out[8 + c] = low | (low4 >> 4) << 6
        out[12 + c] = (scale4 & 15) | (low4 & 15) << 4


@kernel
def _pack_codes(codes, lane, nmax, out):
    """q4_K: nibbles after the head; q5_K: the fifth bits, then the nibbles."""
    nibbles = 16
    if nmax == 31:
        nibbles = 48
        for j in range(32):
            byte = 0
            for c in range(8):
                byte |= (codes[LANES * (32 * c + j) + lane] >> 4) << c
            out[16 + j] = byte
    for g in range(4):
        for j in range(32):
            at = 64 * g + j
            out[nibbles + 32 * g + j] = (codes[LANES * at + lane] & 15) | (codes[LANES * (at + 32) + lane] & 15) << 4


@kernel
def _decode_q2_K(q, out):
    """q: uint8 [bytes]; out: float32 [elements]."""
    scales, lows = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    for s in range(out.size // SUPER):
        at = 84 * s
        codes = load_bytes(q, at)
        store(scales, 0, u8_to_float(codes & 15) * load_f16(q, at + 80))
        store(lows, 0, u8_to_float(codes >> 4) * load_f16(q, at + 82))
        for h in range(2):
            for b in range(2):
                pairs = load_bytes(q, at + 16 + 32 * h + 16 * b)
                for k in range(4):
                    c = 8 * h + 2 * k + b
                    store(out, SUPER * s + LANES * c, u8_to_float(pairs & 3) * scales[c] - lows[c])
                    pairs = pairs >> 2


@kernel
def _decode_packed(q, nmax, out):
    """q4_K (nmax 15) and q5_K (31)."""
    head, size = (16, 144) if nmax == 15 else (48, 176)
    scales, lows = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    for s in range(out.size // SUPER):
        at = size * s
        # Six bits each: of the first four scales and minima in a and b; the others' low bits in c, high bits on top of a and b.
        a, b, c = load_u32(q, at + 4), load_u32(q, at + 8), load_u32(q, at + 12)
        first = (a & 0x3F3F3F3F) | ((c & 0x0F0F0F0F) | (a >> 2 & 0x30303030)) << 32
        second = (b & 0x3F3F3F3F) | ((c >> 4 & 0x0F0F0F0F) | (b >> 2 & 0x30303030)) << 32
        codes = u8_to_float(bytes_from_words(first, second))
        store(scales, 0, codes * load_f16(q, at))
        store(lows, 0, codes * load_f16(q, at + 2))
        for h in range(2):
            bits = load_bytes(q, at + 16 + 16 * h)
            for k in range(4):
                nibbles, to = load_bytes(q, at + head + 32 * k + 16 * h), SUPER * s + 64 * k + 16 * h
                low, high = nibbles & 15, nibbles >> 4
                if nmax == 31:
                    low, high = low | (bits & 1) << 4, high | (bits & 2) << 3
                    bits = bits >> 2
                store(out, to, u8_to_float(low) * scales[2 * k] - lows[8 + 2 * k])
                store(out, to + 32, u8_to_float(high) * scales[2 * k + 1] - lows[9 + 2 * k])


def _codec(name: str, decode) -> Codec:
    size = TYPES[name].block_bytes

    def encode(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
        rows, n = x.shape
        out = np.empty((rows, TYPES[name].row_bytes(n)), np.uint8)
        _encode(x, importance_rows(importance), _SEARCHES[name], out.reshape(-1, size))
        return out

    return Codec(encode, decode)


CODECS: dict[str, Codec] = {
    "q2_k": _codec("q2_K", kernel_decoder(_decode_q2_K)),
    "q4_k": _codec("q4_K", kernel_decoder(_decode_packed, 15)),
    "q5_k": _codec("q5_K", kernel_decoder(_decode_packed, 31)),
}
