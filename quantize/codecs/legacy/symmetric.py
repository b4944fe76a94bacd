"""q8_0, q6_0, q5_0, q4_0: blocks of 32 with one float16 scale (docs/formats/layouts.md; encoders.md, legacy types)."""

from __future__ import annotations

from functools import partial

import numpy as np

from ....formats import TYPES
from ....simd.block_reductions import block_magnitude, max_magnitude, reduce_max_magnitude
from ....simd.byte_lanes import store_truncated
from ....simd.compile import kernel
from ....simd.lanes import LANES, copy_sign, load, select, splat, store, store_half
from ....simd.memory import prefetch_elements
from ..block_lanes import importance_weights, row_mean_squares, square_weights, transpose_blocks, transpose_importance
from ..codec import Codec, Encoded, ItemEncoder, codec_with_amax
from ..float_range import NO_ROWS, with_row
from ..importance import importance_rows
from ..lane_packing import BLOCK_ITEMS, lane_memory, put_lanes, put_words, take_blocks
from ..row_decoder import row_decoder
from ..scale_search import symmetric_scale
from .round_to_nearest import rounding_codec

BLOCK = 32
_BLOCKS = 4 * LANES  # of q8_0, whose scales are found together, before their codes
_PAIR, _Q8_BYTES = 2 * BLOCK, TYPES["q8_0"].block_bytes
_Q8_FLOATS = _BLOCKS + BLOCK * LANES  # of working memory: inverse scales, a copy of less than sixteen blocks


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
def encode_q8_0_row(row, out):
    """row float32 [elements] -> out uint8 [bytes]."""
    _encode_q8_0_row(row, np.zeros(_Q8_FLOATS, np.float32), np.empty(_BLOCKS, np.uint16), out)


@kernel
def _encode_q8_0_rows(x, out):
    """x float32 [rows, n] -> out uint8 [rows, row_bytes]. Returns the least and the largest of the rows' largest magnitudes."""
    floats, half_words, range_ = np.zeros(_Q8_FLOATS, np.float32), np.empty(_BLOCKS, np.uint16), NO_ROWS
    for r in range(x.shape[0]):
        range_ = with_row(range_, _encode_q8_0_row(x[r], floats, half_words, out[r]))
    return range_


@kernel
def _encode_q8_0_row(row, floats, half_words, out):
    """floats, half_words: working memory, zeros at first. Returns the largest magnitude."""
    tile, largest, blocks = floats[_BLOCKS:], splat(0), row.size // BLOCK
    for first in range(0, blocks, _BLOCKS):
        count = min(_BLOCKS, blocks - first)
        for b in range(0, count, LANES):
            begin = (first + b) * BLOCK
            if count - b >= LANES:
                amax = block_magnitude(row, begin)
            else:
                for i in range(0, tile.size, LANES):
                    store(tile, i, load(row, begin + i) if i < (count - b) * BLOCK else splat(0))
                amax = block_magnitude(tile, 0)
            largest = max_magnitude(amax, largest)
            scale = amax / 127
            nonzero = scale > np.float32(3e-39)  # the inverse of a smaller scale is infinite
            store(floats, b, select(nonzero, 1 / scale, splat(0)))
            store_half(half_words, b, scale)
        for b in range(0, count - 1, 2):
            start, out_at = (first + b) * BLOCK, (first + b) * _Q8_BYTES
            there, out_there = start + BLOCK, out_at + _Q8_BYTES
            prefetch_elements(row, start + _BLOCKS * BLOCK, _PAIR)
            out[out_at], out[out_at + 1] = half_words[b] & 255, half_words[b] >> 8
            out[out_there], out[out_there + 1] = half_words[b + 1] & 255, half_words[b + 1] >> 8
            store_truncated(
                out, out_at + 2, out_there + 2,
                _half_away(load(row, start) * floats[b]), _half_away(load(row, start + LANES) * floats[b]),
                _half_away(load(row, there) * floats[b + 1]), _half_away(load(row, there + LANES) * floats[b + 1]),
            )  # fmt: skip
        if count % 2:
            b = count - 1
            start, out_at = (first + b) * BLOCK, (first + b) * _Q8_BYTES
            out[out_at], out[out_at + 1] = half_words[b] & 255, half_words[b] >> 8
            store(out, out_at + 2, _half_away(load(row, start) * floats[b]))
            store(out, out_at + 2 + LANES, _half_away(load(row, start + LANES) * floats[b]))
    return reduce_max_magnitude(largest)


@kernel
def _half_away(y):
    """The value that, truncated, is y rounded with ties away from zero. The constant is the largest float32 below 0.5."""
    return y + copy_sign(splat(0.49999997), y)


def _encode_q8_0(x: np.ndarray, importance: np.ndarray | None) -> Encoded:
    out = np.empty((len(x), TYPES["q8_0"].row_bytes(x.shape[1])), np.uint8)
    return out, None, _encode_q8_0_rows(x, out)


def _encode(name: str, nmax: int, x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    """Encodes with a scale search: a type with stored codes 0 ... 2 * nmax - 1 that stand for -nmax ... nmax - 1."""
    rows, n = x.shape
    out, mean_squares = np.empty((rows, TYPES[name].row_bytes(n)), np.uint8), np.empty(rows, np.float32)
    if importance is not None:
        row_mean_squares(x, mean_squares)
    working, blocks = lane_memory(name, "codes", "d"), out.reshape(-1, TYPES[name].block_bytes)
    _encode_searched(x, importance_rows(importance), mean_squares, nmax, *working, blocks)
    return out


_encode_q6_0 = partial(_encode, "q6_0", 32)

CODECS: dict[str, Codec] = {
    "q8_0": codec_with_amax(_encode_q8_0, row_decoder("q8_0"), rounds=True),
    "q6_0": Codec(_encode_q6_0, row_decoder("q6_0"), items=ItemEncoder(_encode_q6_0)),
    "q5_0": rounding_codec("q5_0", 31, False, partial(_encode, "q5_0", 16)),
    "q4_0": rounding_codec("q4_0", 15, False, partial(_encode, "q4_0", 8)),
}
