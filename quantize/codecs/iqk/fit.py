"""From weights to codes: block scales, the scale d of a row, integer block scales, codes of the weights, and the refit of d.

A row here is what shares one stored scale d: for the K types the caller passes every superblock of 256 as a row of its own, for
the KS types the rows of the matrix. Searches: docs/formats/encoders.md (the IQK search; iq2_k and iq2_ks).
"""

from __future__ import annotations

import numpy as np

from ....simd.compile import kernel
from ....simd.lanes import LANES, clamp, fma_lanes, load, round_product_lanes, splat, sqrt_lanes, store
from ....simd.memory import address, keep_alive
from ....simd.scalar import fma, round_product
from ....simd.table_lookup import nearest_entry16, nearest_entry32, nearest_entry64
from ....simd.team import call_part
from .boundary_search import search_boundaries
from .table_search import SEARCH, search_blocks_of_three, search_blocks_of_two, signed_max

# How block scales become integers (d the row's scale, s a block's).
SIGNED = 0  # s / d, d with the sign opposite to that of the largest scale
MAGNITUDE = 1  # the odd integer nearest to |s| / d, with the sign of s
ODD = 2  # the odd integer nearest to s / d
SEARCHED = 3  # s / d, with the d of least weighted error of the scales

_SUPERBLOCK = 256

# Sums run in element order, each addition waiting for the one before: so several rows are summed at a time.
_ROWS_AT_ONCE = 4

_BATCH_WEIGHTS = 4096  # weights processed at a time

# Trials of a row's scale: tenths added to the code of its largest block scale, and zeros that fill the last vector.
_TRIALS = 19
_TRIAL_STEPS = np.concatenate([[0], np.arange(-9, 0), np.arange(1, 10), np.zeros(13)]).astype(np.float32)


@kernel
def weighted_sums(x, w, q, sxq, sqq):
    """Sums of w x q and of w q q over each row of three float32 arrays of one shape, into sxq and sqq [rows]."""
    rows, n = x.shape
    xs, ws, qs = x.reshape(-1), w.reshape(-1), q.reshape(-1)  # a view of a row would cost two atomic counts
    for r in range(0, rows, _ROWS_AT_ONCE):
        r1, r2, r3 = min(r + 1, rows - 1), min(r + 2, rows - 1), min(r + 3, rows - 1)
        s0, s1, s2, s3 = np.uintp(r * n), np.uintp(r1 * n), np.uintp(r2 * n), np.uintp(r3 * n)
        a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = np.float32(0)
        for i in range(n):
            j = np.uintp(i)
            wq = ws[s0 + j] * qs[s0 + j]
            a0, b0 = fma(wq, xs[s0 + j], a0), fma(wq, qs[s0 + j], b0)
            wq = ws[s1 + j] * qs[s1 + j]
            a1, b1 = fma(wq, xs[s1 + j], a1), fma(wq, qs[s1 + j], b1)
            wq = ws[s2 + j] * qs[s2 + j]
            a2, b2 = fma(wq, xs[s2 + j], a2), fma(wq, qs[s2 + j], b2)
            wq = ws[s3 + j] * qs[s3 + j]
            a3, b3 = fma(wq, xs[s3 + j], a3), fma(wq, qs[s3 + j], b3)
        sxq[r], sxq[r1], sxq[r2], sxq[r3] = a0, a1, a2, a3
        sqq[r], sqq[r1], sqq[r2], sqq[r3] = b0, b1, b2, b3


