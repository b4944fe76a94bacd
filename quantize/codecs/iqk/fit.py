"""From weights to what is stored: block scales, the scale of a unit, scale codes, codes of the weights and the last refit.

A unit is what shares one stored scale: 256 weights for the K types, a row for the KS types. Spec D.4 and D.5.
"""

from __future__ import annotations

import numpy as np

from ....simd.compile import kernel
from ....simd.lanes import LANES, fma_lanes, load, splat, sqrt_lanes, store
from ....simd.scalar import fma, round_product
from ....simd.table_lookup import nearest_entry16, nearest_entry32, nearest_entry64
from .scale_search import largest_element, search_of_three, search_of_two
from .segment_search import search_segments

# How block scales become integers (D the unit's scale, s a block's).
SIGNED = 0  # s / D, D with the sign opposite to the largest scale
MAGNITUDE = 1  # the odd number nearest to |s| / D, with the sign of s
ODD = 2  # the odd number nearest to s / D
SEARCHED = 3  # s / D, with the D of least weighted error of the scales

_SUPERBLOCK = 256

# Sums run in the order of the elements, each addition waiting for the one before: so several go side by side.
_TOGETHER = 4

_GROUP = 4096  # weights to work on at a time


@kernel
def fitting_sums(x, w, q, sxq, sqq):
    """Sums of w x q and of w q q over each row of three float32 arrays of one shape."""
    rows, n = x.shape
    for r in range(0, rows, _TOGETHER):
        r1, r2, r3 = min(r + 1, rows - 1), min(r + 2, rows - 1), min(r + 3, rows - 1)
        x0, x1, x2, x3 = x[r], x[r1], x[r2], x[r3]
        w0, w1, w2, w3 = w[r], w[r1], w[r2], w[r3]
        q0, q1, q2, q3 = q[r], q[r1], q[r2], q[r3]
        a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = np.float32(0)
        for j in range(n):
            wq = w0[j] * q0[j]
            a0, b0 = fma(wq, x0[j], a0), fma(wq, q0[j], b0)
            wq = w1[j] * q1[j]
            a1, b1 = fma(wq, x1[j], a1), fma(wq, q1[j], b1)
            wq = w2[j] * q2[j]
            a2, b2 = fma(wq, x2[j], a2), fma(wq, q2[j], b2)
            wq = w3[j] * q3[j]
            a3, b3 = fma(wq, x3[j], a3), fma(wq, q3[j], b3)
        sxq[r], sxq[r1], sxq[r2], sxq[r3] = a0, a1, a2, a3
        sqq[r], sqq[r1], sqq[r2], sqq[r3] = b0, b1, b2, b3


@kernel
def _paired_sums(x, w, q, sxq, sqq):
    """As fitting_sums, but the terms of elements 16 apart in each 32 are added before they join the sum (iq4_ks)."""
    rows, n = x.shape
    for r in range(rows):
        xr, wr, qr = x[r], w[r], q[r]
        a = b = np.float32(0)
        for start in range(0, n, 32):
            for j in range(start, start + 16):
                wq, wq2 = wr[j] * qr[j], wr[j + 16] * qr[j + 16]
                a += fma(wq, xr[j], wq2 * xr[j + 16])
                b += fma(wq, qr[j], wq2 * qr[j + 16])
        sxq[r], sqq[r] = a, b


