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
from ...simd.block_reductions import max_magnitude, reduce_max_magnitude, reduce_sum_bits, sum_bits
from ...simd.byte_lanes import load_bytes, low_bytes, store_bytes, store_low_bytes, store_words_of_rows
from ...simd.compile import kernel
from ...simd.lanes import LANES, load, splat, store_half
from ...simd.scalar import ROUNDING_BITS, ROUNDING_CONSTANT
from .codec import Codec, codec_with_amax
from .float_range import amax_of, range_of
from .row_decoder import row_decoder

_META = TYPES["q8_KV"].row_meta
SUPERBLOCK, ROWS = 256, 8
_K_D_BYTES = 2 * ROWS  # bytes of float16 scales in front of the codes of a block of q8_k_r8
_LARGEST_SCALE = np.nextafter(np.finfo(np.float32).max / np.float32(127), np.float32(0))  # 127 times this is finite
_KV_D_BYTES = 4 * ROWS  # bytes of float32 scales in front of the codes of a group of q8_KV_r8


@kernel
def _scale_and_inverse(amax):
    """Scale amax / 127 of a row and its inverse; both 0 where the inverse would be infinite."""
    d = min(amax / np.float32(127), _LARGEST_SCALE)
    nonzero = d > np.float32(3e-39)
    return (d, np.float32(1) / d) if nonzero else (np.float32(0), np.float32(0))


@kernel
def _store_codes(x, start, size, inverse, following, out, at):
    """Rounds x[start : start + size], size a multiple of 16, to bytes out[at : at + size].

    Returns the sum of the codes, and the `amax_of` as many elements from `following` on, which are to be rounded next: to look
    at both in one loop leaves no time in which a processor waits for memory, or for a scale.
    """
    max1 = max2 = sum1 = sum2 = splat(0)  # sums of bits: those of a rounded number are a constant plus the code
    end, ahead, at = start + size - size % (4 * LANES), following - start, at - start
    for i in range(start, end, 4 * LANES):
        a, b = load(x, i) * inverse + ROUNDING_CONSTANT, load(x, i + LANES) * inverse + ROUNDING_CONSTANT
        c, d = load(x, i + 2 * LANES) * inverse + ROUNDING_CONSTANT, load(x, i + 3 * LANES) * inverse + ROUNDING_CONSTANT
        store_low_bytes(out, at + i, a, b, c, d)
        sum1, sum2 = sum_bits(sum1, sum_bits(a, b)), sum_bits(sum2, sum_bits(c, d))
        j = i + ahead
        max1, max2 = max_magnitude(load(x, j), max1), max_magnitude(load(x, j + LANES), max2)
        max1, max2 = max_magnitude(load(x, j + 2 * LANES), max1), max_magnitude(load(x, j + 3 * LANES), max2)
    for i in range(end, start + size, LANES):
        a = load(x, i) * inverse + ROUNDING_CONSTANT
        store_bytes(out, at + i, low_bytes(a))
        sum1, max1 = sum_bits(sum1, a), max_magnitude(load(x, i + ahead), max1)
    total = np.int32(reduce_sum_bits(sum_bits(sum1, sum2)) - size * ROUNDING_BITS)
    return total, reduce_max_magnitude(max_magnitude(max1, max2))


@kernel
def _interleave(codes, n, start, size, out, at):
    """Writes codes start ... start + size of eight rows, uint8 [8 * n], as their types have them."""
    for i in range(start, start + size, LANES):
        store_words_of_rows(
            out,
            at + ROWS * (i - start),
            load_bytes(codes, i),
            load_bytes(codes, i + n),
            load_bytes(codes, i + 2 * n),
            load_bytes(codes, i + 3 * n),
            load_bytes(codes, i + 4 * n),
            load_bytes(codes, i + 5 * n),
            load_bytes(codes, i + 6 * n),
            load_bytes(codes, i + 7 * n),
        )


@kernel
def encode_q8_kv_row(x, out, scales, sums):
    """x float32 [n] -> out uint8 [8 + n]; scales, sums: the memory of `out` as float32 and as int32, for the row's scale and
    the sum of its codes."""
    scales[0], inverse = _scale_and_inverse(amax_of(x, 0, x.size))
    sums[1], _ = _store_codes(x, 0, x.size, inverse, 0, out, _META)


