"""Blocks of 32 with a float16 scale and a float16 minimum: q4_1, q5_1 (spec C.0, D.1)."""

from __future__ import annotations

import numpy as np

from ....formats import TYPES
from ....simd.byte_lanes import load_bytes, load_f16, load_u32, u8_to_float, unpack_1bit
from ....simd.compile import kernel
from ....simd.lanes import LANES, load, store, store_half
from ..block_lanes import importance_weights, row_mean_squares, transpose_blocks, transpose_importance
from ..importance import importance_rows
from ..registry import Codec, kernel_decoder
from ..scale_search import scale_and_min_f64
from .rounded import encode_rounded

BLOCK = 32


@kernel
def _encode(x, importance, mean_squares, nmax, out):
    """q4_1 (nmax 15) or q5_1 (31). mean_squares: of each row, float32 [rows]; out: uint8 [blocks, bytes]."""
    n = x.shape[1]
    size = LANES * BLOCK
    X, W, C = np.empty(size, np.float32), np.empty(size, np.float32), np.empty(size, np.float32)
    w64, wx64, sigma2 = np.empty(size, np.float64), np.empty(size, np.float64), np.empty(LANES, np.float32)
    codes, halves = np.empty(size, np.uint8), np.empty(2 * LANES, np.uint16)
    for first in range(0, out.shape[0], LANES):
        count = min(LANES, out.shape[0] - first)
        transpose_blocks(x, first, BLOCK, X)
        transpose_importance(importance, x, first, BLOCK, W)
        for lane in range(count):
            sigma2[lane] = mean_squares[(first + lane) * BLOCK // n]
        importance_weights(X, W, 0, BLOCK, load(sigma2, 0), W)
        scale, low = scale_and_min_f64(X, W, 0, BLOCK, nmax, -0.9, 0.05, 36, w64, wx64, C)
        for i in range(0, size, LANES):
            store(codes, i, load(C, i))
        store_half(halves, 0, scale)
        store_half(halves, LANES, -low)
        for lane in range(count):
            _pack(halves, codes, lane, nmax, out[first + lane])


@kernel
def _pack(halves, codes, lane, nmax, out):
    for k in range(2):
        out[2 * k], out[2 * k + 1] = halves[LANES * k + lane] & 255, halves[LANES * k + lane] >> 8
    nibbles = out.size - 16
    for j in range(16):
        out[nibbles + j] = (codes[LANES * j + lane] & 15) | (codes[LANES * (j + 16) + lane] & 15) << 4
    if nmax == 31:
        for k in range(4):
            byte = 0
            for bit in range(8):
                byte |= (codes[LANES * (8 * k + bit) + lane] >> 4) << bit
            out[4 + k] = byte


@kernel
def _decode(q, nmax, out):
    """q: uint8 [bytes]; out: float32 [elements]."""
    size = 20 if nmax == 15 else 24
    for b in range(out.size // BLOCK):
        at, to = size * b, BLOCK * b
        d, low, nibbles = load_f16(q, at), load_f16(q, at + 2), load_bytes(q, at + size - 16)
        first, second = nibbles & 15, nibbles >> 4
        if nmax == 31:
            bits = load_u32(q, at + 4)
            first, second = first | unpack_1bit(bits) << 4, second | unpack_1bit(bits >> 16) << 4
        store(out, to, u8_to_float(first) * d + low)
        store(out, to + LANES, u8_to_float(second) * d + low)


def _codec(name: str, nmax: int) -> Codec:
    kind = TYPES[name]

    def encode(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
        rows, n = x.shape
        out = np.empty((rows, kind.row_bytes(n)), np.uint8)
        if importance is None:
            encode_rounded(x.reshape(-1), nmax, True, out.reshape(-1))
            return out
        mean_squares = np.empty(rows, np.float32)
        row_mean_squares(x, mean_squares)
        _encode(x, importance_rows(importance), mean_squares, nmax, out.reshape(-1, kind.block_bytes))
        return out

    return Codec(encode, kernel_decoder(_decode, nmax))


CODECS: dict[str, Codec] = {"q4_1": _codec("q4_1", 15), "q5_1": _codec("q5_1", 31)}
