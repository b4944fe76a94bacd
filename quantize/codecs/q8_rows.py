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
from ...simd.lanes import LANES, lane_at, load, mask_from_bits, min_lanes, reduce_min, select, splat, store, store_half
from ...simd.memory import address, elements_to_line, keep_alive, prefetch_elements, view
from ...simd.scalar import ROUNDING_BITS, ROUNDING_CONSTANT
from ...simd.target import target
from .codec import Codec, Encoded, codec_with_amax
from .float_range import NO_ROWS, amax_of, with_row
from .row_decoder import row_decoder

_META = TYPES["q8_KV"].row_meta
SUPERBLOCK, ROWS = 256, 8
_ALL_AT_ONCE = target().lane_registers > ROWS  # whether registers hold the largest magnitudes of a group, and more
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
def _store_codes(x, start, size, to_line, inverse, following, out, at):
    """Rounds x[start : start + size], size a multiple of 16, to bytes out[at : at + size].

    Returns the sum of the codes, and the `amax_of` as many elements from `following` on, which are to be rounded later: to look
    at both in one loop leaves no time in which a processor waits for memory, or for a scale. Vectors are read where cache lines
    begin, `to_line` elements from either start on, but for the first and the last ones.
    """
    ahead, last, at = following - start, start + size - LANES, at - start
    begin = start + to_line
    end = begin + (size - to_line) // (4 * LANES) * (4 * LANES)
    rest = (start + size - end) % LANES
    a, b = load(x, start) * inverse + ROUNDING_CONSTANT, load(x, last) * inverse + ROUNDING_CONSTANT
    store_bytes(out, at + start, low_bytes(a))
    store_bytes(out, at + last, low_bytes(b))
    max1, max2 = max_magnitude(load(x, following), splat(0)), max_magnitude(load(x, last + ahead), splat(0))
    # Of sums of bits: those of a rounded number are a constant plus the code.
    a = select(mask_from_bits((1 << to_line) - 1), a, splat(0))
    b = select(mask_from_bits(0xFFFF << (LANES - rest)), b, splat(0))
    total, tail = splat(0), sum_bits(a, b)
    for i in range(begin, end, 4 * LANES):
        a, b = load(x, i) * inverse, load(x, i + LANES) * inverse
        c, d = load(x, i + 2 * LANES) * inverse, load(x, i + 3 * LANES) * inverse
        total = sum_bits(store_rounded(out, at + i, a, b, c, d), total)
        j = i + ahead
        max1, max2 = max_magnitude(load(x, j), max1), max_magnitude(load(x, j + LANES), max2)
        max1, max2 = max_magnitude(load(x, j + 2 * LANES), max1), max_magnitude(load(x, j + 3 * LANES), max2)
    for i in range(end, last + 1, LANES):
        a = load(x, i) * inverse + ROUNDING_CONSTANT
        store_bytes(out, at + i, low_bytes(a))
        tail, max1 = sum_bits(tail, a), max_magnitude(load(x, i + ahead), max1)
    constant = (size - (end - begin)) * ROUNDING_BITS
    return np.int32(reduce_sum_bits(sum_bits(total, tail)) - constant), reduce_max_magnitude(max_magnitude(max1, max2))


@kernel
def encode_q8_kv_row(x, out, scales, sums):
    """x float32 [n] -> out uint8 [8 + n]; scales, sums: the memory of `out` as float32 and as int32, for the row's scale and
    the sum of its codes."""
    scales[0], inverse = _scale_and_inverse(amax_of(x, 0, x.size))
    sums[1], _ = _store_codes(x, 0, x.size, 0, inverse, 0, out, _META)