@kernel
def _pairwise_weighted_sums(x, w, q, sxq, sqq):
    """As weighted_sums, with the terms of elements 16 apart in each 32 added before they join the sum (as iq4_ks does)."""
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
def _sums_of_squares(x, squares):
    """Sums of the squares of superblocks of float32 x, in element order, eight superblocks at a time."""
    last = squares.size - 1
    for first in range(0, squares.size, 8):
        s0, s1 = np.uintp(first * _SUPERBLOCK), np.uintp(min(first + 1, last) * _SUPERBLOCK)
        s2, s3 = np.uintp(min(first + 2, last) * _SUPERBLOCK), np.uintp(min(first + 3, last) * _SUPERBLOCK)
        s4, s5 = np.uintp(min(first + 4, last) * _SUPERBLOCK), np.uintp(min(first + 5, last) * _SUPERBLOCK)
        s6, s7 = np.uintp(min(first + 6, last) * _SUPERBLOCK), np.uintp(min(first + 7, last) * _SUPERBLOCK)
        a0 = a1 = a2 = a3 = a4 = a5 = a6 = a7 = np.float32(0)
        for i in range(_SUPERBLOCK):
            j = np.uintp(i)
            a0, a1 = fma(x[s0 + j], x[s0 + j], a0), fma(x[s1 + j], x[s1 + j], a1)
            a2, a3 = fma(x[s2 + j], x[s2 + j], a2), fma(x[s3 + j], x[s3 + j], a3)
            a4, a5 = fma(x[s4 + j], x[s4 + j], a4), fma(x[s5 + j], x[s5 + j], a5)
            a6, a7 = fma(x[s6 + j], x[s6 + j], a6), fma(x[s7 + j], x[s7 + j], a7)
        for k, total in enumerate((a0, a1, a2, a3, a4, a5, a6, a7)):
            if first + k <= last:
                squares[first + k] = total


