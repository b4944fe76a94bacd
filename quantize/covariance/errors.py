"""The errors of decoded rows under a damped covariance, and under the curvature of their outputs too."""

from __future__ import annotations

import numpy as np

from ...simd.memory import scratch
from .coupling import Coupling, coupled_error
from .descent.scalar_descent import row_errors
from .matrix.panels import multiply_rows, padded
from .matrix.prepared import DampedCovariance, PreparedCovariance


def product_errors(x: np.ndarray, decoded: np.ndarray, damped: DampedCovariance) -> np.ndarray:
    """r H r^T of each row, r = x - decoded: float32 [rows, n] twice -> float64 [rows]."""
    errors = np.empty(len(x))
    row_errors(x, decoded, _product(x - decoded, damped), damped.size, errors)
    return errors


def coupled_error_of(x: np.ndarray, decoded: np.ndarray, prepared: PreparedCovariance, curvature: np.ndarray) -> float:
    """tr(A R H R^T), R = x - decoded: float32 [rows, n] twice, A = curvature: float32 [rows, rows]. H is the damped covariance,
    or its diagonal where too few tokens were seen for more."""
    damped, (rows, n) = prepared.damped, x.shape
    if damped is not None:
        size, gradient = damped.size, _product(x - decoded, damped)
    else:
        size = padded(n)
        full = np.zeros((rows, size), np.float32)
        full[:, :n] = (x - decoded) * prepared.importance
        gradient = full.reshape(-1)
    return float(coupled_error(Coupling(curvature, np.ones(rows, np.float32), False), x, decoded, gradient, size))


def _product(r: np.ndarray, damped: DampedCovariance) -> np.ndarray:
    gradient = scratch("covariance_gradient", (len(r) * damped.size,), np.float32)
    gradient[:] = 0
    multiply_rows(r, damped.panels, damped.size, gradient)
    return gradient
