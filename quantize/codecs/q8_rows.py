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

from ...formats import TYPES, TensorType
from ...simd.block_reductions import max_magnitude, max_of_eight, reduce_max_magnitude, reduce_sum_bits, sum_bits
from ...simd.byte_lanes import low_bytes, store_bytes, store_rounded, store_rounded_rows
from ...simd.compile import kernel
from ...simd.lanes import LANES, lane_at, load, min_lanes, select, splat, store, store_half
from ...simd.memory import address, keep_alive, prefetch_elements, view
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
    max1 = max2 = total = tail = splat(0)  # sums of bits
    end, ahead, at = start + size - size % (4 * LANES), following - start, at - start
    for i in range(start, end, 4 * LANES):
        a, b = load(x, i) * inverse, load(x, i + LANES) * inverse
        c, d = load(x, i + 2 * LANES) * inverse, load(x, i + 3 * LANES) * inverse
        total = sum_bits(store_rounded(out, at + i, a, b, c, d), total)
        j = i + ahead
        max1, max2 = max_magnitude(load(x, j), max1), max_magnitude(load(x, j + LANES), max2)
        max1, max2 = max_magnitude(load(x, j + 2 * LANES), max1), max_magnitude(load(x, j + 3 * LANES), max2)
    for i in range(end, start + size, LANES):
        a = load(x, i) * inverse + ROUNDING_CONSTANT  # the bits of a rounded number are a constant plus the code
        store_bytes(out, at + i, low_bytes(a))
        tail, max1 = sum_bits(tail, a), max_magnitude(load(x, i + ahead), max1)
    constant = (start + size - end) * ROUNDING_BITS
    return np.int32(reduce_sum_bits(sum_bits(total, tail)) - constant), reduce_max_magnitude(max_magnitude(max1, max2))


@kernel
def encode_q8_kv_row(x, out, scales, sums):
    """x float32 [n] -> out uint8 [8 + n]; scales, sums: the memory of `out` as float32 and as int32, for the row's scale and
    the sum of its codes."""
    scales[0], inverse = _scale_and_inverse(amax_of(x, 0, x.size))
    sums[1], _ = _store_codes(x, 0, x.size, inverse, 0, out, _META)


@kernel
def _encode_q8_kv(x, out, amax):
    """x float32 [rows, n] -> out uint8 [rows, 8 + n].

    Of this and the next kernels: amax float32 [rows], largest magnitudes of rows; the least and the largest are returned.
    """
    rows, n = x.shape
    words = out.shape[1] // 4
    scales, sums = view(address(out), (rows, words), np.float32), view(address(out), (rows, words), np.int32)
    flat, out_flat = x.reshape(-1), out.reshape(-1)
    largest = amax_of(flat, 0, n)
    for r in range(rows):
        amax[r] = largest
        scales[r, 0], inverse = _scale_and_inverse(largest)
        following = min(r + 1, rows - 1) * n
        sums[r, 1], largest = _store_codes(flat, r * n, n, inverse, following, out_flat, out.shape[1] * r + _META)
    keep_alive(out)
    return range_of(amax)


@kernel
def _magnitudes(x, start, size):
    """Lanes whose largest is the largest magnitude of x[start : start + size], size a multiple of 32."""
    max1 = max2 = splat(0)
    for i in range(start, start + size, 2 * LANES):
        max1, max2 = max_magnitude(load(x, i), max1), max_magnitude(load(x, i + LANES), max2)
    return max_magnitude(max1, max2)


@kernel
def _amax_of_rows(x, start, n, size):
    """The largest magnitude of x[start : start + size] and of the seven runs that follow, each n after the last one: lanes 0 to
    7, and again 8 to 15."""
    return max_of_eight(
        _magnitudes(x, start, size), _magnitudes(x, start + n, size), _magnitudes(x, start + 2 * n, size),
        _magnitudes(x, start + 3 * n, size), _magnitudes(x, start + 4 * n, size), _magnitudes(x, start + 5 * n, size),
        _magnitudes(x, start + 6 * n, size), _magnitudes(x, start + 7 * n, size),
    )  # fmt: skip


