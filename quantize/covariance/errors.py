"""The error of decoded rows under a damped covariance."""

from __future__ import annotations

import numpy as np

from ...simd.memory import scratch
from .descent import row_errors
from .panels import multiply_rows
from .prepared import DampedCovariance


def product_errors(x: np.ndarray, decoded: np.ndarray, damped: DampedCovariance) -> np.ndarray:
    """r H r^T of each row, r = x - decoded: float32 [rows, n] twice -> float64 [rows]."""
    gradient = scratch("covariance_gradient", (len(x) * damped.size,), np.float32)
    gradient[:] = 0
    errors = np.empty(len(x))
    multiply_rows(x - decoded, damped.panels, damped.size, gradient)
    row_errors(x, decoded, gradient, damped.size, errors)
    return errors