@kernel
def _encode_q8_kv(x, out):
    """x float32 [rows, n] -> out uint8 [rows, 8 + n]. Of this and the next kernels: returns the least and the largest of the
    rows' largest magnitudes."""
    rows, n = x.shape
    words = out.shape[1] // 4
    scales, sums = view(address(out), (rows, words), np.float32), view(address(out), (rows, words), np.int32)
    flat, out_flat = x.reshape(-1), out.reshape(-1)
    to_line, last = elements_to_line(flat), (rows - 1) * n
    largest, next_largest = amax_of(flat, 0, n, to_line), amax_of(flat, min(n, last), n, to_line)
    range_ = NO_ROWS
    for r in range(rows):
        scales[r, 0], inverse = _scale_and_inverse(largest)
        following, at = min((r + 2) * n, last), out.shape[1] * r + _META
        # The largest of the row after the next is found meanwhile: no row waits for its scale.
        sums[r, 1], later = _store_codes(flat, r * n, n, to_line, inverse, following, out_flat, at)
        range_ = with_row(range_, largest)
        largest, next_largest = next_largest, later
    keep_alive(out)
    return range_


@kernel
def _amax_of_four(x, start, n, size, to_line):
    """The largest magnitudes of four such runs, of the elements whose numbers are one modulo 16, as lanes."""
    s1, s2, s3 = start + n, start + 2 * n, start + 3 * n
    m0 = m1 = m2 = m3 = splat(0)
    for place in range(to_line - LANES if to_line else 0, size, LANES):
        i = min(max(place, 0), size - LANES)
        m0, m1 = max_magnitude(load(x, start + i), m0), max_magnitude(load(x, s1 + i), m1)
        m2, m3 = max_magnitude(load(x, s2 + i), m2), max_magnitude(load(x, s3 + i), m3)
    return m0, m1, m2, m3


@kernel
def _amax_of_rows(x, start, n, size, to_line):
    """The largest magnitude of x[start : start + size] and of the seven runs that follow, each n after the last one: lanes 0 to
    7, and again 8 to 15."""
    if not _ALL_AT_ONCE:
        m0, m1, m2, m3 = _amax_of_four(x, start, n, size, to_line)
        m4, m5, m6, m7 = _amax_of_four(x, start + 4 * n, n, size, to_line)
        return max_of_eight(m0, m1, m2, m3, m4, m5, m6, m7)
    s1, s2, s3, s4 = start + n, start + 2 * n, start + 3 * n, start + 4 * n
    s5, s6, s7 = start + 5 * n, start + 6 * n, start + 7 * n
    m0 = m1 = m2 = m3 = m4 = m5 = m6 = m7 = splat(0)
    for place in range(to_line - LANES if to_line else 0, size, LANES):
        i = min(max(place, 0), size - LANES)
        m0, m1 = max_magnitude(load(x, start + i), m0), max_magnitude(load(x, s1 + i), m1)
        m2, m3 = max_magnitude(load(x, s2 + i), m2), max_magnitude(load(x, s3 + i), m3)
        m4, m5 = max_magnitude(load(x, s4 + i), m4), max_magnitude(load(x, s5 + i), m5)
        m6, m7 = max_magnitude(load(x, s6 + i), m6), max_magnitude(load(x, s7 + i), m7)
    return max_of_eight(m0, m1, m2, m3, m4, m5, m6, m7)


@kernel
def _round_rows(x, start, n, size, to_line, inverse, ahead, out, at):
    """Rounds such runs times their inverse scales, lanes 0 to 7, to bytes from out[at] on: four of each row in turn. Asks for
    the elements `ahead` of these, which are to be read next."""
    s1, s2, s3, s4 = start + n, start + 2 * n, start + 3 * n, start + 4 * n
    s5, s6, s7 = start + 5 * n, start + 6 * n, start + 7 * n
    i0, i1, i2, i3 = lane_at(inverse, 0), lane_at(inverse, 1), lane_at(inverse, 2), lane_at(inverse, 3)
    i4, i5, i6, i7 = lane_at(inverse, 4), lane_at(inverse, 5), lane_at(inverse, 6), lane_at(inverse, 7)
    for place in range(to_line - LANES if to_line else 0, size, LANES):
        i = min(max(place, 0), size - LANES)
        j = i + ahead
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


@kernel
def _range_of_lanes(least, largest):
    """The least and the largest of lanes; twice the largest if that is infinite or NaN."""
    end = reduce_max_magnitude(largest)
    return (reduce_min(least) if end < np.inf else end), end


# Scales of the next two are stored sixteen at a time, eight too many: codes are written over these.


