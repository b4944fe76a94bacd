"""The search of iq4_kss: codes of even parity (docs/formats/encoders.md, iq4_kss).

The type stores four codes of four bits in 15 bits, so the sixteen bits of such a quadruple must have even parity. Half of the
table's values have codes of even parity, half of odd. For a given scale the best quadruple takes the nearest value for each
weight and, if the parity comes out odd, moves the one weight of the four that loses least to its nearest value of the other
parity.

ik_llama.cpp does this with the scale of the wrong sign for half of its trials, measures losses against the wrong table for
another half, and only tries scales that put the largest weight next to the end of the table; a scale that clips a large weight
of little importance is often better. Here every trial gets its best quadruples, and trials reach further.

The eight quadruples of a block are lanes, once for the plain table and once for the shifted one.
"""

from __future__ import annotations

import numpy as np

from ....simd.compile import kernel
from ....simd.lanes import LANES, clamp, fma_lanes, load, min_lanes, select, store, sum_halves
from ....simd.table_lookup import lookup_lanes
from .table_search import MIN_AMAX, signed_max
from .value_tables import V4, midpoints

BLOCK = 32
QUADS = BLOCK // 4
SIZE = 4 * LANES  # of an array of quadruples

# Where trials put the largest weight, as multiples of the first table value; weights beyond that are clipped.
TRIAL_FACTORS = np.geomspace(0.9, 2, 8, dtype=np.float32)

_SHIFTS = np.repeat(V4[:, 0] - V4[0, 0], QUADS)

# For look-ups the interval from -128 to 128 is cut into bins, none of which holds two midpoints between values of one parity. A
# table for each parity: the midpoint in the bin, the values below and above it.
_BINS, _BIN = 32, 8
_EVEN = np.array([code.bit_count() % 2 == 0 for code in range(V4.shape[1])])


def _bins(entries: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    below = np.searchsorted(midpoints(entries)[0], np.arange(_BINS) * _BIN - 128)
    middle = np.append(midpoints(entries)[0], np.float32(np.inf))[below]
    return middle, entries[0, below], entries[0, np.minimum(below + 1, entries.shape[1] - 1)]


_EVEN_MIDDLE, _EVEN_BELOW, _EVEN_ABOVE = _bins(V4[:, _EVEN])
_ODD_MIDDLE, _ODD_BELOW, _ODD_ABOVE = _bins(V4[:, ~_EVEN])


@kernel
def gather_quads(block, out):
    """32 elements as an array of quadruples: element j of quadruple k in lanes k and k + 8 of vector j."""
    for k in range(QUADS):
        for at in (k, k + QUADS):
            out[at], out[at + LANES] = block[2 * k], block[2 * k + 16]
            out[at + 2 * LANES], out[at + 3 * LANES] = block[2 * k + 1], block[2 * k + 17]


@kernel
def scatter_quads(quads, flag, out):
    """The inverse of gather_quads; of the two copies that of table `flag`."""
    for k in range(QUADS):
        at = k + QUADS * flag
        out[2 * k], out[2 * k + 16] = quads[at], quads[at + LANES]
        out[2 * k + 1], out[2 * k + 17] = quads[at + 2 * LANES], quads[at + 3 * LANES]


@kernel
def _nearest_by_parity(y, w):
    """For lanes y: the nearest value, the nearest of the other parity, a mask where the former is odd, the loss by changing."""
    bin_ = clamp((y + 128) * (1 / _BIN), 0, _BINS - 1)
    even = select(y >= lookup_lanes(_EVEN_MIDDLE, bin_), lookup_lanes(_EVEN_ABOVE, bin_), lookup_lanes(_EVEN_BELOW, bin_))
    odd = select(y >= lookup_lanes(_ODD_MIDDLE, bin_), lookup_lanes(_ODD_ABOVE, bin_), lookup_lanes(_ODD_BELOW, bin_))
    loss = w * ((even - odd) * ((even + odd) - (y + y)))  # of the even one
    is_odd = loss > 0
    return select(is_odd, odd, even), select(is_odd, even, odd), is_odd, abs(loss)


@kernel(forceinline=True)
def _best_quads(x, w, scale):
    """The four vectors of best values at a scale; x, w: arrays of quadruples."""
    inverse = np.float32(1) / scale if scale != 0 else np.float32(0)
    shift = load(_SHIFTS, 0)
    q0, other0, odd0, loss0 = _nearest_by_parity(load(x, 0) * inverse - shift, load(w, 0))
    q1, other1, odd1, loss1 = _nearest_by_parity(load(x, LANES) * inverse - shift, load(w, LANES))
    q2, other2, odd2, loss2 = _nearest_by_parity(load(x, 2 * LANES) * inverse - shift, load(w, 2 * LANES))
    q3, other3, odd3, loss3 = _nearest_by_parity(load(x, 3 * LANES) * inverse - shift, load(w, 3 * LANES))
    odd_parity = odd0 ^ odd1 ^ odd2 ^ odd3
    second, fourth = loss1 < loss0, loss3 < loss2
    later = min_lanes(loss2, loss3) < min_lanes(loss0, loss1)
    q0 = select(odd_parity & ~later & ~second, other0, q0) + shift
    q1 = select(odd_parity & ~later & second, other1, q1) + shift
    q2 = select(odd_parity & later & ~fourth, other2, q2) + shift
    q3 = select(odd_parity & later & fourth, other3, q3) + shift
    return q0, q1, q2, q3


@kernel(forceinline=True)
def assign_quads(x, w, scale, q):
    """Writes the best values at a scale to q. Returns sums of w x q and of w q q: (plain, shifted), (plain, shifted).

    x, w, q: arrays of quadruples.
    """
    q0, q1, q2, q3 = _best_quads(x, w, scale)
    store(q, 0, q0)
    store(q, LANES, q1)
    store(q, 2 * LANES, q2)
    store(q, 3 * LANES, q3)
    wq0, wq1, wq2, wq3 = load(w, 0) * q0, load(w, LANES) * q1, load(w, 2 * LANES) * q2, load(w, 3 * LANES) * q3
    xq = fma_lanes(wq2, load(x, 2 * LANES), wq3 * load(x, 3 * LANES))
    xq = fma_lanes(wq0, load(x, 0), fma_lanes(wq1, load(x, LANES), xq))
    qq = fma_lanes(wq0, q0, fma_lanes(wq1, q1, fma_lanes(wq2, q2, wq3 * q3)))
    return sum_halves(xq), sum_halves(qq)


@kernel
def search_quads(x, w, q):
    """The scale of least weighted error of a block, with either table; 0 for a block of zeros.

    Every trial is refitted to its codes.

    x, w: arrays of quadruples; q: scratch.
    """
    signed_max_x = signed_max(x)
    if abs(signed_max_x) < MIN_AMAX:
        return np.float32(0)
    best, best_xq, best_qq = np.float32(0), np.float32(0), np.float32(1)
    for trial in range(2 * TRIAL_FACTORS.size):
        scale = signed_max_x / (V4[0, 0] * TRIAL_FACTORS[trial // 2])
        sxq, sqq = assign_quads(x, w, -scale if trial % 2 else scale, q)
        for flag in range(2):
            score = sxq[flag] * sxq[flag]
            if score * best_qq > best * sqq[flag]:
                best, best_xq, best_qq = score, sxq[flag], sqq[flag]
    return best_xq / best_qq
