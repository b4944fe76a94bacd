"""q4_0, q5_0, q4_1, q5_1 without importance: scale and minimum follow from the block's extremes, without a search.

See docs/formats/encoders.md (legacy types).
"""

from __future__ import annotations

import numpy as np

from ....simd.compile import kernel
from ....simd.lanes import (
    LANES,
    clamp,
    fma_lanes,
    load,
    mask_bits,
    max_lanes,
    reduce_max,
    select,
    splat,
    store,
    store_half,
    trunc_lanes,
)

BLOCK = 32


@kernel
def round_to_nearest(x, max_code, has_min, out):
    """x float32 [elements] -> out uint8 [bytes]. max_code: largest code, 15 or 31; has_min: whether the type has a minimum.

    With a minimum the codes range from the smallest to the largest element. Without one the element of largest magnitude (the
    first on ties) gets code 0. Ties round up. Lanes are elements of one block, except for the scales, where they are sixteen
    blocks.
    """
    zero_code = (max_code + 1) // 2
    head_bytes = 4 if has_min else 2
    block_bytes = head_bytes + (max_code // 31) * 4 + BLOCK // 2
    mins, maxs = np.zeros(LANES, np.float32), np.zeros(LANES, np.float32)
    inverses, half_words = np.empty(LANES, np.float32), np.empty(2 * LANES, np.uint16)
    shift = splat(0.5) if has_min else splat(zero_code + 0.5)
    blocks = x.size // BLOCK
    for first in range(0, blocks, LANES):
        count = min(LANES, blocks - first)
        for lane in range(count):
            start = (first + lane) * BLOCK
            a, b = load(x, start), load(x, start + LANES)
            mins[lane], maxs[lane] = -reduce_max(max_lanes(-a, -b)), reduce_max(max_lanes(a, b))
            if not has_min and maxs[lane] == -mins[lane]:
                mins[lane] = maxs[lane] = _first_of_magnitude(x, start, maxs[lane])
        if has_min:
            # Halved before subtracting: the difference of two huge numbers may be infinite.
            scale = (load(maxs, 0) / 2 - load(mins, 0) / 2) / (np.float32(max_code) / 2)
        else:
            min_, max_ = load(mins, 0), load(maxs, 0)
            scale = select(max_ > -min_, max_, min_) / -zero_code
            mins[:] = 0
        nonzero = abs(scale) > np.float32(3e-39)  # the inverse of a smaller scale is infinite
        store(inverses, 0, select(nonzero, 1 / select(nonzero, scale, splat(1)), splat(0)))
        store_half(half_words, 0, scale)
        store_half(half_words, LANES, load(mins, 0))
        for lane in range(count):
            start, out_at = (first + lane) * BLOCK, (first + lane) * block_bytes
            inverse, block_min = splat(inverses[lane]), mins[lane]
            a = trunc_lanes(clamp(fma_lanes(load(x, start) - block_min, inverse, shift), 0, max_code))
            b = trunc_lanes(clamp(fma_lanes(load(x, start + LANES) - block_min, inverse, shift), 0, max_code))
            for k in range(head_bytes // 2):
                word = half_words[LANES * k + lane]
                out[out_at + 2 * k], out[out_at + 2 * k + 1] = word & 255, word >> 8
            if max_code == 31:
                fifth_bits_a, fifth_bits_b = a >= 16, b >= 16
                bits = mask_bits(fifth_bits_a) | mask_bits(fifth_bits_b) << 16
                for k in range(4):
                    out[out_at + head_bytes + k] = (bits >> (8 * k)) & 255
                a, b = select(fifth_bits_a, a - 16, a), select(fifth_bits_b, b - 16, b)
            store(out, out_at + block_bytes - BLOCK // 2, fma_lanes(b, splat(16), a))


@kernel
def _first_of_magnitude(x, start, magnitude):
    """The first element of a block with this magnitude, which one of them has."""
    i = start
    while abs(x[i]) != magnitude:
        i += 1
    return x[i]
