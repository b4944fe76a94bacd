"""q4_0, q5_0, q4_1, q5_1 without importance: no search, the extremes of a block decide on its scale (spec D.1)."""

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
def encode_rounded(x, top, offset, out):
    """x: float32 [elements]; top: the largest code, 15 or 31; offset: whether the type has a minimum; out: uint8 [bytes].

    With a minimum codes go from the smallest to the largest element. Without, the element of largest magnitude (the first of
    equals) gets code 0. Halves are rounded up. The lanes are elements of one block; only scales are those of sixteen.
    """
    middle = (top + 1) // 2
    head = 4 if offset else 2
    size = head + (top // 31) * 4 + BLOCK // 2
    lows, highs = np.zeros(LANES, np.float32), np.zeros(LANES, np.float32)
    inverses, halves = np.empty(LANES, np.float32), np.empty(2 * LANES, np.uint16)
    shift = splat(0.5) if offset else splat(middle + 0.5)
    blocks = x.size // BLOCK
    for first in range(0, blocks, LANES):
        count = min(LANES, blocks - first)
        for lane in range(count):
            start = (first + lane) * BLOCK
            a, b = load(x, start), load(x, start + LANES)
            lows[lane], highs[lane] = -reduce_max(max_lanes(-a, -b)), reduce_max(max_lanes(a, b))
            if not offset and highs[lane] == -lows[lane]:
                lows[lane] = highs[lane] = _first_of(x, start, highs[lane])
        if offset:
            # Halves first: the difference of two huge numbers may be infinite.
            scale = (load(highs, 0) / 2 - load(lows, 0) / 2) / (np.float32(top) / 2)
        else:
            low, high = load(lows, 0), load(highs, 0)
            scale = select(high > -low, high, low) / -middle
            lows[:] = 0
        live = abs(scale) > np.float32(3e-39)  # the inverse of less is infinite
        store(inverses, 0, select(live, 1 / select(live, scale, splat(1)), splat(0)))
        store_half(halves, 0, scale)
        store_half(halves, LANES, load(lows, 0))
        for lane in range(count):
            start, to = (first + lane) * BLOCK, (first + lane) * size
            inverse, low = splat(inverses[lane]), lows[lane]
            a = trunc_lanes(clamp(fma_lanes(load(x, start) - low, inverse, shift), 0, top))
            b = trunc_lanes(clamp(fma_lanes(load(x, start + LANES) - low, inverse, shift), 0, top))
            for k in range(head // 2):
                out[to + 2 * k], out[to + 2 * k + 1] = halves[LANES * k + lane] & 255, halves[LANES * k + lane] >> 8
            if top == 31:
                upper_a, upper_b = a >= 16, b >= 16
                bits = mask_bits(upper_a) | mask_bits(upper_b) << 16
                for k in range(4):
                    out[to + head + k] = (bits >> (8 * k)) & 255
                a, b = select(upper_a, a - 16, a), select(upper_b, b - 16, b)
            store(out, to + size - BLOCK // 2, fma_lanes(b, splat(16), a))


@kernel
def _first_of(x, start, magnitude):
    """The first element of a block of this magnitude, which one of them has."""
    i = start
    while abs(x[i]) != magnitude:
        i += 1
    return x[i]
