"""Keeping encoders within the range of their float formats: scaling by powers of two, and float16 scales.

Encoders square weights and importance in float32. Rows whose magnitudes are extreme are scaled by a power of two beforehand,
which changes nothing else, and their scales by its inverse afterwards.
"""

from __future__ import annotations

import numpy as np

from ...simd.compile import kernel
from .importance import importance_rows

_LARGEST_F16 = np.float32(65504)
_MAX_IMPORTANCE_EXPONENT = 20  # binary exponents up to this magnitude need no scaling


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
def _extremes(values):
    least = largest = values[0]
    for i in range(values.size):
        least, largest = min(least, values[i]), max(largest, values[i])
        if values[i] != values[i]:
            return values[i], values[i]
    return least, largest


def extremes(values: np.ndarray) -> tuple[float, float]:
    """The least and the largest of float32 [n], n > 0, C-contiguous; NaN twice if one is NaN. Faster than numpy."""
    return _extremes(values)


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