@kernel
def row_weights(x, importance, first, sigma2_factor, sigma2_share, w):
    """Weights of the squared errors of x [rows, n], which are rows `first` and on; importance as for fit_rows."""
    rows, n = x.shape
    squares = np.empty(rows * n // _SUPERBLOCK, np.float32)
    _sums_of_squares(x.reshape(-1), squares)
    for r in range(rows):
        xr, wr = x[r], w[r]
        for b in range(n // _SUPERBLOCK):
            sigma2 = sigma2_factor * squares[r * (n // _SUPERBLOCK) + b] / np.float32(_SUPERBLOCK)
            if importance.shape[0]:
                qw = importance[(first + r) % importance.shape[0]]
                for j in range(b * _SUPERBLOCK, (b + 1) * _SUPERBLOCK, LANES):
                    xj = load(xr, j)
                    store(wr, j, load(qw, j) * sqrt_lanes(fma_lanes(xj, xj, splat(sigma2))))
            else:
                for j in range(b * _SUPERBLOCK, (b + 1) * _SUPERBLOCK, LANES):
                    xj = load(xr, j)
                    store(wr, j, fma_lanes(xj, xj, splat(sigma2_share * sigma2)))


@kernel
def search_row_scale(scales, weights, limit):
    """d of least weighted error for block scales as its multiples -limit ... limit - 1; 0 if all are 0.

    The search is QX of docs/formats/encoders.md.
    """
    signed_max_scale = signed_max(scales)
    d, best = np.float32(0), np.float32(0)
    if signed_max_scale == 0:
        return d
    sxq, sqq = np.empty(_TRIAL_STEPS.size, np.float32), np.empty(_TRIAL_STEPS.size, np.float32)
    for first in range(0, _TRIALS, LANES):
        inverse = -(load(_TRIAL_STEPS, first) * np.float32(0.1) + limit) / signed_max_scale
        new_sxq, new_sqq = splat(0), splat(0)
        for b in range(scales.size):
            scale = splat(scales[b])
            q = clamp(round_product_lanes(inverse, scale), -limit, limit - np.float32(1))
            wq = weights[b] * q
            new_sxq, new_sqq = fma_lanes(wq, scale, new_sxq), fma_lanes(wq, q, new_sqq)
        store(sxq, first, new_sxq)
        store(sqq, first, new_sqq)
    for trial in range(_TRIALS):
        if sqq[trial] > 0 and (trial == 0 or sxq[trial] * sxq[trial] > best * sqq[trial]):
            d = sxq[trial] / sqq[trial]
            best = d * sxq[trial]
    return d


@kernel
def _block_sums(w, block, sums):
    for b in range(sums.size):
        total = np.float32(0)
        for j in range(b * block, (b + 1) * block):
            total += w[j]
        sums[b] = total


@kernel
def quantise_scales(scales, w, method, divisor, low, high, int_scales):
    """Integers int_scales for the block scales of a row with weights w. Returns the row's scale d.

    method: SIGNED, MAGNITUDE, ODD or SEARCHED; divisor, low, high: see IqkType.scheme in iq_k_ks.py.
    """
    if method == SEARCHED:
        weights = np.empty_like(scales)
        _block_sums(w, w.size // scales.size, weights)
        d = search_row_scale(scales, weights, divisor)
    else:
        signed_max_scale = signed_max(scales)
        d = -signed_max_scale / divisor if method == SIGNED else abs(signed_max_scale) / divisor
    inverse = np.float32(1) / d if d != 0 else np.float32(0)
    for b in range(scales.size):
        if method == MAGNITUDE:
            half = round_product(np.float32(0.5), fma(inverse, abs(scales[b]), -1))
            odd = np.float32(2) * min(max(half, low), high) + np.float32(1)
            int_scales[b] = -odd if scales[b] < 0 else odd
        elif method == ODD:
            half = round_product(np.float32(0.5), fma(inverse, scales[b], divisor))
            int_scales[b] = np.float32(2) * min(max(half, low), high) - divisor
        else:
            int_scales[b] = min(max(round_product(inverse, scales[b]), low), high)
    return d


@kernel
def _assign_block(x, start, count, inverse, factor, midpoints, table, codes, q):
    """Codes of x[start : start + count] * inverse, and q = factor * their table values."""
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
    """Finds the nearest codes at each block's scale again and refits the scale to them."""
    for b in range(scales.size):
        _assign_block(x, b * block, block, _inverse(scales[b]), np.float32(1), midpoints[flags[b]], table[flags[b]], codes, q)
    sxq, sqq = np.empty_like(scales), np.empty_like(scales)
    weighted_sums(x.reshape(-1, block), w.reshape(-1, block), q.reshape(-1, block), sxq, sqq)
    for b in range(scales.size):
        if scales[b] != 0 and sqq[b] > 0:
            scales[b] = sxq[b] / sqq[b]


@kernel
def _assign_row(x, block, d, int_scales, flags, midpoints, table, zero_codes, codes, q):
    """Codes of a row at the block scales d * int_scales, and their values q in multiples of d.

    Blocks of scale 0 get code 0 if zero_codes is set, else the code of the value nearest to 0.
    """
    for b in range(int_scales.size):
        scale = d * int_scales[b]
        factor = int_scales[b] if scale != 0 else np.float32(0)
        _assign_block(x, b * block, block, _inverse(scale), factor, midpoints[flags[b]], table[flags[b]], codes, q)
        if scale == 0 and zero_codes:
            codes[b * block : (b + 1) * block] = 0


@kernel
def _search_here(x, w, table, search, scales, flags):
    """Scale and flag of every block, for float32 x and weights w [blocks, block]."""
    offsets, trial_count, first_values, candidates, three_candidates, network, _ = search
    if trial_count == 0:
        search_boundaries(x, w, table, network, scales, flags)
    elif three_candidates:
        search_blocks_of_three(x, w, offsets, trial_count, first_values, candidates, scales, flags)
    else:
        search_blocks_of_two(x, w, offsets, trial_count, first_values, candidates, scales, flags)


@kernel
def _search_or_call(x, w, table, search, scales, flags):
    """As `_search_here`, but that searches which few types have are called by their addresses: others need not compile them."""
    offsets, trial_count, first_values, candidates, _, network, function = search
    if function == 0:
        search_blocks_of_two(x, w, offsets, trial_count, first_values, candidates, scales, flags)
        return
    record = np.empty(1, SEARCH)
    job = record[0]
    job.x, job.w, job.scales, job.flags = address(x), address(w), address(scales), address(flags)
    job.blocks, job.block = x.shape
    job.offsets, job.trial_count, job.first_values = address(offsets), trial_count, address(first_values)
    job.candidates, job.candidate_count = address(candidates), candidates.shape[1]
    job.table, job.entries = address(table), table.shape[1]
    job.network, job.comparators = address(network), network.shape[0]
    call_part(function, address(record), 0)
    keep_alive(x)
    keep_alive(w)
    keep_alive(record)


def _make_fit(search_scales):
    @kernel
    def fit_rows(
        x, importance, block, sigma2_factor, sigma2_share, search, midpoints, table, scheme,
        requantise, scale_factor, zero_codes, pairwise_sums, codes, flags, int_scales, d,
    ):  # fmt: skip
        """Encodes rows: float32 x [rows, n] -> codes uint8 [rows, n]; flags uint8, int_scales float32 [rows, n / block];
        d [rows].

        importance     float32 [any, n], row r using row r modulo their number; of no rows: weights from x alone
        block          elements per block scale
        sigma2_factor  of the mean square in the weights; sigma2_share: of that, without importance
        search         (offsets, trial_count, first values, candidates, whether these are three) for the search of
                       table_search.py, the sorting network for search_boundaries, which is used instead if trial_count is 0,
                       and the address of the search, of a record of SEARCH, where it is not that for two candidates
        midpoints, table  float32 [2, 16, 32 or 64]
        scheme         (method, divisor, smallest integer, largest integer) for block scales
        requantise, scale_factor, zero_codes, pairwise_sums  see IqkType in iq_k_ks.py
        """
        rows, n = x.shape
        method, divisor, low, high = scheme
        # Rows are processed in batches, to share scratch arrays and to sum several rows at a time.
        batch_rows = min(rows, max(_ROWS_AT_ONCE, _BATCH_WEIGHTS // n))
        w_batch, q_batch = np.empty((batch_rows, n), np.float32), np.empty((batch_rows, n), np.float32)
        scales_batch = np.empty((batch_rows, n // block), np.float32)
        sxq, sqq = np.empty(batch_rows, np.float32), np.empty(batch_rows, np.float32)
        for first in range(0, rows, batch_rows):
            count = min(batch_rows, rows - first)
            xs, w, q, scales = x[first : first + count], w_batch[:count], q_batch[:count], scales_batch[:count]
            all_scales, all_flags = scales.reshape(-1), flags[first : first + count].reshape(-1)
            row_weights(xs, importance, first, sigma2_factor, sigma2_share, w)
            search_scales(xs.reshape(-1, block), w.reshape(-1, block), table, search, all_scales, all_flags)
            if requantise:
                codes_out = codes[first : first + count].reshape(-1)
                _requantise(
                    xs.reshape(-1), w.reshape(-1), block, midpoints, table, all_scales, all_flags, codes_out, q.reshape(-1)
                )
            for i in range(count):
                r = first + i
                d[r] = quantise_scales(scales[i], w[i], method, divisor, low, high, int_scales[r])
                _assign_row(x[r], block, d[r], int_scales[r], flags[r], midpoints, table, zero_codes, codes[r], q[i])
            if pairwise_sums:
                _pairwise_weighted_sums(xs, w, q, sxq, sqq)
            else:
                weighted_sums(xs, w, q, sxq, sqq)
            for i in range(count):
                if sqq[i] > 0:
                    d[first + i] = sxq[i] / sqq[i]
                d[first + i] *= scale_factor

    return fit_rows


fit_rows, fit_items = _make_fit(_search_or_call), _make_fit(_search_here)  # fit_items: for threads of a GPU
