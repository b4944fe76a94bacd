"""Searches for the scale and minimum of blocks with equally spaced codes, in arrays of lanes as those of scale_search.py."""

from __future__ import annotations

import numpy as np

from ...simd.compile import kernel
from ...simd.lanes import (
    LANES,
    any_lane,
    clamp,
    fma_lanes,
    load,
    max_lanes,
    min_lanes,
    round_product_lanes,
    select,
    splat,
    store,
    to_float32,
    to_float64,
)
from ...simd.scalar import fma
from .scale_search import add_to_codes


@kernel
def _min_and_max(x, at, n):
    """Smallest element, 0 at most, and largest element of n elements, as lanes."""
    low = high = load(x, at)
    for i in range(at, at + LANES * n, LANES):
        xi = load(x, i)
        low, high = min_lanes(xi, low), max_lanes(xi, high)
    return min_lanes(low, splat(0)), high


# Where few codes are in use, codes such as 0, 2 and 0, 3 fit equally well. Fits whose errors differ by at most these shares
# count as ties, and the last one wins, which has the smaller scale: the largest scale of a superblock determines how coarsely
# those of its other blocks are quantised. (In the reference rounding decides.)
_TIE, _TIE_F64 = 1e-5, 1e-9


@kernel
def scales_and_mins(x, w, at, n, nmax, first, step, steps, absolute, codes):
    """Scale and minimum for codes 0 ... nmax (make_qkx2_quants [QKX2]) of n elements and of the n that follow: x is about
    scale * code + min, min <= 0.

    Tries steps + 1 start scales (nmax + first + step * s) / (max - min), refits scale and minimum to the codes of each, and
    keeps those of least weighted squared (if `absolute`: weighted absolute) error. `codes` is scratch. Returns (scale, -min)
    of both, the scale 0 for constant blocks. A sum waits for its last term: two blocks side by side take little longer than
    one.
    """
    there = at + LANES * n
    constant, max_, min_, scale, best, sw, sx = _start_of_scale_and_min(x, w, at, n, nmax, absolute)
    constant2, max2, min2, scale2, best2, sw2, sx2 = _start_of_scale_and_min(x, w, there, n, nmax, absolute)
    for s in range(steps + 1):
        end = fma(step, s, first) + np.float32(nmax)
        inverse, inverse2 = end / (max_ - min_), end / (max2 - min2)
        sq, sqq, sxq, sq2, sqq2, sxq2 = splat(0), splat(0), splat(0), splat(0), splat(0), splat(0)
        for i in range(at, there, LANES):
            sq, sqq, sxq = _add_code(x, w, i, inverse, min_, nmax, codes, sq, sqq, sxq)
            sq2, sqq2, sxq2 = _add_code(x, w, i + LANES * n, inverse2, min2, nmax, codes, sq2, sqq2, sxq2)
        new_scale, new_min, solvable = _solved_scale_and_min(sw, sx, sq, sqq, sxq)
        new_scale2, new_min2, solvable2 = _solved_scale_and_min(sw2, sx2, sq2, sqq2, sxq2)
        error, error2 = splat(0), splat(0)
        for i in range(at, there, LANES):
            error = _add_error(x, w, i, new_scale, load(codes, i), new_min, absolute, error)
            i2 = i + LANES * n
            error2 = _add_error(x, w, i2, new_scale2, load(codes, i2), new_min2, absolute, error2)
        better = solvable & (error < best * np.float32(1 + _TIE))
        better2 = solvable2 & (error2 < best2 * np.float32(1 + _TIE))
        scale, min_, best = select(better, new_scale, scale), select(better, new_min, min_), select(better, error, best)
        scale2, min2 = select(better2, new_scale2, scale2), select(better2, new_min2, min2)
        best2 = select(better2, error2, best2)
    return select(constant, splat(0), scale), -min_, select(constant2, splat(0), scale2), -min2


@kernel
def _start_of_scale_and_min(x, w, at, n, nmax, absolute):
    """Of n elements: whether they are constant, their maximum and minimum, the scale between these, its error, sum(w) and
    sum(w x)."""
    min_, max_ = _min_and_max(x, at, n)
    constant = max_ - min_ < 1e-10
    max_ = select(constant, min_ + 1, max_)
    inverse = nmax / (max_ - min_)
    scale = 1 / inverse
    sw, sx, error = splat(0), splat(0), splat(0)
    for i in range(at, at + LANES * n, LANES):
        xi, wi = load(x, i), load(w, i)
        sw = sw + wi
        sx = fma_lanes(wi, xi, sx)
        error = _add_error(x, w, i, scale, clamp(round_product_lanes(inverse, xi - min_), 0, nmax), min_, absolute, error)
    return constant, max_, min_, scale, error, sw, sx


@kernel
def _add_code(x, w, i, inverse, min_, nmax, codes, sq, sqq, sxq):
    """Stores the code of an element; sum(w q), sum(w q q), sum(w q x) with it."""
    xi, wi = load(x, i), load(w, i)
    q = clamp(round_product_lanes(inverse, xi - min_), 0, nmax)
    store(codes, i, q)
    wq = wi * q
    return fma_lanes(wi, q, sq), fma_lanes(wq, q, sqq), fma_lanes(wq, xi, sxq)


