"""What every encoder does with the importance of columns: the weights of errors, and the guard against dead blocks.

Encoders take importance as a float32 array of one row [1, n] that holds for all rows, or of a row for each [rows, n] (after
the guard). Kernels read `importance[r % importance.shape[0]]`. Without importance they are given NONE, of no rows.
Spec D.0; sums run in element order with fused multiply-add, as in the reference.
"""

from __future__ import annotations

import numpy as np

from ...simd.compile import kernel
from ...simd.scalar import fma

NONE = np.empty((0, 0), np.float32)

# Below this mean of squares (of the importance, the weights, or their product) a block counts as dead.
_DEAD = 1e-18
_INSTEAD = np.float32(1e-9)


def as_rows(importance: np.ndarray | None) -> np.ndarray:
    """float32 [n], [rows, n] or None -> float32 [1, n], [rows, n] or NONE (C-contiguous), as the kernels take it."""
    if importance is None:
        return NONE
    return np.ascontiguousarray(np.atleast_2d(importance), np.float32)


def guarded(x: np.ndarray, importance: np.ndarray | None, block: int) -> np.ndarray:
    """Importance that gives every block of every row some weight, for the encoders that ask for it (spec D.0).

    x: float32 [rows, n]; importance: float32 [n], [rows, n] or None; block: elements, 16 or 32, dividing n. Where the sum of
    v^2, of x^2 or of v*|x| over a block is next to nothing, all its v become 1e-9. Returns [1, n] when no block needed it, else
    [rows, n]; NONE for None.
    """
    v = as_rows(importance)
    if v is NONE or not _has_dead(x, v, block):
        return v
    out = np.empty_like(x)
    _revive(x, v, block, out)
    return out


@kernel
def _is_dead(x, v, start, block):
    limit = np.float32(block * _DEAD)
    vv = xx = vx = np.float32(0)
    for j in range(start, start + block):
        vv = fma(v[j], v[j], vv)
        xx = fma(x[j], x[j], xx)
        vx = fma(v[j], abs(x[j]), vx)
        if vv > limit and xx > limit and vx > limit:  # sums of what is never negative: they stay above
            return False
    return True


@kernel
def _has_dead(x, importance, block):
    rows, n = x.shape
    for r in range(rows):
        v = importance[r % importance.shape[0]]
        for start in range(0, n, block):
            if _is_dead(x[r], v, start, block):
                return True
    return False


@kernel
def _revive(x, importance, block, out):
    rows, n = x.shape
    for r in range(rows):
        v = importance[r % importance.shape[0]]
        for start in range(0, n, block):
            dead = _is_dead(x[r], v, start, block)
            for j in range(start, start + block):
                out[r, j] = _INSTEAD if dead else v[j]


@kernel
def mean_square(x):
    """Mean of the squares of a float32 vector, summed in order."""
    total = np.float32(0)
    for j in range(x.size):
        total = fma(x[j], x[j], total)
    return total / np.float32(x.size)


@kernel
def weigh(x, v, sigma2, w):
    """w[j] = v[j] * sqrt(sigma2 + x[j]^2) for float32 vectors of one length: the weight of the squared error of element j."""
    for j in range(x.size):
        w[j] = v[j] * np.sqrt(fma(x[j], x[j], sigma2))
