"""Keeping numbers of any size within what encoders can square: scaling by powers of two, and float16 without infinity."""

from __future__ import annotations

import numpy as np

from .iqk.fit import peaks
from .iqk.scale_search import DEAD

_LARGEST_HALF = np.float32(65504)
_ORDINARY = (-10, 2)  # binary exponents of weights and ...
_TAME = 20  # ... of importance that need no care


def normalised(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(float32 [units, n] divided by 2 ** exponents, int32 [units]): units of extreme weights only, to keep squares in range.

    Powers of two change nothing else.
    """
    tops = np.empty(len(x), np.float32)
    peaks(x, tops)
    exponents = np.frexp(tops)[1]
    exponents[(tops < DEAD) | ((exponents > _ORDINARY[0]) & (exponents <= _ORDINARY[1]))] = 0
    return (np.ldexp(x, -exponents[:, None]) if exponents.any() else x), exponents


def tamed(importance: np.ndarray) -> np.ndarray:
    """Importance times a power of two, if it is very large or very small."""
    exponent = np.frexp(importance.max(initial=0))[1]
    return np.ldexp(importance, -exponent) if abs(exponent) > _TAME else importance


def as_half(d: np.ndarray) -> np.ndarray:
    """float32 -> float16, the largest number in place of infinity."""
    return np.clip(d, -_LARGEST_HALF, _LARGEST_HALF).astype("<f2")
