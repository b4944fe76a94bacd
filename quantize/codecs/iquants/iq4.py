"""iq4_nl and iq4_xs: codes of a non-uniform table of 16 values.

iq4_nl has blocks of 32 with a float16 scale; iq4_xs superblocks of 256 with a float16 scale and a six-bit scale for each 32
elements. See docs/formats/layouts.md, and encoders.md (codebook i-quants).
"""

from __future__ import annotations

import numpy as np

from ....formats.layouts.tables import IQ4_VALUES
from ....simd.compile import kernel
from ....simd.lanes import LANES, any_lane, clamp, fma_lanes, load, round_product_lanes, select, splat, store, store_half
from ....simd.table_lookup import lookup_lanes
from ..block_lanes import importance_weights, square_weights, sum_of_squares, transpose_blocks, transpose_importance
from ..codec import Codec
from ..lane_packing import BLOCK_ITEMS, lane_codec, put_lanes, put_words, take_blocks
from ..scale_search import add_to_codes, largest_magnitude

BLOCK, SUPERBLOCK = 32, 256
TABLE_SIZE = 16
VALUES = IQ4_VALUES.astype(np.float32)
_LOWEST, _HIGHEST = VALUES[0], VALUES[-1]

# The interval from -128 to 128 is cut into 32 bins of width 8, none of which holds more than one midpoint between table values
# (these are at least 11 apart). For each bin: its midpoint, and the code and value below it and the value above it.
_BINS, _BIN_WIDTH = 32, 8


def _bins() -> tuple[np.ndarray, np.ndarray]:
    midpoints = (VALUES[1:] + VALUES[:-1]) / 2
    edges = np.arange(_BINS) * _BIN_WIDTH - 128
    below = np.searchsorted(midpoints, edges, side="left")
    return np.append(midpoints, np.inf)[below].astype(np.float32), below.astype(np.float32)


_MIDPOINT, _CODE_BELOW = _bins()
_VALUE_BELOW = VALUES[_CODE_BELOW.astype(int)]
_VALUE_ABOVE = VALUES[np.minimum(_CODE_BELOW.astype(int) + 1, TABLE_SIZE - 1)]
_PADDED_VALUES = np.concatenate([VALUES, np.full(_BINS - TABLE_SIZE, VALUES[-1])])  # lookup_lanes takes tables of 32 entries


@kernel
def _bin_of(y):
    return clamp((y + 128) * (1 / _BIN_WIDTH), 0, _BINS - 1)


@kernel
def _nearest_value(y):
    """The table value nearest to y, the larger one on ties."""
    bin_ = _bin_of(y)
    return select(y >= lookup_lanes(_MIDPOINT, bin_), lookup_lanes(_VALUE_ABOVE, bin_), lookup_lanes(_VALUE_BELOW, bin_))


@kernel
def _nearest_code(y):
    """The code of the table value nearest to y, the larger one on ties."""
    bin_ = _bin_of(y)
    below = lookup_lanes(_CODE_BELOW, bin_)
    return select(y >= lookup_lanes(_MIDPOINT, bin_), below + 1, below)


