"""Keeping encoders within the range of their float formats: scaling by powers of two, and float16 scales.

Encoders square weights and importance in float32. Rows whose magnitudes are extreme are scaled by a power of two beforehand,
which changes nothing else, and their scales by its inverse afterwards.
"""

from __future__ import annotations

import math

import numpy as np

from ...formats import PlanError
from ...simd.block_reductions import max_magnitude, reduce_max_magnitude
from ...simd.compile import kernel
from ...simd.lanes import LANES, load, splat
from ...simd.memory import address, keep_alive, view
from ...simd.scalar import float_from_bits
from .codec import raise_nonfinite
from .importance import importance_rows

_LARGEST_F16 = np.float32(65504)
_MAX_IMPORTANCE_EXPONENT = 20  # binary exponents up to this magnitude need no scaling
_INFINITY = np.uint32(0x7F800000)  # as bits; those above are NaN and negative numbers

# Larger weights of columns are extreme: as multiples of the median, and as binary exponents. See `limit_importance`.
_LARGEST_RATIO = 2.0**20
_MAX_EXPONENT = 40
_LARGEST_IMPORTANCE = 2.0**_MAX_EXPONENT  # all that is below has such an exponent


@kernel
def _row_magnitudes(bits, mask, out):
    """The largest magnitude of each row of numbers given as bits, uint32 or uint16 [rows, n], as bits; above infinity: NaN.

    mask: all bits but the sign's; out: uint32 [rows].
    """
    for r in range(bits.shape[0]):
        row, largest = bits[r], np.uint32(0)
        for i in range(row.size):
            largest = max(largest, np.uint32(row[i] & mask))
        out[r] = largest


def row_amax(x: np.ndarray) -> np.ndarray:
    """Largest magnitude of each row: float32 [rows, n], C-contiguous -> float32 [rows]; infinity or NaN where a row has one."""
    amax = np.empty(len(x), np.float32)
    _row_magnitudes(x.view(np.uint32), np.uint32(0x7FFFFFFF), amax.view(np.uint32))
    return amax


def bf16_row_amax(words: np.ndarray) -> np.ndarray:
    """As `row_amax`, of bf16 numbers, uint16 [rows, n]."""
    amax = np.empty(len(words), np.uint32)
    _row_magnitudes(words, np.uint16(0x7FFF), amax)
    return (amax << 16).view(np.float32)


@kernel
def extremes(values):
    """The least and the largest of float32 [n], n > 0, C-contiguous; NaN twice if one is NaN. Faster than numpy."""
    bits = view(address(values), values.size, np.uint32)  # ordered as the numbers are where none is negative or NaN
    least = largest = bits[0]
    for i in range(bits.size):
        least, largest = min(least, bits[i]), max(largest, bits[i])
    if largest <= _INFINITY:
        keep_alive(values)
        return float_from_bits(np.int32(least)), float_from_bits(np.int32(largest))
    low = high = values[0]
    for i in range(values.size):
        low, high = min(low, values[i]), max(high, values[i])
        if values[i] != values[i]:
            low = high = values[i]
            break
    keep_alive(values)
    return low, high


@kernel
def amax_of(x, start, size, to_line=0):
    """Largest magnitude of x[start : start + size], size a multiple of 16; infinity or NaN if an element is.

    to_line: elements from `start` to where a cache line begins, fewer than 16: vectors are read from there on.
    """
    last = start + size - LANES
    begin = start + to_line
    end = begin + (size - to_line) // (4 * LANES) * (4 * LANES)
    max1 = max2 = max3 = splat(0)
    max4 = max_magnitude(load(x, start), max3)
    for i in range(begin, end, 4 * LANES):
        max1, max2 = max_magnitude(load(x, i), max1), max_magnitude(load(x, i + LANES), max2)
        max3, max4 = max_magnitude(load(x, i + 2 * LANES), max3), max_magnitude(load(x, i + 3 * LANES), max4)
    for i in range(end, last, LANES):
        max1 = max_magnitude(load(x, i), max1)
    max2 = max_magnitude(load(x, last), max2)
    return reduce_max_magnitude(max_magnitude(max_magnitude(max1, max2), max_magnitude(max3, max4)))


NO_ROWS = np.float32(np.inf), np.float32(0)  # the range of none, for `with_row`


@kernel
def with_row(range_, amax):
    """The least and the largest of the largest magnitudes of rows, with that of one more; the first that is infinite or NaN
    twice, if one is."""
    least, largest = range_
    if not largest < np.inf:
        return range_
    return (min(least, amax), max(largest, amax)) if amax < np.inf else (amax, amax)


def finite_amax(x: np.ndarray) -> tuple[np.ndarray, tuple[float, float]]:
    """The largest magnitude of each row of float32 [rows, n], float32 [rows], the least and the largest of these. Raises
    NonFiniteError for NaN or infinity in x."""
    amax = row_amax(x)
    range_ = extremes(amax)
    if not range_[1] < np.inf:
        raise_nonfinite(x)
    return amax, range_


def limit_importance(importance: np.ndarray) -> np.ndarray:
    """Importance whose extremes encoders can work with: float32 [n] -> float32 [n]. Raises PlanError for entries that are
    negative or not finite.

    Encoders add squares that importance weighs in float32: beside a column that weighs 2^20 times as much as most do, sums and
    the determinants of least squares have no digits left for those. No column weighs more than that here. Of importance that is
    very large altogether, a power of two is taken out, since `guard_importance` sets columns without any to 1e-9. Importance
    without such extremes stays as it is.
    """
    if not importance.size:
        return importance
    least, largest = extremes(importance)
    if least >= 0 and largest <= _LARGEST_RATIO * least and largest < _LARGEST_IMPORTANCE:
        return importance
    if not (least >= 0 and largest < np.inf):
        raise PlanError("importance has entries that are negative, infinite or NaN: collect the imatrix again")
    if largest > _LARGEST_RATIO * least:
        limit = _LARGEST_RATIO * float(np.median(importance[importance > 0]))
        if limit < largest:
            largest = limit
            importance = np.minimum(importance, np.float32(limit))
    exponent = math.frexp(largest)[1]
    return np.ldexp(importance, -exponent) if exponent > _MAX_EXPONENT else importance


def normalise_rows(
    x: np.ndarray, exponents: tuple[int, int], min_amax: float | np.floating = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Scales rows of extreme magnitude: float32 [rows, n] -> (float32 [rows, n] = x / 2^shifts, int32 shifts [rows]).

    exponents: rows whose amax has a binary exponent (of frexp) above the first and up to the second stay as they are, and so
    do rows with an amax below min_amax; their shift is 0.
    """
    amax = row_amax(x)
    shifts = np.frexp(amax)[1]
    shifts[(amax < min_amax) | ((shifts > exponents[0]) & (shifts <= exponents[1]))] = 0
    return (np.ldexp(x, -shifts[:, None]) if shifts.any() else x), shifts


def normalise_importance(importance: np.ndarray) -> np.ndarray:
    """Importance times a power of two that brings its maximum to 0.5 ... 1, if that is very large or very small."""
    exponent = np.frexp(importance.max(initial=0))[1]
    return importance_rows(np.ldexp(importance, -exponent)) if abs(exponent) > _MAX_IMPORTANCE_EXPONENT else importance


def to_f16(d: np.ndarray) -> np.ndarray:
    """float32 -> float16 (little-endian), the largest finite number in place of infinity."""
    return np.clip(d, -_LARGEST_F16, _LARGEST_F16).astype("<f2")
