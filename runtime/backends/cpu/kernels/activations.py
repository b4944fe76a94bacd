"""Activations as 8-bit codes: what integer products multiply the codes of weights with.

A block of activations shares one scale, the largest magnitude divided by 127, as in the reference's q8_0 (32 per block, for
types whose own blocks are 32) and q8_K (256, for superblock types). Sums of codes over 16 columns serve weights that have an
offset or whose codes are unsigned: sum((w - zero) * a) = sum(w * a) - zero * sum(a).
"""

from __future__ import annotations

import numpy as np

from .....simd.block_reductions import block_magnitude, max_magnitude, reduce_max_magnitude
from .....simd.byte_lanes import i8_to_float, load_bytes, low_bytes, store_bytes, store_run_sums
from .....simd.compile import kernel
from .....simd.lanes import LANES, fma_lanes, lane_at, load, reduce_sum, select, splat, store
from .....simd.scalar import ROUNDING_CONSTANT

RUN = 16  # columns that one sum of codes spans
_SHORT_BLOCK = 32
_SIXTEEN_BLOCKS, _SIXTEEN_RUNS = LANES * _SHORT_BLOCK, LANES * RUN
_LARGEST = float(np.finfo(np.float32).max)
_SMALLEST = 1e-30  # what is below it counts as zero: its reciprocal would not be finite


@kernel
def _scales_of(magnitudes):
    """Float32 lanes, the largest magnitudes of blocks (NaN if there is one) -> their scales, and what their numbers are
    multiplied by: 0 where all codes are 0."""
    finite, counts = magnitudes <= _LARGEST, magnitudes >= _SMALLEST
    scales = select(finite, select(counts, magnitudes / np.float32(127), splat(0.0)), splat(np.nan))
    return scales, select(finite & counts, splat(127.0) / magnitudes, splat(0.0))


@kernel
def _write_codes(x, first, block, inverse, codes):
    if inverse == 0:
        for i in range(first, first + block, RUN):
            store_bytes(codes, i, low_bytes(splat(0.0)))
        return
    for i in range(first, first + block, RUN):
        store_bytes(codes, i, low_bytes(fma_lanes(load(x, i), splat(inverse), splat(ROUNDING_CONSTANT))))


@kernel
def quantise_run(x, block, codes, scales, sums):
    """x float32 [elements], codes uint8 [elements] (the bits of int8), scales float32 [elements / block], sums int16
    [elements / 16], all contiguous; elements a multiple of block, block of 32."""
    done = x.size // _SIXTEEN_BLOCKS * _SIXTEEN_BLOCKS if block == _SHORT_BLOCK else 0
    for first in range(0, done, _SIXTEEN_BLOCKS):
        own_scales, inverses = _scales_of(block_magnitude(x, first))
        store(scales, first // _SHORT_BLOCK, own_scales)
        for b in range(LANES):
            _write_codes(x, first + b * _SHORT_BLOCK, _SHORT_BLOCK, lane_at(inverses, b), codes)
    for first in range(done, x.size, block):
        magnitudes = splat(0.0)
        for i in range(first, first + block, RUN):
            magnitudes = max_magnitude(load(x, i), magnitudes)
        own_scales, inverses = _scales_of(splat(reduce_max_magnitude(magnitudes)))
        scales[first // block] = lane_at(own_scales, 0)
        _write_codes(x, first, block, lane_at(inverses, 0), codes)
    summed = x.size // _SIXTEEN_RUNS * _SIXTEEN_RUNS
    for i in range(0, summed, _SIXTEEN_RUNS):
        store_run_sums(codes, i, sums, i // RUN)
    for i in range(summed, x.size, RUN):
        sums[i // RUN] = np.int16(reduce_sum(i8_to_float(load_bytes(codes, i))))
