"""What codebook searches take of a superblock: weights scaled to at most 1, and the weights of their squared errors.

w = qw * sqrt(sigma2_factor * mean(x^2) + x^2), qw being the importance (docs/formats/encoders.md, codebook i-quants); without
importance qw = 1. llama.cpp then takes 0.25 * mean(x^2) + x^2 or x^2, which neglects small elements more than the plain squared
error does, and does not encode some types at all.
"""

from __future__ import annotations

import numpy as np

from ....simd.compile import kernel
from ....simd.lanes import LANES, fold_sum, load, max_lanes, reduce_max, splat, sqrt_lanes, store

# Elements below this are zero in float16 whatever their code; importance below the second counts as none.
_ZERO_AMAX = np.float32(1e-12)
_ZERO_IMPORTANCE = np.float32(1e-30)
# Least importance of an element, relative to the largest: no element has weight 0.
_MIN_RELATIVE_IMPORTANCE = np.float32(1e-12)


@kernel
def _amax(x):
    """Largest magnitude of a float32 vector of a multiple of 16 elements."""
    amax = splat(0)
    for j in range(0, x.size, LANES):
        amax = max_lanes(amax, abs(load(x, j)))
    return reduce_max(amax)


@kernel
def _inverse_max_importance(importance, start, n, count):
    """1 / the largest importance of elements start ... start + count - 1 of a matrix with rows of n; 0 if they have none."""
    max_importance = np.float32(0)
    if importance.size > 0:
        max_importance = _amax(importance[(start // n) % importance.shape[0]][start % n : start % n + count])
    return np.float32(1) / max_importance if max_importance > _ZERO_IMPORTANCE else np.float32(0)


@kernel
def _error_weights(x, inverse_amax, importance, inverse_importance, start, n, count, sigma2_factor, w):
    """Weights of the squared errors of elements start ... start + count - 1 of x, float32 [rows * n], to w[0 ... count - 1].

    None is negative. inverse_amax: scales x to magnitudes of at most 1. inverse_importance: scales the importance to at most 1;
    0: there is none. The mean square is over the `count` elements.
    """
    squares = splat(0)
    for j in range(start, start + count, LANES):
        xj = load(x, j) * inverse_amax
        squares = squares + xj * xj
    sigma2 = sigma2_factor * fold_sum(squares) / np.float32(count)
    if inverse_importance > 0:
        qw, column = importance[(start // n) % importance.shape[0]], start % n
        for j in range(0, count, LANES):
            xj = load(x, start + j) * inverse_amax
            store(w, j, (load(qw, column + j) * inverse_importance + _MIN_RELATIVE_IMPORTANCE) * sqrt_lanes(xj * xj + sigma2))
    else:
        for j in range(0, count, LANES):
            xj = load(x, start + j) * inverse_amax
            store(w, j, sqrt_lanes(xj * xj + sigma2))


@kernel
def prepare_superblock(x, importance, start, n, count, sigma2_span, sigma2_factor, normalised, w):
    """Elements start ... start + count - 1 of x, float32 [rows * n], scaled to magnitudes of at most 1, and their weights.

    importance: float32 [1 or rows, n], or of no rows. sigma2_span: elements over which the mean square in the weights is taken.
    normalised, w: float32 [count], out. Returns the largest magnitude; 0 if the elements are zero in float16 whatever their
    codes, and nothing is written then.
    """
    amax = _amax(x[start : start + count])
    if amax < _ZERO_AMAX:
        return np.float32(0)
    inverse_amax = np.float32(1) / amax
    inverse_importance = _inverse_max_importance(importance, start, n, count)
    for j in range(0, count, sigma2_span):
        _error_weights(
            x, inverse_amax, importance, inverse_importance, start + j, n, sigma2_span, sigma2_factor, w[j : j + sigma2_span]
        )
    for j in range(0, count, LANES):
        store(normalised, j, load(x, start + j) * inverse_amax)
    return amax
