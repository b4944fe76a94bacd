"""mxfp4: blocks of 32 four-bit floats (E2M1) with a power of two as scale (OCP Microscaling Formats specification, 2023).

The exponent that the specification and llama.cpp take, that of the largest element less 2, clips magnitudes above 6/8 of the
next power of two. Here the next larger exponent is tried as well, and the one of smaller squared error, weighted by importance,
is taken. Rows that were decoded from mxfp4 are reproduced exactly. See docs/formats/encoders.md (legacy types).
"""

from __future__ import annotations

import numpy as np

from ...formats import TYPES
from ...simd.block_reductions import block_magnitude, max_magnitude, reduce_max_magnitude
from ...simd.compile import kernel
from ...simd.lanes import (
    LANES,
    fma_lanes,
    load,
    max_lanes,
    min_lanes,
    power_of_two_below,
    reduce_sum,
    select,
    splat,
    store,
)
from ...simd.scalar import ROUNDING_CONSTANT
from .codec import Codec, Encoded, codec_with_amax
from .float_range import NO_ROWS, with_row
from .importance import importance_rows
from .row_decoder import row_decoder

BLOCK = 32
_BYTES = TYPES["mxfp4"].block_bytes

# Half of 2^(E - 127) for each exponent byte E: the scale of E2M1_DOUBLED.
_SCALES = np.ldexp(1.0, np.arange(256) - 128).astype(np.float32)
# The inverses of smaller scales are infinite. Blocks with magnitudes below 2^-122 lose precision by this limit.
_MIN_EXPONENT = 3
_INVERSES = np.concatenate([np.zeros(_MIN_EXPONENT), np.ldexp(1.0, 128 - np.arange(_MIN_EXPONENT, 256))]).astype(np.float32)

_TIE_DOWN = np.float32(1 - 2**-23)  # ties go to the smaller magnitude


@kernel
def _nearest_magnitude(y):
    """The magnitude of the E2M1 value nearest to y >= 0: multiples of 1 below 4, of 2 below 8, of 4 up to 12."""
    y = min_lanes(y, splat(12))
    rounding = max_lanes(power_of_two_below(y), splat(2)) * (ROUNDING_CONSTANT / 2)  # a sum with it has no digits below a step
    return (y + rounding) - rounding


@kernel
def _code(x, v):
    """The four-bit code of an E2M1 value: its magnitude v, as `_nearest_magnitude` has it, with the sign of x."""
    code = min_lanes(min_lanes(v, fma_lanes(v, splat(0.5), splat(2))), fma_lanes(v, splat(0.25), splat(4)))
    return select((x < 0) & (v > 0), code + 8, code)


@kernel
def _gain(x, v, next_v, scale, next_scale, inverse):
    """How much the squared error of next_v is below that of v, in squares of the scale: those of tiny and of huge weights
    stay in range."""
    error, next_error = fma_lanes(-scale, v, abs(x)) * inverse, fma_lanes(-next_scale, next_v, abs(x)) * inverse
    return fma_lanes(error, error, -(next_error * next_error))


@kernel
def _encode(x, importance, scales, inverses, out):
    """x float32 [rows, n] -> out uint8 [rows, row_bytes]. Returns the least and the largest of the rows' largest magnitudes.
    Lanes are elements of one block, except for the largest magnitudes: sixteen blocks."""
    rows, n = x.shape
    floats = np.zeros(LANES + LANES * BLOCK, np.float32)
    block_amax, tile = floats[:LANES], floats[LANES:]
    amax_bits, blocks, range_ = block_amax.view(np.uint32), n // BLOCK, NO_ROWS
    for r in range(rows):
        row, out_row, largest = x[r], out[r], splat(0)
        qw = importance[r % importance.shape[0]] if importance.shape[0] > 0 else row
        for b in range(blocks):
            if b % LANES == 0:
                if blocks - b >= LANES:
                    store(block_amax, 0, block_magnitude(row, BLOCK * b))
                else:
                    for i in range(0, tile.size, LANES):
                        store(tile, i, load(row, BLOCK * b + i) if i < (blocks - b) * BLOCK else splat(0))
                    store(block_amax, 0, block_magnitude(tile, 0))
                largest = max_magnitude(load(block_amax, 0), largest)
            a, c = load(row, BLOCK * b), load(row, BLOCK * b + LANES)
            e = max(np.int64(amax_bits[b % LANES] >> np.uint32(23)) - 2, _MIN_EXPONENT)
            inverse, scale, next_scale = splat(inverses[e]), splat(scales[e]), splat(scales[e + 1])
            y_a, y_c = abs(a) * (inverse * _TIE_DOWN), abs(c) * (inverse * _TIE_DOWN)
            v_a, v_c = _nearest_magnitude(y_a), _nearest_magnitude(y_c)
            next_v_a, next_v_c = _nearest_magnitude(y_a * np.float32(0.5)), _nearest_magnitude(y_c * np.float32(0.5))
            gain_a = _gain(a, v_a, next_v_a, scale, next_scale, inverse)
            gain_c = _gain(c, v_c, next_v_c, scale, next_scale, inverse)
            if importance.shape[0] > 0:
                gain_a, gain_c = gain_a * load(qw, BLOCK * b), gain_c * load(qw, BLOCK * b + LANES)
            if reduce_sum(gain_a + gain_c) > 0:
                e, v_a, v_c = e + 1, next_v_a, next_v_c
            out_row[_BYTES * b] = e if amax_bits[b % LANES] > 0 else 0
            store(out_row, _BYTES * b + 1, fma_lanes(_code(c, v_c), splat(16), _code(a, v_a)))
        range_ = with_row(range_, reduce_max_magnitude(largest))
    return range_


def encode_with_amax(x: np.ndarray, importance: np.ndarray | None) -> Encoded:
    """mxfp4: float32 [rows, n], n a multiple of 32, importance float32 [n] or None -> uint8 [rows, n / 32 * 17], and what
    `Codec.encode_with_amax` returns besides."""
    out = np.empty((len(x), TYPES["mxfp4"].row_bytes(x.shape[1])), np.uint8)
    return out, None, _encode(x, importance_rows(importance), _SCALES, _INVERSES, out)


CODECS: dict[str, Codec] = {"mxfp4": codec_with_amax(encode_with_amax, row_decoder("mxfp4"), rounds=True)}
