"""Whether encoded rows are nearer to their weights than zeros would be."""

from __future__ import annotations

import numpy as np

from ...formats import TYPES
from ...simd.compile import kernel
from ...simd.lanes import LANES, fma_lanes, load, reduce_sum, splat
from ...simd.memory import scratch
from .row_decoder import call_decoder, decoder_address

_NO_ROWS = np.empty(0, np.intp)
_WEIGHTS = 1 << 12  # decoded at a time: they stay in a core's nearest cache


@kernel
def _rows_not_nearer(x, decoder, source, row_bytes, group, y, y_address, amax, found):
    """y: float32 [at a time, n], whole groups of rows. Returns whether there are any.

    |y - x|^2 - |x|^2 is the sum of y (y - 2 x).
    """
    rows, n = x.shape
    minus_two = splat(-2)
    any_found = False
    for first in range(0, rows, y.shape[0]):
        count = min(y.shape[0], rows - first)
        call_decoder(decoder, source + first * row_bytes, row_bytes, count // group, n, y_address)
        for r in range(count):
            xr, yr = x[first + r], y[r]
            sum1 = sum2 = splat(0)
            for i in range(0, n, 2 * LANES):
                a, b = load(yr, i), load(yr, i + LANES)
                sum1 = fma_lanes(a, fma_lanes(minus_two, load(xr, i), a), sum1)
                sum2 = fma_lanes(b, fma_lanes(minus_two, load(xr, i + LANES), b), sum2)
            total = reduce_sum(sum1 + sum2)
            is_nearer = total < 0 or (total == 0 and amax[first + r] == 0)  # not if it is NaN
            found[first + r] = not is_nearer
            any_found = any_found or not is_nearer
    return any_found


def rows_not_nearer(x: np.ndarray, q: np.ndarray, type_name: str, amax: np.ndarray) -> np.ndarray:
    """The numbers of the rows for which |y - x| is not below |x|, y being what q decodes to, or where float32 cannot tell.

    x: float32 [rows, n], n a multiple of 32, q: uint8 [rows, row_bytes], whole groups of rows, both C-contiguous; type_name: of
    a type with a `row_decoder`; amax: float32 [rows], the largest magnitudes in x.
    """
    group, n = TYPES[type_name].rows, x.shape[1]
    y = scratch("rows_not_nearer", (max(1, _WEIGHTS // (group * n)) * group, n), np.float32)
    found = np.empty(len(x), np.bool_)
    any_found = _rows_not_nearer(
        x, decoder_address(type_name), q.ctypes.data, q.shape[1], group, y, y.ctypes.data, amax, found
    )  # fmt: skip
    return np.flatnonzero(found) if any_found else _NO_ROWS
