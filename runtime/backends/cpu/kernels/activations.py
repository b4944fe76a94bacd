"""Activations as 8-bit codes: what integer products multiply the codes of weights with.

A block of activations shares one scale, the largest magnitude divided by 127, as in the reference's q8_0 (32 per block, for
types whose own blocks are 32) and q8_K (256, for superblock types). Sums of codes over 16 columns serve weights that have an
offset or whose codes are unsigned: sum((w - zero) * a) = sum(w * a) - zero * sum(a).
"""

from __future__ import annotations

import numpy as np

from .....simd.byte_lanes import i8_to_float, low_bytes, store_bytes
from .....simd.compile import kernel
from .....simd.lanes import any_lane, fma_lanes, load, max_lanes, reduce_max, reduce_sum, splat
from .....simd.scalar import ROUNDING_CONSTANT

RUN = 16  # columns that one sum of codes spans
_LARGEST = float(np.finfo(np.float32).max)
_SMALLEST = 1e-30  # what is below it counts as zero: its reciprocal would not be finite


@kernel
def quantise_run(x, block, codes, scales, sums):
    """x float32 [elements], codes uint8 [elements] (the bits of int8), scales float32 [elements / block], sums int16
    [elements / 16], all contiguous; elements a multiple of block, block of 16."""
    for b in range(x.size // block):
        first = b * block
        high = splat(0.0)
        finite = high == high
        for i in range(first, first + block, RUN):
            magnitude = abs(load(x, i))
            finite = finite & (magnitude <= _LARGEST)
            high = max_lanes(high, magnitude)
        largest = reduce_max(high)
        inverse = np.float32(0.0)
        if any_lane(~finite):
            scales[b] = np.float32(np.nan)
        elif largest < _SMALLEST:
            scales[b] = np.float32(0.0)
        else:
            scales[b] = largest / np.float32(127)
            inverse = np.float32(127) / largest
        if inverse == 0:
            for i in range(first, first + block):
                codes[i] = 0
            for i in range(first // RUN, (first + block) // RUN):
                sums[i] = 0
            continue
        for i in range(first, first + block, RUN):
            code = low_bytes(fma_lanes(load(x, i), splat(inverse), splat(ROUNDING_CONSTANT)))
            store_bytes(codes, i, code)
            sums[i // RUN] = np.int16(reduce_sum(i8_to_float(code)))
