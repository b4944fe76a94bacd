"""Eight bits and wide scales: q8_KV, one scale for a row, its interleaved form q8_KV_r8, and q8_k_r8, one scale for 256
elements of each of eight interleaved rows.

q8_k_r8 is an encoding of its own, not a permutation of another type; q8_KV_r8 is one, but quantising costs so little that it is
worth writing its bytes where they belong at once. Codecs of both work on whole groups of eight rows in their interleaved layout
(spec C.2, C.3, D.8). None of the types uses importance.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...formats import TYPES
from ...simd.byte_lanes import (
    i8_to_float,
    load_bytes,
    load_f16,
    load_f32,
    load_strided_words,
    low_bytes,
    store_bytes,
    store_strided_words,
)
from ...simd.compile import kernel
from ...simd.lanes import LANES, load, max_lanes, reduce_max, reduce_sum, splat, store, store_half
from ...simd.scalar import ROUNDING_CONSTANT
from .registry import Codec, new_rows, refuse_nonfinite

_META = TYPES["q8_KV"].row_meta
SUPER, GROUP = 256, 8
_HEAD = 2 * GROUP  # bytes of float16 scales before the codes of a block of q8_k_r8
_LARGEST_SCALE = np.nextafter(np.finfo(np.float32).max / np.float32(127), np.float32(0))  # 127 times this is finite
_SCALES = 4 * GROUP  # bytes of float32 scales before the codes of a group of q8_KV_r8


@kernel
def _largest(x, start, size):
    """The largest magnitude of x[start : start + size], a multiple of 32 elements; NaN if one is NaN or infinite.

    Zero times a finite number is nothing, so the products add up to NaN exactly if there is another.
    """
    one = two = three = four = trace = splat(0)
    end = start + size - size % (4 * LANES)
    for i in range(start, end, 4 * LANES):
        a, b, c, d = load(x, i), load(x, i + LANES), load(x, i + 2 * LANES), load(x, i + 3 * LANES)
        one, two = max_lanes(abs(a), one), max_lanes(abs(b), two)
        three, four = max_lanes(abs(c), three), max_lanes(abs(d), four)
        trace = trace + (a * 0 + b * 0) + (c * 0 + d * 0)
    if end < start + size:
        a, b = load(x, end), load(x, end + LANES)
        one, two = max_lanes(abs(a), one), max_lanes(abs(b), two)
        trace = trace + (a * 0 + b * 0)
    return reduce_max(max_lanes(max_lanes(one, two), max_lanes(three, four))) + reduce_sum(trace)


@kernel
def _scale_of(top):
    """The scale of a row and its inverse, by its largest magnitude; both 0 where the inverse would be infinite."""
    d = min(top / np.float32(127), _LARGEST_SCALE)
    live = d > np.float32(3e-39)
    return (d, np.float32(1) / d) if live else (np.float32(0), np.float32(0))


@kernel
def _encode_rows(x, out, scales, sums):
    """out: uint8 [rows, row_bytes]; scales, sums: the same memory as float32 and int32. Returns whether all of x is finite."""
    finite = True
    totals = np.empty(LANES, np.float32)
    rows, n = x.shape
    flat, to = x.reshape(-1), out.reshape(-1)
    for r in range(rows):
        top = _largest(flat, n * r, n)
        finite &= top == top
        scales[r, 0], inverse = _scale_of(top)
        one, two = splat(0), splat(0)  # exact: below 2^24 for rows of up to two million elements
        for i in range(0, n, 2 * LANES):
            at, from_ = out.shape[1] * r + _META + i, n * r + i
            p, q = load(flat, from_) * inverse + ROUNDING_CONSTANT, load(flat, from_ + LANES) * inverse + ROUNDING_CONSTANT
            store_bytes(to, at, low_bytes(p))
            store_bytes(to, at + LANES, low_bytes(q))
            one, two = one + (p - ROUNDING_CONSTANT), two + (q - ROUNDING_CONSTANT)
        store(totals, 0, one + two)
        total = 0
        for lane in range(LANES):
            total += np.int32(totals[lane])
        sums[r, 1] = total
    return finite


@kernel
def _decode_rows(q, out):
    """q: uint8 [rows, row_bytes]; out: float32 [rows, n]."""
    n = out.shape[1]
    bytes_, to = q.reshape(-1), out.reshape(-1)
    for r in range(q.shape[0]):
        at = q.shape[1] * r
        d = load_f32(bytes_, at)
        for i in range(0, n, LANES):
            store(to, n * r + i, i8_to_float(load_bytes(bytes_, at + _META + i)) * d)


@kernel
def _encode_row_groups(x, out, scales):
    """x: float32 [8 * groups, n]; out: uint8 [groups * (32 + 8 * n)]; scales: the same memory as float32.

    Returns whether all of x is finite.
    """
    finite = True
    rows, n = x.shape
    flat = x.reshape(-1)
    for r in range(rows):
        at = (_SCALES + GROUP * n) * (r // GROUP)
        top = _largest(flat, n * r, n)
        finite &= top == top
        scales[at // 4 + r % GROUP], inverse = _scale_of(top)
        for i in range(0, n, LANES):
            y = load(flat, n * r + i) * inverse + ROUNDING_CONSTANT
            store_strided_words(out, at + _SCALES + GROUP * i + 4 * (r % GROUP), 4 * GROUP, low_bytes(y))
    return finite


@kernel
def _decode_row_groups(q, out):
    """q: uint8 [groups * (32 + 8 * n)]; out: float32 [8 * groups, n]."""
    rows, n = out.shape
    to = out.reshape(-1)
    for r in range(rows):
        at = (_SCALES + GROUP * n) * (r // GROUP)
        d = load_f32(q, at + 4 * (r % GROUP))
        for i in range(0, n, LANES):
            store(to, n * r + i, i8_to_float(load_strided_words(q, at + _SCALES + GROUP * i + 4 * (r % GROUP), 4 * GROUP)) * d)


@kernel
def _encode_groups(x, out, halves):
    """x: float32 [8 * groups, n]; out: uint8 [groups * n / 256 * 2064]; halves: the same memory as uint16.

    Returns whether all of x is finite.
    """
    finite = True
    tops = np.zeros(LANES, np.float32)
    words = np.empty(LANES, np.uint16)
    rows, n = x.shape
    flat = x.reshape(-1)
    columns = n // SUPER
    for b in range(rows // GROUP * columns):
        at = (_HEAD + GROUP * SUPER) * b
        for k in range(GROUP):
            start = n * (b // columns * GROUP + k) + b % columns * SUPER
            top = _largest(flat, start, SUPER)
            tops[k] = top
            finite &= top == top
            inverse = np.float32(127) / top if top > np.float32(1e-36) else np.float32(0)
            for i in range(0, SUPER, LANES):
                y = load(flat, start + i) * inverse + ROUNDING_CONSTANT
                store_strided_words(out, at + _HEAD + GROUP * i + 4 * k, 4 * GROUP, low_bytes(y))
        store_half(words, 0, load(tops, 0) / 127)
        for k in range(GROUP):
            halves[at // 2 + k] = words[k]
    return finite


@kernel
def _decode_groups(q, out):
    """q: uint8 [groups * n / 256 * 2064]; out: float32 [8 * groups, n]."""
    rows, n = out.shape
    to = out.reshape(-1)
    columns = n // SUPER
    for b in range(rows // GROUP * columns):
        at = (_HEAD + GROUP * SUPER) * b
        for k in range(GROUP):
            start, d = n * (b // columns * GROUP + k) + b % columns * SUPER, load_f16(q, at + 2 * k)
            for i in range(0, SUPER, LANES):
                store(to, start + i, i8_to_float(load_strided_words(q, at + _HEAD + GROUP * i + 4 * k, 4 * GROUP)) * d)


def _empty(name: str, x: np.ndarray) -> np.ndarray:
    return np.empty((len(x), TYPES[name].row_bytes(x.shape[1])), np.uint8)


def encode_rows(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    """q8_KV: float32 [rows, n] -> uint8 [rows, 8 + n] (spec D.8), without regard to importance.

    Raises NonFiniteError for NaN or infinity.
    """
    out = _empty("q8_KV", x)
    if not _encode_rows(x, out, out.view(np.float32), out.view(np.int32)):
        refuse_nonfinite(x)
    return out


def decode_rows(q: np.ndarray, n: int) -> np.ndarray:
    """q8_KV: uint8 [rows, 8 + n] -> float32 [rows, n] (spec D.8)."""
    out = new_rows(len(q), n)
    _decode_rows(q, out)
    return out


def _of_groups(name: str, encode_kernel: Callable, decode_kernel: Callable, scale: type[np.generic]) -> Codec:
    """A codec of whole groups of rows; scale: the type in which the encoder sees the bytes to write its scales."""

    def encode(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
        out = _empty(name, x)
        flat = out.reshape(-1)
        if not encode_kernel(x, flat, flat.view(scale)):
            refuse_nonfinite(x)
        return out

    def decode(q: np.ndarray, n: int) -> np.ndarray:
        out = new_rows(len(q), n)
        decode_kernel(q.reshape(-1), out)
        return out

    return Codec(encode, decode, looks=True)


CODECS: dict[str, Codec] = {
    "q8_kv": Codec(encode_rows, decode_rows, looks=True),
    "q8_kv_r8": _of_groups("q8_KV_r8", _encode_row_groups, _decode_row_groups, np.float32),
    "q8_k_r8": _of_groups("q8_k_r8", _encode_groups, _decode_groups, np.uint16),
}