@kernel
def _table_scale(x, w, at, codes):
    """Scales of sixteen blocks at x[at], w[at]: candidates from both ends of the table, then coordinate ascent.

    codes: scratch for one block of each lane.
    """
    signed_max, amax = largest_magnitude(x, at, BLOCK)
    all_zero = amax < 1e-15
    signed_max = select(all_zero, splat(1), signed_max)
    inverse = -_LOWEST / signed_max
    scale, best = splat(0), splat(0)
    sxq, sqq = splat(0), splat(0)
    for k in range(31):
        trial_inverse = inverse
        if k > 0:
            trial_inverse = ((k - 1) // 2 - 7 + (_LOWEST if k % 2 else _HIGHEST)) / signed_max
        new_sxq, new_sqq = splat(0), splat(0)
        for i in range(at, at + LANES * BLOCK, LANES):
            xi, wi = load(x, i), load(w, i)
            q = _nearest_value(trial_inverse * xi)
            wq = wi * q
            new_sxq = fma_lanes(wq, xi, new_sxq)
            new_sqq = fma_lanes(wq, q, new_sqq)
        better = (new_sqq > 0) & (new_sxq * new_sxq > best * new_sqq)
        scale = select(better, new_sxq / new_sqq, scale)
        best = select(better, scale * new_sxq, best)
        inverse = select(better, trial_inverse, inverse)
        sxq, sqq = select(better, new_sxq, sxq), select(better, new_sqq, sqq)
    for i in range(0, LANES * BLOCK, LANES):
        store(codes, i, _nearest_code(inverse * load(x, at + i)))
    # Where the sums of weights underflow or overflow, the scale is that which fits the largest element.
    degenerate = ~all_zero & ~((abs(scale) > 0) & (abs(scale) < np.float32(3e38)))
    scale = _coordinate_ascent(x, w, at, codes, select(all_zero | degenerate, splat(0), scale), sxq, sqq, best)
    return select(degenerate, signed_max / _LOWEST, scale)


@kernel
def _coordinate_ascent(x, w, at, codes, scale, sxq, sqq, best):
    """Moves one code at a time to the neighbouring table value, as long as the score improves. Returns the scale.

    The code moved is that whose neighbouring value is nearest in steps of its gradient.
    """
    active = abs(scale) > 0
    for _ in range(BLOCK * TABLE_SIZE):
        least_step, best_index, move = splat(np.inf), splat(-1), splat(0)
        w_best, x_best, value_best, neighbour_best = splat(0), splat(0), splat(0), splat(0)
        for i in range(BLOCK):
            xi, wi, q = load(x, at + LANES * i), load(w, at + LANES * i), load(codes, LANES * i)
            value = lookup_lanes(_PADDED_VALUES, q)
            slope = scale * wi * fma_lanes(-scale, value, xi)
            up, down = (slope > 0) & (q < TABLE_SIZE - 1), (slope < 0) & (q > 0)
            step = select(up, splat(1), splat(-1))
            neighbour = lookup_lanes(_PADDED_VALUES, clamp(q + step, 0, TABLE_SIZE - 1))
            step_size = (neighbour - value) / slope
            smaller = (up | down) & (step_size < least_step)
            least_step, best_index = select(smaller, step_size, least_step), select(smaller, splat(i), best_index)
            move = select(smaller, step, move)
            w_best, x_best = select(smaller, wi, w_best), select(smaller, xi, x_best)
            value_best, neighbour_best = select(smaller, value, value_best), select(smaller, neighbour, neighbour_best)
        new_sxq = fma_lanes(w_best * x_best, neighbour_best - value_best, sxq)
        new_sqq = fma_lanes(w_best, neighbour_best * neighbour_best - value_best * value_best, sqq)
        active = active & (best_index >= 0) & (new_sqq > 0) & (new_sxq * new_sxq > best * new_sqq)
        if not any_lane(active):
            break
        add_to_codes(codes, 0, BLOCK, active, best_index, move)
        sxq, sqq = select(active, new_sxq, sxq), select(active, new_sqq, sqq)
        scale = select(active, sxq / sqq, scale)
        best = select(active, scale * sxq, best)
    return scale


@kernel
def _assign_codes(x, at, scale, codes):
    """The codes of a block at a scale that is not yet rounded to float16, as in llama.cpp."""
    nonzero = abs(scale) > np.float32(3e-39)
    inverse = select(nonzero, 1 / select(nonzero, scale, splat(1)), splat(0))
    for i in range(at, at + LANES * BLOCK, LANES):
        store(codes, i, _nearest_code(inverse * load(x, i)))


@kernel(items=BLOCK_ITEMS)
def _encode_iq4_nl(x, importance, parts, lane_bytes, out):
    """x float32 [rows, n] -> out uint8 [blocks, 18]."""
    size = LANES * BLOCK
    x_lanes, w_lanes, code_lanes = np.empty(size, np.float32), np.empty(size, np.float32), np.empty(size, np.float32)
    codes, half_words = np.empty(size, np.uint8), np.empty(LANES, np.uint16)
    for first in range(0, out.shape[0], LANES):
        transpose_blocks(x, first, BLOCK, x_lanes)
        if importance.shape[0] == 0:
            square_weights(x_lanes, 0, BLOCK, w_lanes)
        else:
            transpose_importance(importance, x, first, BLOCK, w_lanes)
            importance_weights(x_lanes, w_lanes, 0, BLOCK, 2 * sum_of_squares(x_lanes, 0, BLOCK) / BLOCK, w_lanes)
        scale = _table_scale(x_lanes, w_lanes, 0, code_lanes)
        store_half(half_words, 0, scale)
        _assign_codes(x_lanes, 0, scale, codes)
        put_lanes(codes, 0, parts[0], lane_bytes)
        put_words(half_words, 0, parts[1], lane_bytes)
        take_blocks(lane_bytes, first, out)


@kernel(items=BLOCK_ITEMS)
def _encode_iq4_xs(x, importance, parts, lane_bytes, out):
    """x float32 [rows, n] -> out uint8 [superblocks, 136]."""
    size = LANES * SUPERBLOCK
    x_lanes, w_lanes, code_lanes = np.empty(size, np.float32), np.empty(size, np.float32), np.empty(LANES * BLOCK, np.float32)
    scales, scale_codes = np.empty(LANES * 8, np.float32), np.empty(LANES * 8, np.uint8)
    codes, half_words = np.empty(size, np.uint8), np.empty(LANES, np.uint16)
    for first in range(0, out.shape[0], LANES):
        transpose_blocks(x, first, SUPERBLOCK, x_lanes)
        if importance.shape[0] == 0:
            square_weights(x_lanes, 0, SUPERBLOCK, w_lanes)
        else:
            transpose_importance(importance, x, first, SUPERBLOCK, w_lanes)
            importance_weights(
                x_lanes, w_lanes, 0, SUPERBLOCK, 2 * sum_of_squares(x_lanes, 0, SUPERBLOCK) / SUPERBLOCK, w_lanes
            )
        for c in range(8):
            store(scales, LANES * c, _table_scale(x_lanes, w_lanes, LANES * BLOCK * c, code_lanes))
        signed_max, _ = largest_magnitude(scales, 0, 8)
        d = -signed_max / 32
        store_half(half_words, 0, d)
        nonzero = abs(d) > np.float32(3e-39)
        inverse = select(nonzero, 1 / select(nonzero, d, splat(1)), splat(0))
        for c in range(8):
            scale_code = clamp(round_product_lanes(inverse, load(scales, LANES * c)), -32, 31)
            store(scale_codes, LANES * c, scale_code + 32)
            _assign_codes(x_lanes, LANES * BLOCK * c, d * scale_code, codes)
        put_lanes(codes, 0, parts[0], lane_bytes)
        put_words(half_words, 0, parts[1], lane_bytes)
        put_lanes(scale_codes, 0, parts[2], lane_bytes)
        take_blocks(lane_bytes, first, out)


CODECS: dict[str, Codec] = {
    "iq4_nl": lane_codec("iq4_nl", _encode_iq4_nl, ("codes", "d")),
    "iq4_xs": lane_codec("iq4_xs", _encode_iq4_xs, ("codes", "d", "scales")),
}
