"""iq1_bn (1.625 bits per weight) and iq2_bn (2 bits): rows of -1, 0, 1 times one scale, for models trained that way (BitNet).

The scale is the row's largest magnitude; weights below half of it become 0. Importance is not used. Decoding applies the row
scale, as ik_llama.cpp's matrix products and its iq2_bn_r4 do, while its conversion of iq1_bn and iq2_bn to float32 leaves it
out. See docs/formats/layouts.md, and encoders.md (types without a search).
"""

from __future__ import annotations

import numpy as np

from ...formats import TYPES
from ...simd.compile import kernel
from ...simd.lanes import LANES, fma_lanes, load, max_lanes, reduce_max, select, splat, store
from .codec import Codec
from .row_decoder import row_decoder

BLOCK = 64

# iq1_bn: powers of 3 by which digits of sixteen weights count, three groups of five and one beside them.
_POWERS_OF_3 = np.array([1, 3, 9, 27, 81] * 3 + [1], np.float32)
# Five digits as the byte that, over 256, is a fraction which begins with them in base 3 (iq1_bn: with the last weight's).
BYTE_OF_DIGITS = ((256 * np.arange(243) + 242) // 243).astype(np.uint8)


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
def _ternary_digits(x, i, threshold):
    """Digits 0, 1, 2 for -1, 0, 1 times the scale, of lanes of x from element i on."""
    v = load(x, i)
    return select(v >= threshold, splat(2), select(v <= -threshold, splat(0), splat(1)))


@kernel
def _encode_iq2_bn(x, thresholds, meta, out):
    """x -> out uint8 [rows, row_bytes]. thresholds: float32 [rows], half the scale, above 0; meta: bytes before the blocks."""
    for r in range(x.shape[0]):
        row, out_row, threshold = x[r], out[r, meta:], splat(thresholds[r])
        for b in range(row.size // BLOCK):
            for j in range(0, 16, LANES):
                byte = _ternary_digits(row, BLOCK * b + j, threshold)
                for k in range(1, 4):
                    byte = fma_lanes(_ternary_digits(row, BLOCK * b + 16 * k + j, threshold), splat(4**k), byte)
                store(out_row, 16 * b + j, byte)


@kernel
def _encode_iq1_bn(x, thresholds, meta, byte_of, powers, out):
    """As _encode_iq2_bn. byte_of: uint8 [243], the byte for each group of five digits; powers: float32 [16] of 3, by place."""
    digits = np.empty(BLOCK, np.uint8)
    words = digits.view(np.uint64)
    five, sum_of_bytes = np.uint64(0xFFFFFFFFFF), np.uint64(0x0101010101)  # their sum is the fifth byte of the product
    for r in range(x.shape[0]):
        row, out_row = x[r], out[r, meta:]
        for b in range(row.size // BLOCK):
            for i in range(0, BLOCK, LANES):
                place = load(powers, i % powers.size)
                store(digits, i, _ternary_digits(row, BLOCK * b + i, splat(thresholds[r])) * place)
            last, power = np.uint64(0), np.uint64(1)
            for g in range(4):
                low, high = words[2 * g], words[2 * g + 1]
                groups = low, low >> np.uint64(40) | high << np.uint64(24), high >> np.uint64(16)
                for k in range(3):
                    index = (groups[k] & five) * sum_of_bytes >> np.uint64(32) & np.uint64(255)
                    out_row[13 * b + 3 * g + k] = byte_of[index]
                last += (high >> np.uint64(56)) * power
                power *= np.uint64(3)
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
    "iq1_bn": _codec("iq1_bn", np.float16, _encode_iq1_bn, BYTE_OF_DIGITS, _POWERS_OF_3),
    "iq2_bn": _codec("iq2_bn", np.float32, _encode_iq2_bn),
}