@kernel
def _encode_q8_kv(x, out, scales, sums, amax):
    """x float32 [rows, n] -> out uint8 [rows, 8 + n]; scales, sums: as in `encode_q8_kv_row`.

    Of this and the next kernels: amax float32 [rows], largest magnitudes of rows; the least and the largest are returned.
    """
    rows, n = x.shape
    flat, out_flat = x.reshape(-1), out.reshape(-1)
    largest = amax_of(flat, 0, n)
    for r in range(rows):
        amax[r] = largest
        scales[r, 0], inverse = _scale_and_inverse(largest)
        following = min(r + 1, rows - 1) * n
        sums[r, 1], largest = _store_codes(flat, r * n, n, inverse, following, out_flat, out.shape[1] * r + _META)
    return range_of(amax)


@kernel
def _encode_q8_kv_r8(x, out, scales, amax):
    """x float32 [8 * groups, n] -> out uint8 [groups * (32 + 8 * n)]; scales: the memory of `out` as float32."""
    rows, n = x.shape
    flat, codes = x.reshape(-1), np.empty(ROWS * n, np.uint8)
    largest = amax_of(flat, 0, n)
    for r in range(rows):
        k, at = r % ROWS, (_KV_D_BYTES + ROWS * n) * (r // ROWS)
        amax[r] = largest
        scales[at // 4 + k], inverse = _scale_and_inverse(largest)
        _, largest = _store_codes(flat, r * n, n, inverse, min(r + 1, rows - 1) * n, codes, n * k)
        if k == ROWS - 1:
            _interleave(codes, n, 0, n, out, at + _KV_D_BYTES)
    return range_of(amax)


@kernel
def _encode_q8_k_r8(x, out, d_words, amax):
    """x float32 [8 * groups, n] -> out uint8 [groups * n / 256 * 2064]; d_words: the memory of `out` as uint16, for the float16
    scales."""
    rows, n = x.shape
    blocks, block_bytes, last = n // SUPERBLOCK, _K_D_BYTES + ROWS * SUPERBLOCK, x.size - SUPERBLOCK
    codes, d_f16 = np.empty(ROWS * n, np.uint8), np.empty(LANES, np.uint16)
    flat, scales = x.reshape(-1), np.zeros(ROWS * blocks + LANES, np.float32)
    block_amax = amax_of(flat, 0, SUPERBLOCK)
    for r in range(rows):
        k, at, largest = r % ROWS, block_bytes * blocks * (r // ROWS), splat(0)
        for b in range(blocks):
            largest, scales[ROWS * b + k] = max_magnitude(splat(block_amax), largest), block_amax
            inverse = np.float32(127) / block_amax if block_amax > np.float32(1e-36) else np.float32(0)
            start = n * r + SUPERBLOCK * b
            following = min(start + SUPERBLOCK, last)
            _, block_amax = _store_codes(flat, start, SUPERBLOCK, inverse, following, codes, n * k + SUPERBLOCK * b)
        amax[r] = reduce_max_magnitude(largest)
        if k == ROWS - 1:
            for b in range(blocks):
                store_half(d_f16, 0, load(scales, ROWS * b) / 127)
                for i in range(ROWS):
                    d_words[(at + block_bytes * b) // 2 + i] = d_f16[i]
                _interleave(codes, n, SUPERBLOCK * b, SUPERBLOCK, out, at + block_bytes * b + _K_D_BYTES)
    return range_of(amax)


def _encode_rows(x: np.ndarray, importance: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, tuple[float, float]]:
    """As `EncodeWithAmax`, of q8_KV."""
    out, amax = np.empty((len(x), _META + x.shape[1]), np.uint8), np.empty(len(x), np.float32)
    return out, amax, _encode_q8_kv(x, out, out.view(np.float32), out.view(np.int32), amax)


def _encode_row_groups(
    name: str, encode_kernel: Callable, scale_dtype: type[np.generic], x: np.ndarray, importance: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, tuple[float, float]]:
    """As `EncodeWithAmax`, of a type of interleaved row groups; scale_dtype: as which the kernel writes scales."""
    out, amax = np.empty((len(x), TYPES[name].row_bytes(x.shape[1])), np.uint8), np.empty(len(x), np.float32)
    flat = out.reshape(-1)
    return out, amax, encode_kernel(x, flat, flat.view(scale_dtype), amax)


_KV_R8 = partial(_encode_row_groups, "q8_KV_r8", _encode_q8_kv_r8, np.float32)
_K_R8 = partial(_encode_row_groups, "q8_k_r8", _encode_q8_k_r8, np.uint16)

CODECS: dict[str, Codec] = {
    "q8_kv": codec_with_amax(_encode_rows, row_decoder("q8_KV"), rounds=True),
    "q8_kv_r8": codec_with_amax(_KV_R8, row_decoder("q8_KV_r8"), rounds=True),
    "q8_k_r8": codec_with_amax(_K_R8, row_decoder("q8_k_r8"), rounds=True),
}
