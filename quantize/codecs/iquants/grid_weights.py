"""The weights that codebook searches give to the errors of elements, in units where nothing overflows.

Weights are v * sqrt(factor * mean(x^2) + x^2), v being the importance (spec D.3); without importance v = 1. The reference then
takes 0.25 * mean(x^2) + x^2 or x^2, which neglects small elements more than plain squared error does, and it has no formula at
all for some types.
"""

from __future__ import annotations

import numpy as np

from ....simd.compile import kernel
from ....simd.lanes import LANES, fold_sum, load, max_lanes, reduce_max, splat, sqrt_lanes, store

# Elements below this are zero in float16, whatever their code; importance below the other counts as none.
NOTHING = np.float32(1e-12)
_NO_IMPORTANCE = np.float32(1e-30)
# What part of the greatest importance its elements have at least: none is ever left out of account.
_LEAST = np.float32(1e-12)


@kernel
def peak_of(x):
    """The largest magnitude of a float32 vector of a whole number of lanes."""
    peak = splat(0)
    for j in range(0, x.size, LANES):
        peak = max_lanes(peak, abs(load(x, j)))
    return reduce_max(peak)


@kernel
def inverse_of_greatest(importance, start, n, count):
    """1 / the greatest importance of elements start ... start + count - 1 of a matrix with rows of n; 0 if they have none."""
    greatest = np.float32(0)
    if importance.size > 0:
        greatest = peak_of(importance[(start // n) % importance.shape[0]][start % n : start % n + count])
    return np.float32(1) / greatest if greatest > _NO_IMPORTANCE else np.float32(0)


@kernel
def take_weights(x, over, importance, inverse, start, n, count, factor, w):
    """Weights of the errors of elements start ... start + count - 1 of x, float32 [rows * n], to w[0 ...]; none is negative.

    inverse: brings the importance to at most 1; 0: all alike. over: brings x to at most 1. The mean square is over `count`.
    """
    total = splat(0)
    for j in range(start, start + count, LANES):
        xj = load(x, j) * over
        total = total + xj * xj
    sigma2 = factor * fold_sum(total) / np.float32(count)
    if inverse > 0:
        v, column = importance[(start // n) % importance.shape[0]], start % n
        for j in range(0, count, LANES):
            xj = load(x, start + j) * over
            store(w, j, (load(v, column + j) * inverse + _LEAST) * sqrt_lanes(xj * xj + sigma2))
    else:
        for j in range(0, count, LANES):
            xj = load(x, start + j) * over
            store(w, j, sqrt_lanes(xj * xj + sigma2))
