"""nvfp4: four-bit floats (E2M1) in groups of 16 with an unsigned eight-bit float (E4M3) as scale, four groups to a block.

The scale is a sixth of the group's largest magnitude, rounded as llama.cpp rounds it, which gives llama.cpp's bytes. With
importance, neighbouring scales are tried as well, and the one of least weighted squared error is taken. Magnitudes below 2^-7
have coarse scales, so files scale such matrices as wholes (see quantize/tensor_scale.py). See docs/formats/layouts.md.
"""

from __future__ import annotations

import numpy as np

from ...formats import TYPES
from ...formats.layouts.tables import E2M1_DOUBLED, HALF_UE4M3
from ...simd.compile import kernel
from ...simd.lanes import LANES, load, reduce_max, reduce_sum, select, splat, store
from .codec import Codec
from .importance import importance_rows
from .row_decoder import row_decoder

GROUP, GROUPS = 16, 4
_BYTES, _HALF = TYPES["nvfp4"].block_bytes, GROUP // 2
_MAGNITUDES, _VALUES = E2M1_DOUBLED[:8].astype(np.float32), E2M1_DOUBLED.astype(np.float32)
_SCALES = HALF_UE4M3.astype(np.float32)
LARGEST_CODE = 0x7E  # 448; 0x7F is no number
_SIXTH = np.float32(6)
# Codes around the plain one that are tried with importance: the largest magnitude is cut off, or becomes 4 instead of 6.
_BELOW, _ABOVE = 3, 6


@kernel
def scale_code(x):
    """The code of a scale x >= 0: its three bits of mantissa rounded half up; from 256 on the largest code, as in llama.cpp."""
    if x < np.float32(2**-6):
        return min(np.int64(x * np.float32(512) + np.float32(0.5)), 7)
    if x >= np.float32(256):
        return LARGEST_CODE
    exponent = 0
    while x >= np.float32(2 ** (-5)) and exponent < 13:  # to 2^-6 <= x < 2^-5; halving is exact
        x *= np.float32(0.5)
        exponent += 1
    mantissa = np.int64(x * np.float32(512) + np.float32(0.5))  # 8 ... 16
    code = exponent * 8 + mantissa
    return code if code < 120 else LARGEST_CODE


@kernel
def _nearest(x, scale):
    """(codes 0 to 7 of the magnitudes nearest to |x|, the distances), as lanes; of two equally near ones the smaller."""
    x = abs(x)
    code, distance = splat(0), x
    for i in range(1, 8):
        further = abs(splat(_MAGNITUDES[i]) * scale - x)
        is_nearer = further < distance
        code, distance = select(is_nearer, splat(i), code), select(is_nearer, further, distance)
    return code, distance


@kernel
def _encode(x, importance, scales, out):
    """x float32 [rows, n] -> out uint8 [rows, row_bytes]. Lanes are the elements of one group."""
    rows, n = x.shape
    codes = np.empty(LANES, np.uint8)
    for r in range(rows):
        row, out_row = x[r], out[r]
        qw = importance[r % importance.shape[0]] if importance.shape[0] > 0 else row
        for g in range(n // GROUP):
            v = load(row, GROUP * g)
            best = scale_code(reduce_max(abs(v)) / _SIXTH)
            if importance.shape[0] > 0:
                w, plain = load(qw, GROUP * g), best
                _, distance = _nearest(v, scales[best])
                least = reduce_sum(w * (distance * distance))
                for candidate in range(max(plain - _BELOW, 1), min(plain + _ABOVE, LARGEST_CODE) + 1):
                    _, distance = _nearest(v, scales[candidate])
                    error = reduce_sum(w * (distance * distance))
                    if error < least:
                        best, least = candidate, error
            code, _ = _nearest(v, scales[best])
            store(codes, 0, select((v < 0) & (code > 0), code + 8, code))
            block = _BYTES * (g // GROUPS)
            out_row[block + g % GROUPS] = best
            for i in range(_HALF):
                out_row[block + GROUPS + _HALF * (g % GROUPS) + i] = codes[i] | codes[_HALF + i] << 4


def encode(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    """nvfp4: float32 [rows, n], n a multiple of 64, importance float32 [n] or None -> uint8 [rows, n / 64 * 36]."""
    rows, n = x.shape
    out = np.empty((rows, TYPES["nvfp4"].row_bytes(n)), np.uint8)
    _encode(x, importance_rows(importance), _SCALES, out)
    return out


CODECS: dict[str, Codec] = {"nvfp4": Codec(encode, row_decoder("nvfp4"))}