@kernel
def _encode_q8_kv_r8(x, out):
    """x float32 [8 * groups, n] -> out uint8 [8 * groups, 4 + n], of groups: 32 + 8 * n bytes."""
    rows, n = x.shape
    flat, out_flat, least, largest, at = x.reshape(-1), out.reshape(-1), splat(np.inf), splat(0), 0
    scales, to_line = view(address(out), out.size // 4, np.float32), elements_to_line(flat)
    magnitudes = np.empty(LANES, np.float32)
    for first in range(0, rows, ROWS):
        # Row by row: eight rows at once, which begin in the same set of the cache, are read no faster.
        for row in range(ROWS):
            magnitudes[row] = magnitudes[ROWS + row] = amax_of(flat, n * (first + row), n, to_line)
        group_amax = load(magnitudes, 0)
        d = min_lanes(group_amax / 127, splat(_LARGEST_SCALE))
        nonzero = d > np.float32(3e-39)
        store(scales, at // 4, select(nonzero, d, splat(0)))
        inverse = select(nonzero, 1 / select(nonzero, d, splat(1)), splat(0))
        _round_rows(flat, n * first, n, n, to_line, inverse, SUPERBLOCK, out_flat, at + _KV_D_BYTES)
        at += _KV_D_BYTES + ROWS * n
        least, largest = min_lanes(group_amax, least), max_magnitude(group_amax, largest)
    keep_alive(out)
    return _range_of_lanes(least, largest)


@kernel
def _encode_q8_k_r8(x, out):
    """x float32 [8 * groups, n] -> out uint8 [8 * groups, n / 256 * 258], of groups: n / 256 * 2064 bytes."""
    rows, n = x.shape
    flat, out_flat, least, largest, at = x.reshape(-1), out.reshape(-1), splat(np.inf), splat(0), 0
    d_words, to_line = view(address(out), out.size // 2, np.uint16), elements_to_line(flat)
    for first in range(0, rows, ROWS):
        group_amax = splat(0)
        for start in range(n * first, n * first + n, SUPERBLOCK):
            block_amax = _amax_of_rows(flat, start, n, SUPERBLOCK, to_line)
            group_amax = max_magnitude(block_amax, group_amax)
            store_half(d_words, at // 2, block_amax / 127)
            nonzero = block_amax > np.float32(1e-36)
            inverse = select(nonzero, np.float32(127) / select(nonzero, block_amax, splat(1)), splat(0))
            is_last = start + SUPERBLOCK == n * first + n
            ahead = SUPERBLOCK + (ROWS - 1) * n if is_last else SUPERBLOCK  # what is read next
            _round_rows(flat, start, n, SUPERBLOCK, to_line, inverse, ahead, out_flat, at + _K_D_BYTES)
            at += _K_D_BYTES + ROWS * SUPERBLOCK
        least, largest = min_lanes(group_amax, least), max_magnitude(group_amax, largest)
    keep_alive(out)
    return _range_of_lanes(least, largest)


def _encode_rows(x: np.ndarray, importance: np.ndarray | None) -> Encoded:
    """As `EncodeWithAmax`, of q8_KV."""
    out = np.empty((len(x), _META + x.shape[1]), np.uint8)
    return out, None, _encode_q8_kv(x, out)


def _encode_row_groups(stored: TensorType, encode_kernel: Callable, x: np.ndarray, importance: np.ndarray | None) -> Encoded:
    """As `EncodeWithAmax`, of a type of interleaved row groups."""
    out = np.empty((len(x), stored.row_bytes(x.shape[1])), np.uint8)
    return out, None, encode_kernel(x, out)


_KV_R8 = partial(_encode_row_groups, TYPES["q8_KV_r8"], _encode_q8_kv_r8)
_K_R8 = partial(_encode_row_groups, TYPES["q8_k_r8"], _encode_q8_k_r8)

CODECS: dict[str, Codec] = {
    "q8_kv": codec_with_amax(_encode_rows, row_decoder("q8_KV"), rounds=True),
    "q8_kv_r8": codec_with_amax(_KV_R8, row_decoder("q8_KV_r8"), rounds=True),
    "q8_k_r8": codec_with_amax(_K_R8, row_decoder("q8_k_r8"), rounds=True),
}
