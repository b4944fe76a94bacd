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
def _row_magnitudes(bits, out):
    """The largest magnitude of each row of uint32 [rows, n], the bits of float32 numbers, as bits; above infinity: NaN."""
    for r in range(bits.shape[0]):
        row, largest = bits[r], np.uint32(0)
        for i in range(row.size):
            largest = max(largest, np.uint32(row[i] & np.uint32(0x7FFFFFFF)))
        out[r] = largest


def row_amax(x: np.ndarray) -> np.ndarray:
    """Largest magnitude of each row: float32 [rows, n], C-contiguous -> float32 [rows]; infinity or NaN where a row has one."""
    amax = np.empty(len(x), np.float32)
    _row_magnitudes(x.view(np.uint32), amax.view(np.uint32))
    return amax


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
