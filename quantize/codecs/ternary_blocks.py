"""tq1_0 (1.6875 bits per weight), tq2_0 (2.0625) and q2_0 (2.25): blocks of -1, 0, 1 times a float16 scale.

They are llama.cpp's types for models trained with ternary weights. As in llama.cpp the scale is the block's largest magnitude,
weights are rounded after division by it, and importance is not used. The code 3 of tq2_0 and q2_0, twice the scale, is decoded
but never chosen. See docs/formats/layouts.md, and encoders.md (types without a search).
"""

from __future__ import annotations

import numpy as np

from ...formats import TYPES
from ...formats.layouts import layout_of
from ...simd.compile import kernel
from ...simd.lanes import LANES, load, max_lanes, reduce_max, select, splat, store
from .codec import Codec
from .float_range import to_f16
from .row_decoder import row_decoder
from .ternary import BYTE_OF_DIGITS

_SMALLEST_NORMAL = np.finfo(np.float32).tiny  # the inverses of smaller scales may be infinite; as float16 they are 0

# tq1_0: areas of a block, (byte, bytes, digits per byte, first element). Digit k of byte m is element first + m + bytes * k.
_AREAS = np.array([(0, 32, 5, 0), (32, 16, 5, 160), (48, 4, 4, 240)])
_POWERS_OF_3 = np.array([1, 3, 9, 27, 81])


@kernel
def _ternary_digits(block, amax, digits):
    """Digits 0, 1, 2 for -1, 0, 1 times the scale `amax`, of float32 [a multiple of 16] into uint8 `digits`."""
    inverse = np.float32(1) / amax if amax >= _SMALLEST_NORMAL else np.float32(0)
    for i in range(0, block.size, LANES):
        v = load(block, i) * inverse
        store(digits, i, select(v >= 0.5, splat(2), select(v <= -0.5, splat(0), splat(1))))


@kernel
def _block_amax(block):
    amax = splat(0)
    for i in range(0, block.size, LANES):
        amax = max_lanes(abs(load(block, i)), amax)
    return reduce_max(amax)


@kernel
def _encode_tq1_0(x, byte_of, scales, out):
    """x float32 [blocks, 256] -> scales float32 [blocks], out uint8 [blocks, 54] without the scales."""
    digits = np.empty(256, np.uint8)
    for b in range(x.shape[0]):
        scales[b] = _block_amax(x[b])
        _ternary_digits(x[b], scales[b], digits)
        for a in range(_AREAS.shape[0]):
            byte, size, count, first = _AREAS[a]
            for m in range(size):
                number = 0
                for k in range(count):
                    number += digits[first + m + size * k] * _POWERS_OF_3[4 - k]
                out[b, byte + m] = byte_of[number]


@kernel
def _encode_tq2_0(x, byte_of, scales, out):
    """As _encode_tq1_0, out uint8 [blocks, 66]. byte_of is not used."""
    digits = np.empty(256, np.uint8)
    for b in range(x.shape[0]):
        scales[b] = _block_amax(x[b])
        _ternary_digits(x[b], scales[b], digits)
        for half in range(2):
            for m in range(32):
                at = 128 * half + m
                out[b, 32 * half + m] = digits[at] | digits[at + 32] << 2 | digits[at + 64] << 4 | digits[at + 96] << 6


@kernel
def _encode_q2_0(x, byte_of, scales, out):
    """As _encode_tq1_0, x float32 [blocks, 64], out uint8 [blocks, 18]. byte_of is not used."""
    digits = np.empty(64, np.uint8)
    for b in range(x.shape[0]):
        scales[b] = _block_amax(x[b])
        _ternary_digits(x[b], scales[b], digits)
        for m in range(16):
            at = 4 * m
            out[b, 2 + m] = digits[at] | digits[at + 1] << 2 | digits[at + 2] << 4 | digits[at + 3] << 6


def _codec(name: str, encode_kernel) -> Codec:
    stored, scale_bits = TYPES[name], layout_of(name).d
    assert scale_bits is not None
    d = int(scale_bits[0, 0, 0]) // 8  # the byte of the scale

    def encode(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
        blocks = x.reshape(-1, stored.block)
        scales, out = np.empty(len(blocks), np.float32), np.empty((len(blocks), stored.block_bytes), np.uint8)
        encode_kernel(blocks, BYTE_OF_DIGITS, scales, out)
        out[:, d : d + 2] = to_f16(scales)[:, None].view(np.uint8)
        return out.reshape(len(x), -1)

    return Codec(encode, row_decoder(name), rounds=True)


CODECS: dict[str, Codec] = {
    "tq1_0": _codec("tq1_0", _encode_tq1_0),
    "tq2_0": _codec("tq2_0", _encode_tq2_0),
    "q2_0": _codec("q2_0", _encode_q2_0),
}
