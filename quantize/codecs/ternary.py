"""iq1_bn (1.625 bits per weight) and iq2_bn (2 bits): rows of -1, 0, 1 times one scale, for models trained that way (BitNet).

The scale is the row's largest magnitude; weights below half of it become 0. Importance is not used. Decoding applies the row
scale, as ik_llama.cpp's matrix products and its iq2_bn_r4 do, while its conversion of iq1_bn and iq2_bn to float32 leaves it
out. See docs/formats/layouts.md, and encoders.md (types without a search).
"""

from __future__ import annotations

import numpy as np

from ...formats import TYPES
from ...simd.compile import kernel
from ...simd.lanes import LANES, load, max_lanes, reduce_max, select, splat, store
from .codec import Codec
from .row_decoder import row_decoder

BLOCK = 64
_POWERS_OF_3 = np.array([1, 3, 9, 27, 81])

# iq1_bn: a byte over 256 is a fraction whose first five base-3 digits are the digits of five weights, the last weight first.
_BYTE_OF_DIGITS = ((256 * np.arange(243) + 242) // 243).astype(np.uint8)


@kernel
def _row_amax(x, out):
    """Largest magnitude of each row of x into out, float32 [rows]."""
    for r in range(x.shape[0]):
        row = x[r]
        amax = splat(0)
        for i in range(0, row.size, LANES):
            amax = max_lanes(abs(load(row, i)), amax)
        out[r] = reduce_max(amax)


@kernel
def _ternary_digits(block, threshold, digits):
    """Digits 0, 1, 2 for -1, 0, 1 times the scale into digits, uint8 [64]."""
    for i in range(0, BLOCK, LANES):
        v = load(block, i)
        store(digits, i, select(v >= threshold, splat(2), select(v <= -threshold, splat(0), splat(1))))


@kernel
def _encode_iq2_bn(x, thresholds, meta, out):
    """x -> out uint8 [rows, row_bytes]. thresholds: float32 [rows], half the scale, above 0; meta: bytes before the blocks."""
    digits = np.empty(BLOCK, np.uint8)
    for r in range(x.shape[0]):
        row, out_row = x[r], out[r, meta:]
        for b in range(row.size // BLOCK):
            _ternary_digits(row[BLOCK * b : BLOCK * (b + 1)], thresholds[r], digits)
            for j in range(16):
                out_row[16 * b + j] = digits[j] | digits[16 + j] << 2 | digits[32 + j] << 4 | digits[48 + j] << 6


@kernel
def _encode_iq1_bn(x, thresholds, meta, byte_of, out):
    """As _encode_iq2_bn. byte_of: uint8 [243], the byte for each group of five digits."""
    digits = np.empty(BLOCK, np.uint8)
    for r in range(x.shape[0]):
        row, out_row = x[r], out[r, meta:]
        for b in range(row.size // BLOCK):
            _ternary_digits(row[BLOCK * b : BLOCK * (b + 1)], thresholds[r], digits)
            last = 0
            for g in range(4):
                for k in range(3):
                    index = 0
                    for j in range(5):
                        index += digits[16 * g + 5 * k + j] * _POWERS_OF_3[j]
                    out_row[13 * b + 3 * g + k] = byte_of[index]
                last += digits[16 * g + 15] * _POWERS_OF_3[g]
            out_row[13 * b + 12] = byte_of[last]


def _codec(name: str, scale_dtype: type, encode_kernel, *tables) -> Codec:
    """The codec of a ternary type.

    scale_dtype: of the row's scale in the file; tables: what encode_kernel takes besides.
    """
    tensor_type = TYPES[name]

    def encode(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
        rows, n = x.shape
        out = np.empty((rows, tensor_type.row_bytes(n)), np.uint8)
        amax = np.empty(rows, np.float32)
        _row_amax(x, amax)
        thresholds = np.where(amax > 0, amax * np.float32(0.5), np.float32(1))
        encode_kernel(x, np.maximum(thresholds, np.finfo(np.float32).smallest_subnormal), tensor_type.row_meta, *tables, out)
        stored = np.minimum(amax, np.finfo(scale_dtype).max).astype(scale_dtype)
        out[:, : tensor_type.row_meta] = stored[:, None].view(np.uint8)
        return out

    return Codec(encode, row_decoder(name), rounds=True)


CODECS: dict[str, Codec] = {
    "iq1_bn": _codec("iq1_bn", np.float16, _encode_iq1_bn, _BYTE_OF_DIGITS),
    "iq2_bn": _codec("iq2_bn", np.float32, _encode_iq2_bn),
}