@kernel
def _round_rows(x, start, n, size, inverse, out, at):
    """Rounds such runs times their inverse scales, lanes 0 to 7, to bytes from out[at] on: four of each row in turn."""
    s1, s2, s3, s4 = start + n, start + 2 * n, start + 3 * n, start + 4 * n
    s5, s6, s7 = start + 5 * n, start + 6 * n, start + 7 * n
    i0, i1, i2, i3 = lane_at(inverse, 0), lane_at(inverse, 1), lane_at(inverse, 2), lane_at(inverse, 3)
    i4, i5, i6, i7 = lane_at(inverse, 4), lane_at(inverse, 5), lane_at(inverse, 6), lane_at(inverse, 7)
    for i in range(0, size, LANES):
        j = i + SUPERBLOCK  # what is read next, also where runs are superblocks
        prefetch_elements(x, start + j, LANES)
        prefetch_elements(x, s1 + j, LANES)
        prefetch_elements(x, s2 + j, LANES)
        prefetch_elements(x, s3 + j, LANES)
        prefetch_elements(x, s4 + j, LANES)
        prefetch_elements(x, s5 + j, LANES)
        prefetch_elements(x, s6 + j, LANES)
        prefetch_elements(x, s7 + j, LANES)
        store_rounded_rows(
            out, at + ROWS * i,
            load(x, start + i) * i0, load(x, s1 + i) * i1, load(x, s2 + i) * i2, load(x, s3 + i) * i3,
            load(x, s4 + i) * i4, load(x, s5 + i) * i5, load(x, s6 + i) * i6, load(x, s7 + i) * i7,
        )  # fmt: skip


# Scales of the next two are stored sixteen at a time, eight too many: codes are written over these.


@kernel
def _encode_q8_kv_r8(x, out, amax):
    """x float32 [8 * groups, n] -> out uint8 [8 * groups, 4 + n], of groups: 32 + 8 * n bytes."""
    rows, n = x.shape
    flat, out_flat, largest, at = x.reshape(-1), out.reshape(-1), np.empty(LANES, np.float32), 0
    scales = view(address(out), out.size // 4, np.float32)
    for first in range(0, rows, ROWS):
        group_amax = _amax_of_rows(flat, n * first, n, n)
        d = min_lanes(group_amax / 127, splat(_LARGEST_SCALE))
        nonzero = d > np.float32(3e-39)
        store(scales, at // 4, select(nonzero, d, splat(0)))
        inverse = select(nonzero, 1 / select(nonzero, d, splat(1)), splat(0))
        _round_rows(flat, n * first, n, n, inverse, out_flat, at + _KV_D_BYTES)
        at += _KV_D_BYTES + ROWS * n
        store(largest, 0, group_amax)
        amax[first : first + ROWS] = largest[:ROWS]
    keep_alive(out)
    return range_of(amax)


@kernel
def _encode_q8_k_r8(x, out, amax):
    """x float32 [8 * groups, n] -> out uint8 [8 * groups, n / 256 * 258], of groups: n / 256 * 2064 bytes."""
    rows, n = x.shape
    flat, out_flat, largest, at = x.reshape(-1), out.reshape(-1), np.empty(LANES, np.float32), 0
    d_words = view(address(out), out.size // 2, np.uint16)
    for first in range(0, rows, ROWS):
        group_amax = splat(0)
        for start in range(n * first, n * first + n, SUPERBLOCK):
            block_amax = _amax_of_rows(flat, start, n, SUPERBLOCK)
            group_amax = max_magnitude(block_amax, group_amax)
            store_half(d_words, at // 2, block_amax / 127)
            nonzero = block_amax > np.float32(1e-36)
            inverse = select(nonzero, np.float32(127) / select(nonzero, block_amax, splat(1)), splat(0))
            _round_rows(flat, start, n, SUPERBLOCK, inverse, out_flat, at + _K_D_BYTES)
            at += _K_D_BYTES + ROWS * SUPERBLOCK
        store(largest, 0, group_amax)
        amax[first : first + ROWS] = largest[:ROWS]
    keep_alive(out)
    return range_of(amax)


def _encode_rows(x: np.ndarray, importance: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, tuple[float, float]]:
    """As `EncodeWithAmax`, of q8_KV."""
    out, amax = np.empty((len(x), _META + x.shape[1]), np.uint8), np.empty(len(x), np.float32)
    return out, amax, _encode_q8_kv(x, out, amax)


def _encode_row_groups(
    stored: TensorType, encode_kernel: Callable, x: np.ndarray, importance: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, tuple[float, float]]:
    """As `EncodeWithAmax`, of a type of interleaved row groups."""
    out, amax = np.empty((len(x), stored.row_bytes(x.shape[1])), np.uint8), np.empty(len(x), np.float32)
    return out, amax, encode_kernel(x, out, amax)


_KV_R8 = partial(_encode_row_groups, TYPES["q8_KV_r8"], _encode_q8_kv_r8)
_K_R8 = partial(_encode_row_groups, TYPES["q8_k_r8"], _encode_q8_k_r8)

CODECS: dict[str, Codec] = {
    "q8_kv": codec_with_amax(_encode_rows, row_decoder("q8_KV"), rounds=True),
    "q8_kv_r8": codec_with_amax(_KV_R8, row_decoder("q8_KV_r8"), rounds=True),
    "q8_k_r8": codec_with_amax(_K_R8, row_decoder("q8_k_r8"), rounds=True),
}
