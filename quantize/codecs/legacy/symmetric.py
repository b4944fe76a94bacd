"""Blocks of 32 with one float16 scale: q8_0, q6_0, q5_0, q4_0 (spec B, C.0, D.1)."""

from __future__ import annotations

import numpy as np

from ....formats import TYPES
from ....simd.byte_lanes import (
    bytes_from_words,
    i8_to_float,
    load_bytes,
    load_f16,
    load_u32,
    load_u64,
    u8_to_float,
    unpack_1bit,
)
from ....simd.compile import kernel
from ....simd.lanes import LANES, load, max_lanes, reduce_max, select, splat, store, store_half
from ..block_lanes import importance_weights, row_mean_squares, square_weights, transpose_blocks, transpose_importance
from ..importance import importance_rows
from ..registry import Codec, kernel_decoder
from ..scale_search import symmetric_scale
from .rounded import encode_rounded

BLOCK = 32


@kernel
def _encode_searched(x, importance, mean_squares, nmax, out):
    """q4_0 (nmax 8), q5_0 (16) or q6_0 (32). mean_squares: of each row, float32 [rows]; out: uint8 [blocks, bytes]."""
    n = x.shape[1]
    size = LANES * BLOCK
    X, W, V = np.empty(size, np.float32), np.empty(size, np.float32), np.empty(size, np.float32)
    codes, bytes_ = np.empty(size, np.float32), np.empty(size, np.uint8)
    sigma2, halves = np.empty(LANES, np.float32), np.empty(LANES, np.uint16)
    for first in range(0, out.shape[0], LANES):
        count = min(LANES, out.shape[0] - first)
        transpose_blocks(x, first, BLOCK, X)
        if importance.shape[0] == 0:
            square_weights(X, 0, BLOCK, W)
        else:
            transpose_importance(importance, x, first, BLOCK, V)
            for lane in range(count):
                sigma2[lane] = mean_squares[(first + lane) * BLOCK // n]
            importance_weights(X, V, 0, BLOCK, load(sigma2, 0), W)
        store_half(halves, 0, symmetric_scale(X, W, 0, BLOCK, nmax, codes))
        for i in range(0, size, LANES):
            store(bytes_, i, load(codes, i) + nmax)
        for lane in range(count):
            _pack(halves[lane], bytes_, lane, nmax, out[first + lane])


@kernel
def _pack(half, codes, lane, nmax, out):
    out[0], out[1] = half & 255, half >> 8
    nibbles = out.size - 16
    for j in range(16):
        a, b = codes[LANES * j + lane], codes[LANES * (j + 16) + lane]
        out[nibbles + j] = (a & 15) | (b & 15) << 4
    if nmax == 16:
        for k in range(4):
            byte = 0
            for bit in range(8):
                byte |= (codes[LANES * (8 * k + bit) + lane] >> 4) << bit
            out[2 + k] = byte
    elif nmax == 32:
        for k in range(8):
            byte = 0
            for pair in range(4):
                element = k + 16 * (pair % 2) + 8 * (pair // 2)
                byte |= (codes[LANES * element + lane] >> 4) << (2 * pair)
            out[2 + k] = byte


@kernel
def _decode_searched(q, nmax, out):
    """q: uint8 [bytes]; out: float32 [elements]."""
    size = 18 if nmax == 8 else 22 if nmax == 16 else 26
    for b in range(out.size // BLOCK):
        at, to = size * b, BLOCK * b
        d, nibbles = load_f16(q, at), load_bytes(q, at + size - 16)
        first, second = nibbles & 15, nibbles >> 4
        if nmax == 16:
            bits = load_u32(q, at + 2)
            first, second = first | unpack_1bit(bits) << 4, second | unpack_1bit(bits >> 16) << 4
        elif nmax == 32:  # pairs of elements 0 to 7, of 16 to 23, of 8 to 15, of 24 to 31 in each byte
            pairs = load_u64(q, at + 2)
            pairs = bytes_from_words(pairs, pairs >> 4)
            first, second = first | (pairs & 3) << 4, second | (pairs & 12) << 2
        store(out, to, (u8_to_float(first) - nmax) * d)
        store(out, to + LANES, (u8_to_float(second) - nmax) * d)


@kernel
def _encode_q8_0(x, out):
    """x: float32 [elements]; out: uint8 [bytes]. Here the lanes are elements of one block; only scales are those of sixteen."""
    tops, inverses, halves = np.zeros(LANES, np.float32), np.empty(LANES, np.float32), np.empty(LANES, np.uint16)
    blocks = x.size // BLOCK
    for first in range(0, blocks, LANES):
        count = min(LANES, blocks - first)
        for lane in range(count):
            start = (first + lane) * BLOCK
            tops[lane] = reduce_max(max_lanes(abs(load(x, start)), abs(load(x, start + LANES))))
        scale = load(tops, 0) / 127
        live = scale > np.float32(3e-39)  # the inverse of less is infinite
        store(inverses, 0, select(live, 1 / scale, splat(0)))
        store_half(halves, 0, scale)
        for lane in range(count):
            start, to = (first + lane) * BLOCK, (first + lane) * (BLOCK + 2)
            out[to], out[to + 1] = halves[lane] & 255, halves[lane] >> 8
            store(out, to + 2, _half_away(load(x, start) * inverses[lane]))
            store(out, to + 2 + LANES, _half_away(load(x, start + LANES) * inverses[lane]))


@kernel
def _half_away(y):
    """What, cut to a whole number, is y rounded, halves away from zero. The constant is the largest float32 below a half."""
    return y + select(y < 0, splat(-0.49999997), splat(0.49999997))


@kernel
def _decode_q8_0(q, out):
    for b in range(out.size // BLOCK):
        at, to = (BLOCK + 2) * b, BLOCK * b
        d = load_f16(q, at)
        store(out, to, i8_to_float(load_bytes(q, at + 2)) * d)
        store(out, to + LANES, i8_to_float(load_bytes(q, at + 2 + LANES)) * d)


def _blocks(q: np.ndarray, type_name: str) -> np.ndarray:
    return q.reshape(-1, TYPES[type_name].block_bytes)


def encode_q8_0(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    """float32 [rows, n], n a multiple of 32 -> uint8 [rows, n / 32 * 34] (spec D.1), without regard to importance."""
    rows, n = x.shape
    out = np.empty((rows, TYPES["q8_0"].row_bytes(n)), np.uint8)
    _encode_q8_0(x.reshape(-1), out.reshape(-1))
    return out


def _searched(name: str, nmax: int) -> Codec:
    """A type of codes 0 ... 2 nmax - 1, offset by nmax."""

    def encode(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
        rows, n = x.shape
        out = np.empty((rows, TYPES[name].row_bytes(n)), np.uint8)
        if importance is None and nmax < 32:
            encode_rounded(x.reshape(-1), 2 * nmax - 1, False, out.reshape(-1))
            return out
        mean_squares = np.empty(rows, np.float32)
        if importance is not None:
            row_mean_squares(x, mean_squares)
        _encode_searched(x, importance_rows(importance), mean_squares, nmax, _blocks(out, name))
        return out

    return Codec(encode, kernel_decoder(_decode_searched, nmax))


CODECS: dict[str, Codec] = {
    "q8_0": Codec(encode_q8_0, kernel_decoder(_decode_q8_0)),
    "q6_0": _searched("q6_0", 32),
    "q5_0": _searched("q5_0", 16),
    "q4_0": _searched("q4_0", 8),
}
