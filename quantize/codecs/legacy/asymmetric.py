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
from ..minimum_search import scale_and_min_f64
from .round_to_nearest import rounding_codec

BLOCK = 32


@kernel(items=BLOCK_ITEMS)
def _encode(x, importance, mean_squares, nmax, parts, lane_bytes, out):
    """q4_1 (nmax 15) or q5_1 (31) with importance: x float32 [rows, n] -> out uint8 [blocks, bytes].

    mean_squares: float32 [rows], mean of x^2 of each row.
    """
    n = x.shape[1]
    size = LANES * BLOCK
    x_lanes, w_lanes, code_lanes = np.empty(size, np.float32), np.empty(size, np.float32), np.empty(size, np.float32)
    w64, wx64, sigma2 = np.empty(size, np.float64), np.empty(size, np.float64), np.empty(LANES, np.float32)
    codes, half_words = np.empty(size, np.uint8), np.empty(2 * LANES, np.uint16)
    for first in range(0, out.shape[0], LANES):
        count = min(LANES, out.shape[0] - first)
        transpose_blocks(x, first, BLOCK, x_lanes)
        transpose_importance(importance, x, first, BLOCK, w_lanes)
        for lane in range(count):
            sigma2[lane] = mean_squares[(first + lane) * BLOCK // n]
        importance_weights(x_lanes, w_lanes, 0, BLOCK, load(sigma2, 0), w_lanes)
        scale, neg_min = scale_and_min_f64(x_lanes, w_lanes, 0, BLOCK, nmax, -0.9, 0.05, 36, w64, wx64, code_lanes)
        for i in range(0, size, LANES):
            store(codes, i, load(code_lanes, i))
        store_half(half_words, 0, scale)
        store_half(half_words, LANES, -neg_min)
        put_lanes(codes, 0, parts[0], lane_bytes)
        put_words(half_words, 0, parts[1], lane_bytes)
        put_words(half_words, 1, parts[2], lane_bytes)
        take_blocks(lane_bytes, first, out)


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
