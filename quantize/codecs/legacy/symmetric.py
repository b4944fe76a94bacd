"""q8_0, q6_0, q5_0, q4_0: blocks of 32 with one float16 scale (docs/formats/layouts.md; encoders.md, legacy types)."""

from __future__ import annotations

import numpy as np

from ....formats import TYPES
from ....simd.compile import kernel
from ....simd.lanes import LANES, load, max_lanes, reduce_max, select, splat, store, store_half
from ..block_lanes import importance_weights, row_mean_squares, square_weights, transpose_blocks, transpose_importance
from ..codec import Codec, ItemEncoder
from ..importance import importance_rows
from ..lane_packing import BLOCK_ITEMS, lane_memory, put_lanes, put_words, take_blocks
from ..row_decoder import row_decoder
from ..scale_search import symmetric_scale
from .round_to_nearest import round_to_nearest

BLOCK = 32


@kernel(items=BLOCK_ITEMS)
def _encode_searched(x, importance, mean_squares, nmax, parts, lane_bytes, out):
    """q4_0 (nmax 8), q5_0 (16) or q6_0 (32) with a scale search: x float32 [rows, n] -> out uint8 [blocks, bytes].

    mean_squares: float32 [rows], mean of x^2 of each row, used with importance.
    """
    n = x.shape[1]
    size = LANES * BLOCK
    x_lanes, w_lanes, qw_lanes = np.empty(size, np.float32), np.empty(size, np.float32), np.empty(size, np.float32)
    code_lanes, stored_codes = np.empty(size, np.float32), np.empty(size, np.uint8)
    sigma2, half_words = np.empty(LANES, np.float32), np.empty(LANES, np.uint16)
    for first in range(0, out.shape[0], LANES):
        count = min(LANES, out.shape[0] - first)
        transpose_blocks(x, first, BLOCK, x_lanes)
        if importance.shape[0] == 0:
            square_weights(x_lanes, 0, BLOCK, w_lanes)
        else:
            transpose_importance(importance, x, first, BLOCK, qw_lanes)
            for lane in range(count):
                sigma2[lane] = mean_squares[(first + lane) * BLOCK // n]
            importance_weights(x_lanes, qw_lanes, 0, BLOCK, load(sigma2, 0), w_lanes)
        store_half(half_words, 0, symmetric_scale(x_lanes, w_lanes, 0, BLOCK, nmax, code_lanes))
        for i in range(0, size, LANES):
            store(stored_codes, i, load(code_lanes, i) + nmax)
        put_lanes(stored_codes, 0, parts[0], lane_bytes)
        put_words(half_words, 0, parts[1], lane_bytes)
        take_blocks(lane_bytes, first, out)


@kernel
def encode_q8_0_blocks(x, out):
    """x float32 [elements] -> out uint8 [bytes]. Lanes are elements of one block, except for the scales: sixteen blocks."""
    amax, inverses, half_words = np.zeros(LANES, np.float32), np.empty(LANES, np.float32), np.empty(LANES, np.uint16)
    blocks = x.size // BLOCK
    for first in range(0, blocks, LANES):
        count = min(LANES, blocks - first)
        for lane in range(count):
            start = (first + lane) * BLOCK
            amax[lane] = reduce_max(max_lanes(abs(load(x, start)), abs(load(x, start + LANES))))
        scale = load(amax, 0) / 127
        nonzero = scale > np.float32(3e-39)  # the inverse of a smaller scale is infinite
        store(inverses, 0, select(nonzero, 1 / scale, splat(0)))
        store_half(half_words, 0, scale)
        for lane in range(count):
            start, out_at = (first + lane) * BLOCK, (first + lane) * (BLOCK + 2)
            out[out_at], out[out_at + 1] = half_words[lane] & 255, half_words[lane] >> 8
            store(out, out_at + 2, _round_half_away(load(x, start) * inverses[lane]))
            store(out, out_at + 2 + LANES, _round_half_away(load(x, start + LANES) * inverses[lane]))


@kernel
def _round_half_away(y):
    """The value that, truncated, is y rounded with ties away from zero. The constant is the largest float32 below 0.5."""
    return y + select(y < 0, splat(-0.49999997), splat(0.49999997))


def encode_q8_0(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    """q8_0: float32 [rows, n], n a multiple of 32 -> uint8 [rows, n / 32 * 34]; importance is not used."""
    rows, n = x.shape
    out = np.empty((rows, TYPES["q8_0"].row_bytes(n)), np.uint8)
    encode_q8_0_blocks(x.reshape(-1), out.reshape(-1))
    return out


def _searched_codec(name: str, nmax: int) -> Codec:
    """The codec of a type with stored codes 0 ... 2 * nmax - 1 that stand for -nmax ... nmax - 1."""

    rounds = nmax < 32  # where there is no importance

    def encode(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
        rows, n = x.shape
        out = np.empty((rows, TYPES[name].row_bytes(n)), np.uint8)
        if importance is None and rounds:
            round_to_nearest(x.reshape(-1), 2 * nmax - 1, False, out.reshape(-1))
            return out
        mean_squares = np.empty(rows, np.float32)
        if importance is not None:
            row_mean_squares(x, mean_squares)
        working, blocks = lane_memory(name, "codes", "d"), out.reshape(-1, TYPES[name].block_bytes)
        _encode_searched(x, importance_rows(importance), mean_squares, nmax, *working, blocks)
        return out

    return Codec(encode, row_decoder(name), rounds_without_importance=rounds, items=ItemEncoder(encode))


CODECS: dict[str, Codec] = {
    "q8_0": Codec(encode_q8_0, row_decoder("q8_0"), rounds=True),
    "q6_0": _searched_codec("q6_0", 32),
    "q5_0": _searched_codec("q5_0", 16),
    "q4_0": _searched_codec("q4_0", 8),
}
