"""iq1_bn (1.625 bits per weight) and iq2_bn (2 bits): rows of -1, 0, 1 times one scale, for models trained that way (BitNet).

The scale is the row's largest magnitude; weights below half of it become 0. Importance is not used. Decoding applies the row
scale, as ik_llama.cpp's matrix products and its iq2_bn_r4 do, while its conversion of iq1_bn and iq2_bn to float32 leaves it
out. See docs/formats/layouts.md, and encoders.md (types without a search).
"""

from __future__ import annotations

import numpy as np

from ...formats import TYPES
from ...simd import llvm
from ...simd.byte_lanes import load_bytes, store_bytes
from ...simd.compile import intrinsic, kernel
from ...simd.lane_types import BYTES, LANES
from ...simd.lanes import load, select, splat, store_half
from ...simd.llvm import I8, I32, constant, shuffle, vector
from ...simd.memory import prefetch_elements
from .codec import Codec, Encoded, codec_with_amax
from .float_range import NO_ROWS, amax_of, with_row
from .row_decoder import row_decoder

BLOCK = 64
_IQ1_BYTES, _IQ2_BYTES = TYPES["iq1_bn"].block_bytes, TYPES["iq2_bn"].block_bytes
_SMALLEST = np.finfo(np.float32).smallest_subnormal  # of which the half is 0

# By how much digits of a block count in their byte. iq1_bn: sixteen weights are three groups of five and one beside them, the
# fourth of those of its block. iq2_bn: four runs of sixteen.
_IQ1_POWERS = np.array([power for last in (1, 3, 9, 27) for power in [1, 3, 9, 27, 81] * 3 + [last]], np.uint8)
_IQ2_POWERS = np.repeat(np.array([1, 4, 16, 64], np.uint8), 16)

# Five digits as the byte that, over 256, is a fraction which begins with them in base 3 (iq1_bn: with the last weight's).
BYTE_OF_DIGITS = ((256 * np.arange(243) + 242) // 243).astype(np.uint8)
_RATIO, _RATIO_BITS = 17261, 14  # of these bytes to numbers of five digits, rounded up: of all of them the same


@intrinsic
def _bytes_of_digits(typingctx, a, b, c, d):
    """The bytes of a block of iq1_bn and three more, from its 64 digits, each times the power of 3 by which it counts."""

    def generate(context, builder, signature, args):
        digits = llvm.concat(builder, args)
        numbers = None
        for k in range(5):
            lanes = [16 * (j // 3) + 5 * (j % 3) + k for j in range(12)] + [16 * k + 15 if k < 4 else BLOCK] * 4
            part = shuffle(builder, digits, constant(digits.type, 0), lanes)
            numbers = part if numbers is None else builder.add(numbers, part)
        words = vector(I32, LANES)
        scaled = builder.mul(builder.zext(numbers, words), constant(words, _RATIO))
        up = builder.add(scaled, constant(words, (1 << _RATIO_BITS) - 1))
        return builder.trunc(builder.lshr(up, constant(words, _RATIO_BITS)), vector(I8, LANES))

    return BYTES(BYTES, BYTES, BYTES, BYTES), generate


@kernel
def _digits(x, i, threshold, powers, place):
    """Digits 0, 1, 2 for -1, 0, 1 times the scale, each times its power, of lanes of x from element i on, as bytes."""
    v, once = load(x, i), load_bytes(powers, place)
    return select(v >= threshold, once << 1, select(v <= -threshold, once ^ once, once))


@kernel
def _encode(x, powers, is_iq1, out):
    """x float32 [rows, n] -> out uint8 [rows, row_bytes] of iq1_bn or iq2_bn. powers: of the type's digits. Returns
    the least and the largest of the rows' largest magnitudes."""
    rows, n = x.shape
    blocks, flat, out_flat, at = n // BLOCK, x.reshape(-1), out.reshape(-1), 0
    scale, half, last = np.empty(1, np.float32), np.empty(LANES, np.uint16), np.empty(LANES, np.uint8)
    scale_bits, range_ = scale.view(np.uint32), NO_ROWS
    for r in range(rows):
        scale[0] = amax_of(flat, n * r, n)
        range_ = with_row(range_, scale[0])
        store_half(half, 0, splat(scale[0]))
        for k in range(2 if is_iq1 else 4):
            out_flat[at + k] = ((half[0] if is_iq1 else scale_bits[0]) >> (8 * k)) & 255
        at += 2 if is_iq1 else 4
        threshold = splat(max(scale[0] * np.float32(0.5), _SMALLEST) if scale[0] > 0 else np.float32(1))
        for b in range(blocks):
            i = n * r + BLOCK * b
            prefetch_elements(flat, i + n, BLOCK)
            d0, d1 = _digits(flat, i, threshold, powers, 0), _digits(flat, i + 16, threshold, powers, 16)
            d2, d3 = _digits(flat, i + 32, threshold, powers, 32), _digits(flat, i + 48, threshold, powers, 48)
            if not is_iq1:
                store_bytes(out_flat, at, d0 | d1 | d2 | d3)
            elif b < blocks - 1:  # what is beyond the block is written over by the next
                store_bytes(out_flat, at, _bytes_of_digits(d0, d1, d2, d3))
            else:
                store_bytes(last, 0, _bytes_of_digits(d0, d1, d2, d3))
                for k in range(_IQ1_BYTES):
                    out_flat[at + k] = last[k]
            at += _IQ1_BYTES if is_iq1 else _IQ2_BYTES
    return range_


def _codec(name: str, powers: np.ndarray) -> Codec:
    def encode_with_amax(x: np.ndarray, importance: np.ndarray | None) -> Encoded:
        out = np.empty((len(x), TYPES[name].row_bytes(x.shape[1])), np.uint8)
        return out, None, _encode(x, powers, name == "iq1_bn", out)

    return codec_with_amax(encode_with_amax, row_decoder(name), rounds=True)


CODECS: dict[str, Codec] = {"iq1_bn": _codec("iq1_bn", _IQ1_POWERS), "iq2_bn": _codec("iq2_bn", _IQ2_POWERS)}
