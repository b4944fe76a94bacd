"""q4_1 and q5_1: blocks of 32 with a float16 scale and minimum (docs/formats/layouts.md; encoders.md, legacy types)."""

from __future__ import annotations

import numpy as np

from ....formats import TYPES
from ....simd.compile import kernel
from ....simd.lanes import LANES, load, store, store_half
from ..block_lanes import importance_weights, row_mean_squares, transpose_blocks, transpose_importance
from ..codec import Codec
from ..importance import importance_rows
from ..lane_packing import BLOCK_ITEMS, lane_memory, put_lanes, put_words, take_blocks
from ..minimum_search import scale_and_min_f64, scales_and_mins_f64
from .round_to_nearest import rounding_codec

BLOCK = 32
_TILE = LANES * BLOCK
_TILES = 1 if LANES == 1 else 2  # side by side: a fit waits for the last one (a GPU has other blocks for that)
_TRIALS = -0.9, 0.05, 36  # first, step and steps of the search


@kernel(items=BLOCK_ITEMS)
def _encode(x, importance, mean_squares, nmax, parts, lane_bytes, out):
    """q4_1 (nmax 15) or q5_1 (31) with importance: x float32 [rows, n] -> out uint8 [blocks, bytes].

    mean_squares: float32 [rows], mean of x^2 of each row.
    """
    n = x.shape[1]
    size = _TILES * _TILE
    x_lanes, w_lanes, code_lanes = np.empty(size, np.float32), np.empty(size, np.float32), np.empty(size, np.float32)
    w64, wx64, sigma2 = np.empty(size, np.float64), np.empty(size, np.float64), np.zeros(LANES, np.float32)
    codes, half_words = np.empty(size, np.uint8), np.empty(2 * _TILES * LANES, np.uint16)
    for first in range(0, out.shape[0], _TILES * LANES):
        for t in range(_TILES):
            start, at = first + LANES * t, _TILE * t
            transpose_blocks(x, start, BLOCK, x_lanes[at : at + _TILE])
            transpose_importance(importance, x, start, BLOCK, w_lanes[at : at + _TILE])
            for lane in range(min(LANES, out.shape[0] - start)):
                sigma2[lane] = mean_squares[(start + lane) * BLOCK // n]
            importance_weights(x_lanes, w_lanes, at, BLOCK, load(sigma2, 0), w_lanes)
        if _TILES == 1:
            scale, neg_min = scale_and_min_f64(x_lanes, w_lanes, 0, BLOCK, nmax, *_TRIALS, w64, wx64, code_lanes)
        else:
            scale, neg_min, scale2, neg_min2 = scales_and_mins_f64(
                x_lanes, w_lanes, 0, BLOCK, nmax, *_TRIALS, w64, wx64, code_lanes
            )
            store_half(half_words, 2 * LANES, scale2)
            store_half(half_words, 3 * LANES, -neg_min2)
        store_half(half_words, 0, scale)
        store_half(half_words, LANES, -neg_min)
        for i in range(0, size, LANES):
            store(codes, i, load(code_lanes, i))
        for t in range(_TILES):
            put_lanes(codes, BLOCK * t, parts[0], lane_bytes)
            put_words(half_words, 2 * t, parts[1], lane_bytes)
            put_words(half_words, 2 * t + 1, parts[2], lane_bytes)
            take_blocks(lane_bytes, first + LANES * t, out)


def _codec(name: str, nmax: int) -> Codec:
    tensor_type = TYPES[name]

    def search(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
        rows, n = x.shape
        out = np.empty((rows, tensor_type.row_bytes(n)), np.uint8)
        mean_squares = np.empty(rows, np.float32)
        row_mean_squares(x, mean_squares)
        working, blocks = lane_memory(name, "codes", "d", "offset"), out.reshape(-1, tensor_type.block_bytes)
        _encode(x, importance_rows(importance), mean_squares, nmax, *working, blocks)
        return out

    return rounding_codec(name, nmax, True, search)


CODECS: dict[str, Codec] = {"q4_1": _codec("q4_1", 15), "q5_1": _codec("q5_1", 31)}
