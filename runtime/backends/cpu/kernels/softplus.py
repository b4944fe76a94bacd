"""log(1 + e^x) inside kernels, of one float32 and of sixteen lanes."""

from __future__ import annotations

import math

import numpy as np

from .....simd.compile import kernel
from .....simd.exponential import exp_lanes
from .....simd.lanes import fma_lanes, max_lanes, min_lanes, splat

# 2 atanh(z) / z = 2 + 2 z^2 / 3 + ... + 2 z^14 / 15
_ATANH = tuple(np.float32(2 / n) for n in range(1, 16, 2))


@kernel
def softplus(x):
    """log(1 + e^x) of a float32, computed in float64: the C library's last bit does not show."""
    return x if x > np.float32(20) else np.float32(math.log1p(math.exp(np.float64(x))))


@kernel
def softplus_lanes(x):
    """log(1 + e^x) of sixteen float32 lanes, within 2e-7 of it: max(x, 0) + log(1 + u), u = e^-|x|.

    With z = u / (2 + u), at most 1/3, log(1 + u) is 2 atanh(z).
    """
    u = exp_lanes(min_lanes(x, splat(0) - x))
    z = u / (u + 2)
    square = z * z
    total = splat(_ATANH[7])
    total = fma_lanes(total, square, splat(_ATANH[6]))
    total = fma_lanes(total, square, splat(_ATANH[5]))
    total = fma_lanes(total, square, splat(_ATANH[4]))
    total = fma_lanes(total, square, splat(_ATANH[3]))
    total = fma_lanes(total, square, splat(_ATANH[2]))
    total = fma_lanes(total, square, splat(_ATANH[1]))
    total = fma_lanes(total, square, splat(_ATANH[0]))
    return max_lanes(x, splat(0)) + z * total