@kernel
def _add_error(x, w, i, scale, q, min_, absolute, error):
    """The weighted error of elements with the one that has code q."""
    diff = fma_lanes(scale, q, min_) - load(x, i)
    return fma_lanes(load(w, i), abs(diff) if absolute else diff * diff, error)


@kernel
def _solved_scale_and_min(sw, sx, sq, sqq, sxq):
    """As _fit_scale_and_min from float32 sums."""
    determinant = fma_lanes(-sq, sq, sw * sqq)
    solvable = determinant > 0
    divisor = select(solvable, determinant, splat(1))
    scale = fma_lanes(-sx, sq, sw * sxq) / divisor
    min_ = fma_lanes(-sq, sxq, sqq * sx) / divisor
    positive_min = min_ > 0
    scale = select(positive_min, sxq / select(sqq > 0, sqq, splat(1)), scale)
    return scale, select(positive_min, splat(0), min_), solvable


@kernel
def _fit_scale_and_min(sw, sx, sq, sqq, sxq):
    """Weighted least squares of x = scale * q + min with min <= 0 from float64 sums: (scale, min, mask of solvable lanes)."""
    determinant = fma_lanes(sw, sqq, -(sq * sq))
    solvable = determinant > 0
    divisor = select(solvable, determinant, to_float64(splat(1)))
    scale = to_float32(fma_lanes(sw, sxq, -(sx * sq)) / divisor)
    min_ = to_float32(fma_lanes(sqq, sx, -(sq * sxq)) / divisor)
    positive_min = min_ > 0
    if any_lane(positive_min):
        scale = select(positive_min, to_float32(sxq / select(sqq > 0, sqq, to_float64(splat(1)))), scale)
        min_ = select(positive_min, splat(0), min_)
    return scale, min_, solvable


@kernel
def _explained_squares(scale, min_, sw, sx, sq, sqq, sxq):
    """The part of sum(w x x) that scale * q + min explains."""
    a, b = to_float64(scale), to_float64(min_)
    return 2 * a * sxq + 2 * b * sx - 2 * a * b * sq - a * a * sqq - b * b * sw


@kernel
def _add_code_f64(x, w64, wx64, i, inverse, min_, nmax, sums):
    """Sums of w q, w q q, w x q in float64 (products of float32 are exact in it) with those of an element, q the code of
    (x - min) * inverse."""
    q = to_float64(clamp(round_product_lanes(inverse, load(x, i) - min_), 0, nmax))
    w = load(w64, i)
    return fma_lanes(w, q, sums[0]), fma_lanes(w * q, q, sums[1]), fma_lanes(load(wx64, i), q, sums[2])


@kernel
def _start_f64(x, w, at, n, nmax, w64, wx64):
    """Of n elements: whether they are constant, their maximum, sum(w), sum(w x), and (the scale between
    minimum and maximum, the minimum, the sums of `_add_code_f64`, what these explain, the inverse scale, its minimum)."""
    min_, max_ = _min_and_max(x, at, n)
    constant = max_ - min_ < 1e-10
    max_ = select(constant, min_ + 1, max_)
    sw = sx = to_float64(splat(0))
    for i in range(at, at + LANES * n, LANES):
        w_wide = to_float64(load(w, i))
        wx_wide = w_wide * to_float64(load(x, i))
        store(w64, i, w_wide)
        store(wx64, i, wx_wide)
        sw, sx = sw + w_wide, sx + wx_wide
    inverse = nmax / (max_ - min_)
    sums = to_float64(splat(0)), to_float64(splat(0)), to_float64(splat(0))
    for i in range(at, at + LANES * n, LANES):
        sums = _add_code_f64(x, w64, wx64, i, inverse, min_, nmax, sums)
    scale = 1 / inverse
    best = _explained_squares(scale, min_, sw, sx, sums[0], sums[1], sums[2])
    return constant, max_, sw, sx, (scale, min_, sums, best, inverse, min_)


@kernel
def _better_fit(trial_inverse, new, sw, sx, fit):
    """The better one of a fit, as `_start_f64` gives it, and that to the codes whose sums are `new`."""
    scale, min_, sums, best, inverse, code_min = fit
    new_scale, new_min, solvable = _fit_scale_and_min(sw, sx, new[0], new[1], new[2])
    explained = _explained_squares(new_scale, new_min, sw, sx, new[0], new[1], new[2])
    better = solvable & (explained > best * (1 - _TIE_F64))
    return (
        select(better, new_scale, scale),
        select(better, new_min, min_),
        (select(better, new[0], sums[0]), select(better, new[1], sums[1]), select(better, new[2], sums[2])),
        select(better, explained, best),
        select(better, trial_inverse, inverse),
        select(better, min_, code_min),
    )


