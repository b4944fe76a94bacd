"""q2_K, q4_K, q5_K: superblocks of 256 whose blocks have a quantised scale and a quantised minimum.

Searches: docs/formats/encoders.md (k-quants). q4_K and q5_K are encoded as in llama.cpp. q2_K is encoded with a lower error in
two ways: with importance, d and dmin of a superblock are refitted to the codes at the end. And a superblock becomes ternary
where that has the smaller squared error, while llama.cpp, without importance, makes rows ternary that nearly are, by a rule
that depends on how many rows it is given at a time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

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
from ..codec import Codec
from ..lane_packing import BLOCK_ITEMS, lane_codec, put_lanes, put_words, take_blocks
from ..minimum_search import scales_and_mins, scales_and_mins_f64
from ..scale_search import largest_magnitude, unsigned_scale

SUPERBLOCK = 256
_TILE = LANES * SUPERBLOCK
_MIN_CODES = LANES * 16  # start of the minima's codes, after those of at most 16 scales


class MinimumSearch(NamedTuple):
    """The search of one type.

    block           elements per scale
    nmax            largest code
    max_scale_code  largest code of a scale or minimum
    sigma2_factor   of the mean square in the weights, with importance
    first, steps    start scales of scales_and_mins, without importance
    is_q2_K         without importance, weights are |x| and errors absolute; with importance, codes are found with d and dmin
                    before these are rounded to float16, and both are refitted; ternary superblocks
    """

    block: int
    nmax: int
    max_scale_code: int
    sigma2_factor: float
    first: float
    steps: int
    is_q2_K: bool


MINIMUM_SEARCHES = {
    "q2_K": MinimumSearch(16, 3, 15, 0.75, -0.5, 15, True),
    "q4_K": MinimumSearch(32, 15, 63, 2, -1.0, 20, False),
    "q5_K": MinimumSearch(32, 31, 63, 2, -0.5, 15, False),
}


@kernel
def _quantise_scales(scales, blocks, max_code, codes):
    """Scales (or minima) to codes 0 ... max_code by their maximum; writes the codes, returns d (or dmin)."""
    max_scale = splat(0)
    for b in range(blocks):
        v = load(scales, LANES * b)
        max_scale = select(v > max_scale, v, max_scale)
    nonzero = max_scale > 0
    inverse = select(nonzero, max_code / select(nonzero, max_scale, splat(1)), splat(0))
    for b in range(blocks):
        store(codes, LANES * b, clamp(round_product_lanes(inverse, load(scales, LANES * b)), 0, max_code))
    return max_scale / max_code


@kernel
def _error_q2_K(x_lanes, w_lanes, codes, block_codes, d, dmin):
    """Weighted squared error of sixteen q2_K superblocks as decoded with these codes, d and dmin."""
    error = splat(0)
    for b in range(16):
        scale, neg_min = d * load(block_codes, LANES * b), dmin * load(block_codes, _MIN_CODES + LANES * b)
        for i in range(LANES * 16 * b, LANES * 16 * (b + 1), LANES):
            diff = scale * load(codes, i) - neg_min - load(x_lanes, i)
            error = fma_lanes(load(w_lanes, i) * diff, diff, error)
    return error


@kernel
def _prefer_ternary(x_lanes, w_lanes, codes, block_codes, half_words):
    """Replaces superblocks by -amax, 0 and amax where that is closer than the result of the search."""
    _, amax = largest_magnitude(x_lanes, 0, SUPERBLOCK)
    threshold, scale = amax * 0.5, round_to_half(amax)
    error = _error_q2_K(x_lanes, w_lanes, codes, block_codes, load_half(half_words, 0), load_half(half_words, LANES))
    for i in range(0, _TILE, LANES):
        xi = load(x_lanes, i)
        diff = xi - select(xi >= threshold, scale, select(xi <= -threshold, -scale, splat(0)))
        error = fma_lanes(-(load(w_lanes, i) * diff), diff, error)
    better = (error > 0) & (amax > 0)
    if any_lane(better):
        for i in range(0, _TILE, LANES):
            xi = load(x_lanes, i)
            digit = select(xi >= threshold, splat(2), select(xi <= -threshold, splat(0), splat(1)))
            store(codes, i, select(better, digit, load(codes, i)))
        for i in range(0, 2 * _MIN_CODES, LANES):
            store(block_codes, i, select(better, splat(1), load(block_codes, i)))
        for i in range(0, 2 * LANES, LANES):
            store_half(half_words, i, select(better, scale, load_half(half_words, i)))


@kernel
def _refit_q2_K(x_lanes, w_lanes, codes, block_codes, half_words):
    """Refits d and dmin to the codes by weighted least squares, finds the codes again, and takes what is closer."""
    sum_ss, sum_sm, sum_mm, sum_xs, sum_xm = splat(0), splat(0), splat(0), splat(0), splat(0)
    for b in range(16):
        scale_code, min_code = load(block_codes, LANES * b), load(block_codes, _MIN_CODES + LANES * b)
        sum_wq, sum_wqq, sum_w, sum_wxq, sum_wx = splat(0), splat(0), splat(0), splat(0), splat(0)
        for i in range(LANES * 16 * b, LANES * 16 * (b + 1), LANES):
            q, xi, wi = load(codes, i), load(x_lanes, i), load(w_lanes, i)
            wq = wi * q
            sum_w, sum_wq, sum_wqq = sum_w + wi, sum_wq + wq, fma_lanes(wq, q, sum_wqq)
            sum_wx, sum_wxq = fma_lanes(wi, xi, sum_wx), fma_lanes(wq, xi, sum_wxq)
        sum_ss = fma_lanes(scale_code * scale_code, sum_wqq, sum_ss)
        sum_sm = fma_lanes(scale_code * min_code, sum_wq, sum_sm)
        sum_mm = fma_lanes(min_code * min_code, sum_w, sum_mm)
        sum_xs, sum_xm = fma_lanes(scale_code, sum_wxq, sum_xs), fma_lanes(min_code, sum_wx, sum_xm)
    determinant = sum_ss * sum_mm - sum_sm * sum_sm
    solvable = determinant > 1e-6 * sum_ss * sum_mm
    divisor = select(solvable, determinant, splat(1))
    d = (sum_mm * sum_xs - sum_sm * sum_xm) / divisor
    dmin = (sum_sm * sum_xs - sum_ss * sum_xm) / divisor
    solvable = solvable & (d > 0) & (dmin >= 0)
    d_old, dmin_old = load_half(half_words, 0), load_half(half_words, LANES)
    d, dmin = select(solvable, round_to_half(d), d_old), select(solvable, round_to_half(dmin), dmin_old)
    new_codes = np.empty(_TILE, np.uint8)
    for b in range(16):
        scale, neg_min = d * load(block_codes, LANES * b), dmin * load(block_codes, _MIN_CODES + LANES * b)
        nonzero = abs(scale) > 0
        scale = select(nonzero, scale, splat(1))
        for i in range(LANES * 16 * b, LANES * 16 * (b + 1), LANES):
            q = clamp(round_product_lanes((load(x_lanes, i) + neg_min) / scale, splat(1)), 0, 3)
            store(new_codes, i, select(nonzero, q, load(codes, i)))
    new_error = _error_q2_K(x_lanes, w_lanes, new_codes, block_codes, d, dmin)
    better = new_error < _error_q2_K(x_lanes, w_lanes, codes, block_codes, d_old, dmin_old)
    if any_lane(better):
        for i in range(0, _TILE, LANES):
            store(codes, i, select(better, load(new_codes, i), load(codes, i)))
        store_half(half_words, 0, select(better, d, d_old))
        store_half(half_words, LANES, select(better, dmin, dmin_old))


def _make_encode(name: str, is_q2_K: bool, has_importance: bool) -> Any:
    """The kernel for q2_K or for the others, with or without importance: each compiles a third of all that they do."""

    def encode(x, importance, options, parts, lane_bytes, out):
        """x float32 [rows, n] -> out uint8 [superblocks, bytes]. options: a MinimumSearch."""
        block, nmax, max_scale_code = options.block, options.nmax, options.max_scale_code
        blocks = SUPERBLOCK // block
        x_lanes = np.empty(_TILE, np.float32)
        w_lanes = np.empty(_TILE, np.float32)
        code_lanes = np.empty(_TILE, np.float32)
        scales = np.empty(_MIN_CODES, np.float32)
        neg_mins = np.empty(_MIN_CODES, np.float32)
        sum_w = np.empty(_MIN_CODES, np.float32)
        scale_codes, min_codes = np.empty(_MIN_CODES, np.float32), np.empty(_MIN_CODES, np.float32)
        w64, wx64 = np.empty(_TILE, np.float64), np.empty(_TILE, np.float64)
        codes = np.empty(_TILE, np.uint8)
        block_codes = np.empty(2 * _MIN_CODES, np.uint8)
        half_words = np.empty(2 * LANES, np.uint16)
        for first in range(0, out.shape[0], LANES):
            transpose_blocks(x, first, SUPERBLOCK, x_lanes)
            if not has_importance:
                for b in range(blocks):
                    at = LANES * block * b
                    rms = splat(0) if is_q2_K else sqrt_lanes(sum_of_squares(x_lanes, at, block) / block)
                    for i in range(at, at + LANES * block, LANES):
                        store(w_lanes, i, rms + abs(load(x_lanes, i)))
                for b in range(0, blocks, 2):
                    scale, neg_min, scale2, neg_min2 = scales_and_mins(
                        x_lanes, w_lanes, LANES * block * b, block, nmax, options.first, 0.1, options.steps, is_q2_K, code_lanes
                    )
                    store(scales, LANES * b, scale)
                    store(neg_mins, LANES * b, neg_min)
                    store(scales, LANES * (b + 1), scale2)
                    store(neg_mins, LANES * (b + 1), neg_min2)
                d = _quantise_scales(scales, blocks, max_scale_code, scale_codes)
                dmin = _quantise_scales(neg_mins, blocks, max_scale_code, min_codes)
            else:
                transpose_importance(importance, x, first, SUPERBLOCK, w_lanes)
                sigma2 = np.float32(options.sigma2_factor) * sum_of_squares(x_lanes, 0, SUPERBLOCK) / SUPERBLOCK
                importance_weights(x_lanes, w_lanes, 0, SUPERBLOCK, sigma2, w_lanes)
                for b in range(blocks):
                    at = LANES * block * b
                    sum_ = splat(0)
                    for i in range(at, at + LANES * block, LANES):
                        sum_ = sum_ + load(w_lanes, i)
                    store(sum_w, LANES * b, sum_)
                for b in range(0, blocks, 2):
                    scale, neg_min, scale2, neg_min2 = scales_and_mins_f64(
                        x_lanes, w_lanes, LANES * block * b, block, nmax, -0.9, 0.05, 36, w64, wx64, code_lanes
                    )
                    store(scales, LANES * b, scale)
                    store(neg_mins, LANES * b, neg_min)
                    store(scales, LANES * (b + 1), scale2)
                    store(neg_mins, LANES * (b + 1), neg_min2)
                d = unsigned_scale(scales, sum_w, 0, blocks, max_scale_code, scale_codes)
                dmin = unsigned_scale(neg_mins, sum_w, 0, blocks, max_scale_code, min_codes)
            store_half(half_words, 0, d)
            store_half(half_words, LANES, dmin)
            if not is_q2_K or not has_importance:
                d, dmin = round_to_half(d), round_to_half(dmin)
            for b in range(blocks):
                scale_code, min_code = load(scale_codes, LANES * b), load(min_codes, LANES * b)
                store(block_codes, LANES * b, scale_code)
                store(block_codes, _MIN_CODES + LANES * b, min_code)
                scale, neg_min = d * scale_code, dmin * min_code
                nonzero = abs(scale) > 0
                scale = select(nonzero, scale, splat(1))
                for i in range(LANES * block * b, LANES * block * (b + 1), LANES):
                    q = clamp(round_product_lanes((load(x_lanes, i) + neg_min) / scale, splat(1)), 0, nmax)
                    store(codes, i, select(nonzero, q, load(code_lanes, i)))
            if is_q2_K:
                if not has_importance:
                    w_lanes[:] = 1
                else:
                    _refit_q2_K(x_lanes, w_lanes, codes, block_codes, half_words)
                _prefer_ternary(x_lanes, w_lanes, codes, block_codes, half_words)
            put_lanes(codes, 0, parts[0], lane_bytes)
            put_lanes(block_codes, 0, parts[1], lane_bytes)
            put_lanes(block_codes, _MIN_CODES // LANES, parts[2], lane_bytes)
            put_words(half_words, 0, parts[3], lane_bytes)
            put_words(half_words, 1, parts[4], lane_bytes)
            take_blocks(lane_bytes, first, out)

    encode.__name__ = encode.__qualname__ = name
    return kernel(encode, items=BLOCK_ITEMS)


_encode, _encode_by_importance = _make_encode("_encode", False, False), _make_encode("_encode_by_importance", False, True)
_encode_q2_K = _make_encode("_encode_q2_K", True, False)
_encode_q2_K_by_importance = _make_encode("_encode_q2_K_by_importance", True, True)


def _encode_with(x: np.ndarray, importance: np.ndarray, options: MinimumSearch, *rest: Any) -> None:
    """What each of these takes; importance of no rows: none."""
    if options.is_q2_K:
        (_encode_q2_K_by_importance if len(importance) else _encode_q2_K)(x, importance, options, *rest)
    else:
        (_encode_by_importance if len(importance) else _encode)(x, importance, options, *rest)


_FIELDS = ("codes", "scales", "minima", "d", "dmin")
CODECS: dict[str, Codec] = {
    name.lower(): lane_codec(name, _encode_with, _FIELDS, options) for name, options in MINIMUM_SEARCHES.items()
}
