"""f32, f16 and bf16 as tensor types: conversions without parameters to search."""

from __future__ import annotations

import numpy as np

from ...formats import TYPES
from ...formats.floats import bf16_to_f32, f32_to_bf16
from ...repack.interleave import pack, unpack
from ...simd.block_reductions import max_magnitude, reduce_max_magnitude
from ...simd.compile import kernel
from ...simd.lanes import LANES, load, load_half, splat, store, store_bf16, store_bf16_rows, store_half
from ...simd.memory import elements_to_line
from .codec import Codec, Encoded, codec_with_amax
from .float_range import NO_ROWS, amax_of, finite_amax, with_row

_BF16_ROWS = TYPES["bf16_r16"].rows
_STEP = 2 * LANES  # elements that kernels round at a time


def _narrowing(store_two):
    """The kernel (x, out) that rounds float32 [rows, n], n a multiple of 32, to words, uint16 [rows, n], by `store_two`. It
    returns the least and the largest of the rows' largest magnitudes, which it finds as it reads."""

    @kernel
    def narrow(x, out):
        rows, n = x.shape
        flat, words, range_ = x.reshape(-1), out.reshape(-1), NO_ROWS
        to_line = elements_to_line(flat)
        for r in range(rows):
            max1 = max2 = splat(0)
            for place in range(to_line - _STEP if to_line else 0, n, _STEP):
                i = n * r + min(max(place, 0), n - _STEP)
                a, b = load(flat, i), load(flat, i + LANES)
                store_two(words, i, a, b)
                max1, max2 = max_magnitude(a, max1), max_magnitude(b, max2)
            range_ = with_row(range_, reduce_max_magnitude(max_magnitude(max1, max2)))
        return range_

    return narrow


@kernel
def _store_two_halves(words, i, a, b):
    store_half(words, i, a)
    store_half(words, i + LANES, b)


_to_f16, _to_bf16 = _narrowing(_store_two_halves), _narrowing(store_bf16)


@kernel
def _from_f16(words, out):
    """float16 as uint16 [n] -> float32 [n], n a multiple of 16."""
    for i in range(0, words.size, LANES):
        store(out, i, load_half(words, i))


def _padded(flat: np.ndarray) -> np.ndarray:
    """A vector padded with zeros to a multiple of 16 elements."""
    return np.pad(flat, (0, -flat.size % LANES))


def _encode_f32(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    return x.copy().view(np.uint8)


def _decode_f32(q: np.ndarray, n: int) -> np.ndarray:
    return q.copy().view(np.float32)


def _encode_f16(x: np.ndarray, importance: np.ndarray | None) -> Encoded:
    """Nearest, ties to even. What overflows float16 becomes its largest finite number: encoders always give finite output."""
    rows, n = x.shape
    if n % _STEP:  # as one row, with zeros behind it
        amax, range_ = finite_amax(x)
        flat = np.pad(x.reshape(-1), (0, -x.size % _STEP))
        return _encode_f16(flat[None], None)[0][0, : 2 * x.size].reshape(rows, 2 * n), amax, range_
    out = np.empty((rows, n), np.uint16)
    range_ = _to_f16(x, out)
    return out.view(np.uint8), None, range_


def _decode_f16(q: np.ndarray, n: int) -> np.ndarray:
    words = q.view(np.uint16).reshape(-1)
    size = words.size
    if size % LANES:
        words = _padded(words)
    out = np.empty(words.size, np.float32)
    _from_f16(words, out)
    return out[:size].reshape(-1, n)


def _encode_bf16(x: np.ndarray, importance: np.ndarray | None) -> Encoded:
    """Nearest, ties to even."""
    if x.shape[1] % _STEP:
        amax, range_ = finite_amax(x)
        return f32_to_bf16(x).view(np.uint8), amax, range_
    out = np.empty(x.shape, np.uint16)
    range_ = _to_bf16(x, out)
    return out.view(np.uint8), None, range_


def _decode_bf16(q: np.ndarray, n: int) -> np.ndarray:
    return bf16_to_f32(q.view(np.uint16))


@kernel
def _to_bf16_rows(x, out):
    """float32 [16 * groups, n], n a multiple of 32 -> bf16_r16, uint8 [16 * groups, 2 * n]. Returns the least and the largest
    of the rows' largest magnitudes."""
    rows, n = x.shape
    flat, out_flat, range_ = x.reshape(-1), out.reshape(-1), NO_ROWS
    to_line = elements_to_line(flat)
    for first in range(0, rows, _BF16_ROWS):
        for r in range(first, first + _BF16_ROWS):
            range_ = with_row(range_, amax_of(flat, n * r, n, to_line))
        for place in range(to_line - _STEP if to_line else 0, n, _STEP):
            i = min(max(place, 0), n - _STEP)
            store_bf16_rows(flat, n * first + i, n, out_flat, 2 * (n * first + _BF16_ROWS * i))
    return range_


def _encode_bf16_rows(x: np.ndarray, importance: np.ndarray | None) -> Encoded:
    """As `EncodeWithAmax`, of bf16_r16: to interleave rows afterwards takes longer than to round them."""
    rows, n = x.shape
    if n % _STEP:
        q, amax, range_ = _encode_bf16(x, None)
        return pack(q, "bf16_r16", n)[0], amax, range_
    out = np.empty((rows, 2 * n), np.uint8)
    return out, None, _to_bf16_rows(x, out)


def _decode_bf16_rows(q: np.ndarray, n: int) -> np.ndarray:
    return _decode_bf16(unpack(q, "bf16_r16", n)[0], n)


CODECS: dict[str, Codec] = {
    "f32": Codec(_encode_f32, _decode_f32, rounds=True),
    "f16": codec_with_amax(_encode_f16, _decode_f16, rounds=True),
    "bf16": codec_with_amax(_encode_bf16, _decode_bf16, rounds=True),
    "bf16_r16": codec_with_amax(_encode_bf16_rows, _decode_bf16_rows, rounds=True),
}