@kernel
def _ascended(x, w, at, n, nmax, codes, constant, sw, sx, fit):
    """Writes the codes of a fit and moves them by coordinate ascent. Returns (scale, -min)."""
    scale, min_, sums, best, inverse, code_min = fit
    for i in range(at, at + LANES * n, LANES):
        q = clamp(round_product_lanes(inverse, load(x, i) - code_min), 0, nmax)
        store(codes, i, select(constant, splat(0), q))
    return _coordinate_ascent_min(x, w, at, n, nmax, codes, ~constant, scale, min_, sw, sx, sums[0], sums[1], sums[2], best)


@kernel
def scale_and_min_f64(x, w, at, n, nmax, first, step, steps, w64, wx64, codes):
    """Scale and minimum of n elements for codes 0 ... nmax (make_qkx3_quants [QKX3]): as scales_and_mins of one block, with
    float64 sums.

    The error is the squared one, and coordinate ascent follows (as in ik_llama.cpp). Writes the codes. Returns (scale, -min).
    w64, wx64: float64 scratch, as long as x.
    """
    constant, high, sw, sx, fit = _start_f64(x, w, at, n, nmax, w64, wx64)
    zero = to_float64(splat(0))
    for s in range(steps + 1):
        min_ = fit[1]
        inverse = (fma(step, s, first) + np.float32(nmax)) / (high - min_)
        new = zero, zero, zero
        for i in range(at, at + LANES * n, LANES):
            new = _add_code_f64(x, w64, wx64, i, inverse, min_, nmax, new)
        fit = _better_fit(inverse, new, sw, sx, fit)
    return _ascended(x, w, at, n, nmax, codes, constant, sw, sx, fit)


@kernel
def scales_and_mins_f64(x, w, at, n, nmax, first, step, steps, w64, wx64, codes):
    """As `scale_and_min_f64`, of n elements and of the n that follow: (scale, -min) of both. A fit waits for the last one: two
    blocks side by side take less than one after the other."""
    there = at + LANES * n
    constant, high, sw, sx, fit = _start_f64(x, w, at, n, nmax, w64, wx64)
    constant2, high2, sw2, sx2, fit2 = _start_f64(x, w, there, n, nmax, w64, wx64)
    zero = to_float64(splat(0))
    for s in range(steps + 1):
        end, min_, min2 = fma(step, s, first) + np.float32(nmax), fit[1], fit2[1]
        inverse, inverse2 = end / (high - min_), end / (high2 - min2)
        new = zero, zero, zero
        new2 = new
        for i in range(at, there, LANES):
            new = _add_code_f64(x, w64, wx64, i, inverse, min_, nmax, new)
            new2 = _add_code_f64(x, w64, wx64, i + LANES * n, inverse2, min2, nmax, new2)
        fit, fit2 = _better_fit(inverse, new, sw, sx, fit), _better_fit(inverse2, new2, sw2, sx2, fit2)
    scale, neg_min = _ascended(x, w, at, n, nmax, codes, constant, sw, sx, fit)
    scale2, neg_min2 = _ascended(x, w, there, n, nmax, codes, constant2, sw2, sx2, fit2)
    return scale, neg_min, scale2, neg_min2


@kernel
def _coordinate_ascent_min(x, w, at, n, nmax, codes, active, scale, min_, sw, sx, sq, sqq, sxq, best):
    """Moves the code of largest error by one to reduce it and refits, as long as that explains more. Returns (scale, -min)."""
    scale = select(active, scale, splat(0))
    last_index, last_move = splat(-1), splat(0)
    for _ in range(nmax * n):
        largest_diff, best_index, move = splat(0), splat(-1), splat(0)
        w_best, x_best, q_best = splat(0), splat(0), splat(0)
        for i in range(n):
            place = at + LANES * i
            xi, wi, q = load(x, place), load(w, place), load(codes, place)
            diff = fma_lanes(-scale, q, xi) - min_
            up, down = (diff > 0) & (q < nmax), (diff < 0) & (q > 0)
            larger = (abs(diff) > largest_diff) & (up | down)
            largest_diff, best_index = select(larger, abs(diff), largest_diff), select(larger, splat(i), best_index)
            move = select(larger, select(up, splat(1), splat(-1)), move)
            w_best, x_best, q_best = select(larger, wi, w_best), select(larger, xi, x_best), select(larger, q, q_best)
        undoes = (best_index == last_index) & (move == -last_move)
        new_sq = sq + to_float64(w_best * move)
        new_sqq = fma_lanes(to_float64(w_best), to_float64(2 * q_best * move + 1), sqq)
        new_sxq = fma_lanes(to_float64(w_best), to_float64(x_best * move), sxq)
        new_scale, new_min, solvable = _fit_scale_and_min(sw, sx, new_sq, new_sqq, new_sxq)
        explained = _explained_squares(new_scale, new_min, sw, sx, new_sq, new_sqq, new_sxq)
        active = active & (best_index >= 0) & ~undoes & solvable & (new_scale >= 0) & (explained > best)
        if not any_lane(active):
            break
        add_to_codes(codes, at, n, active, best_index, move)
        last_index, last_move = best_index, move
        scale, min_, best = select(active, new_scale, scale), select(active, new_min, min_), select(active, explained, best)
        sq, sqq, sxq = select(active, new_sq, sq), select(active, new_sqq, sqq), select(active, new_sxq, sxq)
    return scale, -min_