@kernel
def weigh_units(x, importance, first, factor, share, w):
    """Weights of the errors of x [units, n], which are units `first` and on; importance as for fit_units."""
    units, n = x.shape
    squares, unused = np.empty(units * n // _SUPERBLOCK, np.float32), np.empty(units * n // _SUPERBLOCK, np.float32)
    blocks = x.reshape(-1, _SUPERBLOCK)
    fitting_sums(blocks, np.ones_like(blocks), blocks, unused, squares)
    for u in range(units):
        xu, wu = x[u], w[u]
        for b in range(n // _SUPERBLOCK):
            sigma2 = factor * squares[u * (n // _SUPERBLOCK) + b] / np.float32(_SUPERBLOCK)
            if importance.shape[0]:
                v = importance[(first + u) % importance.shape[0]]
                for j in range(b * _SUPERBLOCK, (b + 1) * _SUPERBLOCK, LANES):
                    xj = load(xu, j)
                    store(wu, j, load(v, j) * sqrt_lanes(fma_lanes(xj, xj, splat(sigma2))))
            else:
                for j in range(b * _SUPERBLOCK, (b + 1) * _SUPERBLOCK, LANES):
                    xj = load(xu, j)
                    store(wu, j, fma_lanes(xj, xj, splat(share * sigma2)))


@kernel
def search_scale(scales, weights, high):
    """D of least weighted error of scales as its multiples -high ... high - 1 [QX of spec D.0]; 0 if all are 0."""
    top = largest_element(scales)
    d, best = np.float32(0), np.float32(0)
    if top == 0:
        return d
    for trial in range(19):
        i = trial - 9 if trial > 9 else trial - 10 if trial else 0
        inverse = -(high + np.float32(0.1) * np.float32(i)) / top
        sxq = sqq = np.float32(0)
        for b in range(scales.size):
            q = min(max(round_product(inverse, scales[b]), -high), high - np.float32(1))
            wq = weights[b] * q
            sxq, sqq = fma(wq, scales[b], sxq), fma(wq, q, sqq)
        if sqq > 0 and (trial == 0 or sxq * sxq > best * sqq):
            d = sxq / sqq
            best = d * sxq
    return d


@kernel
def _block_sums(w, block, sums):
    for b in range(sums.size):
        total = np.float32(0)
        for j in range(b * block, (b + 1) * block):
            total += w[j]
        sums[b] = total


@kernel
def code_scales(scales, w, scheme, divisor, low, high, levels):
    """Whole numbers `levels` for the block scales of a unit with weights w; returns the unit's scale D."""
    if scheme == SEARCHED:
        weights = np.empty_like(scales)
        _block_sums(w, w.size // scales.size, weights)
        d = search_scale(scales, weights, divisor)
    else:
        top = largest_element(scales)
        d = -top / divisor if scheme == SIGNED else abs(top) / divisor
    inverse = np.float32(1) / d if d != 0 else np.float32(0)
    for b in range(scales.size):
        if scheme == MAGNITUDE:
            half = round_product(np.float32(0.5), fma(inverse, abs(scales[b]), -1))
            odd = np.float32(2) * min(max(half, low), high) + np.float32(1)
            levels[b] = -odd if scales[b] < 0 else odd
        elif scheme == ODD:
            half = round_product(np.float32(0.5), fma(inverse, scales[b], divisor))
            levels[b] = np.float32(2) * min(max(half, low), high) - divisor
        else:
            levels[b] = min(max(round_product(inverse, scales[b]), low), high)
    return d


@kernel
def _quantise_block(x, start, count, inverse, factor, midpoints, table, codes, q):
    """Codes of x[start : start + count] * inverse, and q = factor * their entries."""
    for j in range(start, start + count, LANES):
        y = load(x, j) * inverse
        if table.size == 16:
            value = nearest_entry16(y, midpoints, table, codes, j)
        elif table.size == 32:
            value = nearest_entry32(y, midpoints, table, codes, j)
        else:
            value = nearest_entry64(y, midpoints, table, codes, j)
        store(q, j, value * factor)


@kernel
def _inverse(scale):
    return np.float32(1) / scale if scale != 0 else np.float32(0)


@kernel
def _requantise(x, w, block, midpoints, table, scales, flags, codes, q):
    """The nearest codes at each block's scale once more, and the scale refitted to them."""
    for b in range(scales.size):
        _quantise_block(x, b * block, block, _inverse(scales[b]), np.float32(1), midpoints[flags[b]], table[flags[b]], codes, q)
    sxq, sqq = np.empty_like(scales), np.empty_like(scales)
    fitting_sums(x.reshape(-1, block), w.reshape(-1, block), q.reshape(-1, block), sxq, sqq)
    for b in range(scales.size):
        if scales[b] != 0 and sqq[b] > 0:
            scales[b] = sxq[b] / sqq[b]


@kernel
def _assign(x, block, d, levels, flags, midpoints, table, skip_zero, codes, q):
    """Codes of a unit at the scales d * levels, and what they stand for in units of d.

    Blocks of scale 0 get code 0 if skip_zero, else the code nearest to 0.
    """
    for b in range(levels.size):
        scale = d * levels[b]
        factor = levels[b] if scale != 0 else np.float32(0)
        _quantise_block(x, b * block, block, _inverse(scale), factor, midpoints[flags[b]], table[flags[b]], codes, q)
        if scale == 0 and skip_zero:
            codes[b * block : (b + 1) * block] = 0


@kernel
def fit_units(
    x, importance, block, factor, share, search, midpoints, table, scheme,
    again, boost, skip_zero, paired, codes, flags, levels, d,
):  # fmt: skip
    """Encodes units: float32 x [units, n] -> uint8 codes [units, n], uint8 flags, float32 levels [units, n / block], d [units].

    importance  float32 [some units, n], unit u having row u modulo their number; or no rows: weights from x alone
    factor      of the mean square in the weights; share: of that, without importance
    search      (steps, trials, first entries, nearby, whether it needs three entries) for the search of iqk_search, and the
                network for search_segments, which takes its place where trials is 0
    midpoints, table  float32 [2, 16, 32 or 64]
    scheme      (kind, divisor, lowest number, highest number) for block scales
    again, boost, skip_zero, paired  as the codec's table has them
    """
    units, n = x.shape
    steps, trials, first_entries, nearby, three, network = search
    kind, divisor, low, high = scheme
    # Units go in groups, to share the scratch arrays and to let the sums of several run side by side.
    group = max(_TOGETHER, _GROUP // n)
    w_group, q_group = np.empty((group, n), np.float32), np.empty((group, n), np.float32)
    scales_group = np.empty((group, n // block), np.float32)
    sxq, sqq = np.empty(group, np.float32), np.empty(group, np.float32)
    for first in range(0, units, group):
        count = min(group, units - first)
        xs, w, q, scales = x[first : first + count], w_group[:count], q_group[:count], scales_group[:count]
        all_scales, all_flags = scales.reshape(-1), flags[first : first + count].reshape(-1)
        weigh_units(xs, importance, first, factor, share, w)
        xb, wb = xs.reshape(-1, block), w.reshape(-1, block)
        if trials == 0:
            search_segments(xb, wb, table, network, all_scales, all_flags)
        elif three:
            search_of_three(xb, wb, steps, trials, first_entries, nearby, all_scales, all_flags)
        else:
            search_of_two(xb, wb, steps, trials, first_entries, nearby, all_scales, all_flags)
        if again:
            to = codes[first : first + count].reshape(-1)
            _requantise(xs.reshape(-1), w.reshape(-1), block, midpoints, table, all_scales, all_flags, to, q.reshape(-1))
        for i in range(count):
            u = first + i
            d[u] = code_scales(scales[i], w[i], kind, divisor, low, high, levels[u])
            _assign(x[u], block, d[u], levels[u], flags[u], midpoints, table, skip_zero, codes[u], q[i])
        if paired:
            _paired_sums(xs, w, q, sxq, sqq)
        else:
            fitting_sums(xs, w, q, sxq, sqq)
        for i in range(count):
            if sqq[i] > 0:
                d[first + i] = sxq[i] / sqq[i]
            d[first + i] *= boost
