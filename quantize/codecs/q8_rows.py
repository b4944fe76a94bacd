"""Eight-bit types whose scale spans many weights: q8_KV (one per row), q8_KV_r8 (the same, eight rows interleaved) and q8_k_r8
(one per 256 weights of each of eight interleaved rows).

q8_k_r8 is an encoding of its own, not a permutation of another type. q8_KV_r8 is one of q8_KV, but encoding is so cheap that
writing the bytes in interleaved order at once is faster than repacking. The codecs of both take complete groups of eight rows
(docs/formats/interleaved.md; encoders.md, types without a search). None of the types uses importance.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from ...formats import TYPES
from ...simd.byte_lanes import (
    low_bytes,
    store_bytes,
    store_strided_words,
)
from ...simd.compile import kernel
from ...simd.lanes import LANES, load, max_lanes, reduce_max, reduce_sum, splat, store, store_half
from ...simd.scalar import ROUNDING_CONSTANT
from .codec import Codec, raise_nonfinite
from .row_decoder import row_decoder

_META = TYPES["q8_KV"].row_meta
SUPERBLOCK, ROWS = 256, 8
_K_D_BYTES = 2 * ROWS  # bytes of float16 scales in front of the codes of a block of q8_k_r8
_LARGEST_SCALE = np.nextafter(np.finfo(np.float32).max / np.float32(127), np.float32(0))  # 127 times this is finite
_KV_D_BYTES = 4 * ROWS  # bytes of float32 scales in front of the codes of a group of q8_KV_r8


@kernel
def _amax(x, start, size):
    """Largest magnitude of x[start : start + size], size a multiple of 32; NaN if an element is NaN or infinite.

    0 * x is 0 for finite x and NaN otherwise, so the sum of these products is NaN exactly if an element is not finite.
    """
    max1 = max2 = max3 = max4 = nan_sum = splat(0)
    end = start + size - size % (4 * LANES)
    for i in range(start, end, 4 * LANES):
        a, b, c, d = load(x, i), load(x, i + LANES), load(x, i + 2 * LANES), load(x, i + 3 * LANES)
        max1, max2 = max_lanes(abs(a), max1), max_lanes(abs(b), max2)
        max3, max4 = max_lanes(abs(c), max3), max_lanes(abs(d), max4)
        nan_sum = nan_sum + (a * 0 + b * 0) + (c * 0 + d * 0)
    if end < start + size:
        a, b = load(x, end), load(x, end + LANES)
        max1, max2 = max_lanes(abs(a), max1), max_lanes(abs(b), max2)
        nan_sum = nan_sum + (a * 0 + b * 0)
    return reduce_max(max_lanes(max_lanes(max1, max2), max_lanes(max3, max4))) + reduce_sum(nan_sum)


@kernel
def _scale_and_inverse(amax):
    """Scale amax / 127 of a row and its inverse; both 0 where the inverse would be infinite."""
    d = min(amax / np.float32(127), _LARGEST_SCALE)
    nonzero = d > np.float32(3e-39)
    return (d, np.float32(1) / d) if nonzero else (np.float32(0), np.float32(0))


@kernel
def encode_q8_kv_rows(x, out, scales, sums):
    """x float32 [rows, n] -> out uint8 [rows, row_bytes]. Returns whether all of x is finite.

    scales, sums: the memory of `out` as float32 and as int32, for the row's scale and the sum of its codes.
    """
    finite = True
    lane_sums = np.empty(LANES, np.float32)
    rows, n = x.shape
    flat, out_flat = x.reshape(-1), out.reshape(-1)
    for r in range(rows):
        amax = _amax(flat, n * r, n)
        finite &= amax == amax
        scales[r, 0], inverse = _scale_and_inverse(amax)
        sum1, sum2 = splat(0), splat(0)  # exact: below 2^24 for rows of up to two million elements
        for i in range(0, n, 2 * LANES):
            at, source = out.shape[1] * r + _META + i, n * r + i
            y1, y2 = load(flat, source) * inverse + ROUNDING_CONSTANT, load(flat, source + LANES) * inverse + ROUNDING_CONSTANT
            store_bytes(out_flat, at, low_bytes(y1))
            store_bytes(out_flat, at + LANES, low_bytes(y2))
            sum1, sum2 = sum1 + (y1 - ROUNDING_CONSTANT), sum2 + (y2 - ROUNDING_CONSTANT)
        store(lane_sums, 0, sum1 + sum2)
        total = 0
        for lane in range(LANES):
            total += np.int32(lane_sums[lane])
        sums[r, 1] = total
    return finite


@kernel
def _encode_q8_kv_r8(x, out, scales):
    """x float32 [8 * groups, n] -> out uint8 [groups * (32 + 8 * n)]. Returns whether all of x is finite.

    scales: the memory of `out` as float32.
    """
    finite = True
    rows, n = x.shape
    flat = x.reshape(-1)
    for r in range(rows):
        at = (_KV_D_BYTES + ROWS * n) * (r // ROWS)
        amax = _amax(flat, n * r, n)
        finite &= amax == amax
        scales[at // 4 + r % ROWS], inverse = _scale_and_inverse(amax)
        for i in range(0, n, LANES):
            y = load(flat, n * r + i) * inverse + ROUNDING_CONSTANT
            store_strided_words(out, at + _KV_D_BYTES + ROWS * i + 4 * (r % ROWS), 4 * ROWS, low_bytes(y))
    return finite


@kernel
def _encode_q8_k_r8(x, out, d_words):
    """x float32 [8 * groups, n] -> out uint8 [groups * n / 256 * 2064]. Returns whether all of x is finite.

    d_words: the memory of `out` as uint16, for the float16 scales.
    """
    finite = True
    amaxes = np.zeros(LANES, np.float32)
    d_f16 = np.empty(LANES, np.uint16)
    rows, n = x.shape
    flat = x.reshape(-1)
    row_blocks = n // SUPERBLOCK
    for b in range(rows // ROWS * row_blocks):
        at = (_K_D_BYTES + ROWS * SUPERBLOCK) * b
        for k in range(ROWS):
            start = n * (b // row_blocks * ROWS + k) + b % row_blocks * SUPERBLOCK
            amax = _amax(flat, start, SUPERBLOCK)
            amaxes[k] = amax
            finite &= amax == amax
            inverse = np.float32(127) / amax if amax > np.float32(1e-36) else np.float32(0)
            for i in range(0, SUPERBLOCK, LANES):
                y = load(flat, start + i) * inverse + ROUNDING_CONSTANT
                store_strided_words(out, at + _K_D_BYTES + ROWS * i + 4 * k, 4 * ROWS, low_bytes(y))
        store_half(d_f16, 0, load(amaxes, 0) / 127)
        for k in range(ROWS):
            d_words[at // 2 + k] = d_f16[k]
    return finite


def _empty(name: str, x: np.ndarray) -> np.ndarray:
    return np.empty((len(x), TYPES[name].row_bytes(x.shape[1])), np.uint8)


def encode_q8_kv(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    """q8_KV: float32 [rows, n] -> uint8 [rows, 8 + n]; importance is not used. Raises NonFiniteError for NaN or infinity."""
    out = _empty("q8_KV", x)
    if not encode_q8_kv_rows(x, out, out.view(np.float32), out.view(np.int32)):
        raise_nonfinite(x)
    return out


def _row_amax(name: str, scale_dtype: type[np.generic], q: np.ndarray, n: int) -> np.ndarray:
    """127 times the largest scale of each row, float32 [rows], read from bytes of type `name`."""
    rows = TYPES[name].rows
    if scale_dtype is np.float32:
        d = q.reshape(len(q) // rows, -1)[:, : 4 * rows].view(np.float32).reshape(-1)
    else:
        words = q.reshape(len(q) // rows, n // SUPERBLOCK, -1)[:, :, : 2 * rows].view(np.uint16)
        d = words.max(1).view(np.float16).reshape(-1).astype(np.float32)  # words of positive numbers rise as these do
    return d * np.float32(127)


def _row_group_codec(name: str, encode_kernel: Callable, scale_dtype: type[np.generic]) -> Codec:
    """The codec of a type of interleaved row groups; scale_dtype: as which the encoder kernel writes scales to the output."""

    def encode(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
        out = _empty(name, x)
        flat = out.reshape(-1)
        if not encode_kernel(x, flat, flat.view(scale_dtype)):
            raise_nonfinite(x)
        return out

    return Codec(encode, row_decoder(name), partial(_row_amax, name, scale_dtype), rounds=True)


CODECS: dict[str, Codec] = {
    "q8_kv": Codec(encode_q8_kv, row_decoder("q8_KV"), partial(_row_amax, "q8_KV", np.float32), rounds=True),
    "q8_kv_r8": _row_group_codec("q8_KV_r8", _encode_q8_kv_r8, np.float32),
    "q8_k_r8": _row_group_codec("q8_k_r8", _encode_q8_k_r8, np.uint16),
}
