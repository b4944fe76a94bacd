"""Searches for the scale (and minimum) of blocks with equally spaced codes, sixteen blocks at a time.

x and w are arrays of lanes (see block_lanes.py): element i of a block lies at [at + 16 * i ...]; w are the weights of the
squared errors. For fixed codes q the best scale is sxq / sqq with sxq = sum(w x q), sqq = sum(w q q), and the **score** of a
candidate is sxq^2 / sqq, by which it reduces the weighted squared error. The searches are those of llama.cpp's ggml-quants.c;
docs/formats/encoders.md (common pieces) has them in formulas under the names given in brackets.
"""

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


@kernel
def largest_magnitude(x, at, n):
    """The element of largest magnitude of n (the first on ties), with its sign, and its magnitude (amax), as lanes."""
    signed_max, amax = splat(0), splat(0)
    for i in range(n):
        v = load(x, at + LANES * i)
        larger = abs(v) > amax
        signed_max = select(larger, v, signed_max)
        amax = select(larger, abs(v), amax)
    return signed_max, amax


@kernel
def symmetric_scale(x, w, at, n, nmax, codes):
    """Scale and codes -nmax ... nmax - 1 of n elements (make_qx_quants [QXF]): candidate scales, then coordinate ascent.

    Writes the codes to the array of lanes `codes`, at the place of their elements. Returns the scale: 0, with codes -nmax, for
    blocks whose amax is below 1e-15. Products are added without fusing: the reference's compiler fused all sums but these.
    """
    low, high = -nmax, nmax - 1
    signed_max, amax = largest_magnitude(x, at, n)
    all_zero = amax < 1e-15
    signed_max = select(all_zero, splat(1), signed_max)
    inverse, scale, best = splat(0), splat(0), splat(0)
    sxq, sqq = splat(0), splat(0)
    for k in range(-1, 19):
        # First the scale that maps the signed maximum to the negative end of the range; then scales around both ends.
        shift = np.float32(0.1) * np.float32(k - 9 if k >= 0 else 0)
        negative_end = -(np.float32(nmax) + shift) / signed_max
        positive_end = (np.float32(nmax - 1) + shift) / signed_max
        sxq1, sqq1, sxq2, sqq2 = splat(0), splat(0), splat(0), splat(0)
        for i in range(at, at + LANES * n, LANES):
            xi, wi = load(x, i), load(w, i)
            wx = wi * xi
            q = clamp(round_product_lanes(negative_end, xi), low, high)
            sxq1 = sxq1 + wx * q
            sqq1 = sqq1 + (wi * q) * q
            q = clamp(round_product_lanes(positive_end, xi), low, high)
            sxq2 = sxq2 + wx * q
            sqq2 = sqq2 + (wi * q) * q
        better = (sqq1 > 0) & (sxq1 * sxq1 > best * sqq1)
        inverse, scale = select(better, negative_end, inverse), select(better, sxq1 / sqq1, scale)
        best = select(better, scale * sxq1, best)
        sxq, sqq = select(better, sxq1, sxq), select(better, sqq1, sqq)
        better = (sqq2 > 0) & (sxq2 * sxq2 > best * sqq2)
        if k < 0 or not any_lane(better):
            continue
        inverse, scale = select(better, positive_end, inverse), select(better, sxq2 / sqq2, scale)
        best = select(better, scale * sxq2, best)
        sxq, sqq = select(better, sxq2, sxq), select(better, sqq2, sqq)
    # Squares of huge weights overflow, those of tiny ones underflow: such blocks get the scale that fits their largest element.
    degenerate = ~all_zero & ~((abs(scale) > 0) & (abs(scale) < np.float32(3e38)))
    inverse = select(degenerate, -nmax / signed_max, inverse)
    for i in range(at, at + LANES * n, LANES):
        q = clamp(round_product_lanes(inverse, load(x, i)), low, high)
        store(codes, i, select(all_zero, splat(low), q))
    scale = _coordinate_ascent(x, w, at, n, low, high, codes, select(all_zero | degenerate, splat(0), scale), sxq, sqq, best)
    return select(degenerate, signed_max / -nmax, scale)


@kernel
def _coordinate_ascent(x, w, at, n, low, high, codes, scale, sxq, sqq, best):
    """Changes one code at a time by one, that with the steepest gradient, as long as the score improves. Returns the scale."""
    active = abs(scale) > 0
    for _ in range(n * (high - low)):
        steepest, best_index, move = splat(0), splat(-1), splat(0)
        w_best, x_best, q_best = splat(0), splat(0), splat(0)
        for i in range(n):
            place = at + LANES * i
            xi, wi, q = load(x, place), load(w, place), load(codes, place)
            gain = (scale * wi) * (xi - scale * q)
            up, down = (gain > 0) & (q < high), (gain < 0) & (q > low)
            better = (abs(gain) > steepest) & (up | down)
            steepest = select(better, abs(gain), steepest)
            best_index = select(better, splat(i), best_index)
            move = select(better, select(up, splat(1), splat(-1)), move)
            w_best, x_best, q_best = select(better, wi, w_best), select(better, xi, x_best), select(better, q, q_best)
        new_sxq = sxq + (w_best * x_best) * move
        new_sqq = fma_lanes(w_best, 2 * q_best * move + 1, sqq)
        active = active & (best_index >= 0) & (new_sqq > 0) & (new_sxq * new_sxq > best * new_sqq)
        if not any_lane(active):
            break
        add_to_codes(codes, at, n, active, best_index, move)
        sxq, sqq = select(active, new_sxq, sxq), select(active, new_sqq, sqq)
        scale = select(active, sxq / sqq, scale)
        best = select(active, scale * sxq, best)
    return scale


@kernel
def add_to_codes(codes, at, n, active, index, move):
    """codes[index] += move in each active lane."""
    for i in range(n):
        q = load(codes, at + LANES * i)
        store(codes, at + LANES * i, select(active & (index == i), q + move, q))


@kernel
def symmetric_scale_by_sweeps(x, at, n, nmax, codes):
    """Scale and codes -nmax ... nmax - 1 of n elements with weights x^2 (make_q3_quants [Q3]): one start scale, five sweeps.

    A sweep sets each code in turn to the best one given the others. Writes the codes to the array of lanes `codes`. Returns the
    scale: 0, with codes -nmax, for blocks whose amax is below 1e-15.
    """
    low, high = -nmax, nmax - 1
    signed_max, amax = largest_magnitude(x, at, n)
    all_zero = amax < 1e-15
    inverse = -nmax / select(all_zero, splat(1), signed_max)
    sxq, sqq = splat(0), splat(0)
    for i in range(at, at + LANES * n, LANES):
        xi = load(x, i)
        wi = xi * xi
        q = clamp(round_product_lanes(inverse, xi), low, high)
        store(codes, i, select(all_zero, splat(low), q))
        sxq = fma_lanes(wi * xi, q, sxq)
        sqq = fma_lanes(wi * q, q, sqq)
    # Squares of huge weights overflow, cubes of tiny ones underflow: such blocks get the scale that fits their largest element.
    degenerate = ~all_zero & ~((abs(sxq) > 0) & (abs(sxq) < np.float32(3e38)) & (sqq > 0) & (sqq < np.float32(3e38)))
    fixed = all_zero | degenerate
    for _ in range(5):
        changed = all_zero & ~all_zero
        for i in range(at, at + LANES * n, LANES):
            xi, q = load(x, i), load(codes, i)
            wi = xi * xi
            new_sxq = fma_lanes(-(wi * xi), q, sxq)
            new_sqq = fma_lanes(-(wi * q), q, sqq)
            valid = (new_sxq > 0) & ~fixed
            new_q = clamp(round_product_lanes(xi * new_sqq / select(valid, new_sxq, splat(1)), splat(1)), low, high)
            new_sxq = fma_lanes(wi * xi, new_q, new_sxq)
            new_sqq = fma_lanes(wi * new_q, new_q, new_sqq)
            better = valid & ~(new_q == q) & (new_sqq > 0) & (new_sxq * new_sxq * sqq > sxq * sxq * new_sqq)
            store(codes, i, select(better, new_q, q))
            sxq, sqq = select(better, new_sxq, sxq), select(better, new_sqq, sqq)
            changed = changed | better
        if not any_lane(changed):
            break
    return select(all_zero, splat(0), select(degenerate, 1 / inverse, sxq / sqq))


@kernel
def unsigned_scale(x, w, at, n, nmax, codes):
    """Scale and codes 0 ... nmax of n elements x >= 0 (make_qp_quants [QP]): ten start scales, then five sweeps over the codes.

    Writes the codes to the array of lanes `codes`. Returns the scale: 0, with codes 0, for blocks whose maximum is below 1e-16.
    """
    x_max = splat(0)
    for i in range(n):
        x_max = max_lanes(load(x, at + LANES * i), x_max)
    all_zero = x_max < 1e-16
    x_max = select(all_zero, splat(1), x_max)
    inverse, best_error = nmax / x_max, splat(np.inf)
    for k in range(10):
        i = np.float32(0 if k == 0 else k - 5)  # i = 0 goes first: it wins ties
        trial_inverse = (nmax + np.float32(0.1) * i) / x_max
        scale = 1 / trial_inverse
        error = splat(0)
        for j in range(at, at + LANES * n, LANES):
            xj = load(x, j)
            diff = fma_lanes(-scale, min_lanes(round_product_lanes(trial_inverse, xj), splat(nmax)), xj)
            error = fma_lanes(load(w, j) * diff, diff, error)
        better = error < best_error
        inverse, best_error = select(better, trial_inverse, inverse), select(better, error, best_error)
    sxq, sqq = splat(0), splat(0)
    for j in range(at, at + LANES * n, LANES):
        xj, wj = load(x, j), load(w, j)
        q = min_lanes(round_product_lanes(inverse, xj), splat(nmax))
        store(codes, j, q)
        sxq = fma_lanes(wj * q, xj, sxq)
        sqq = fma_lanes(wj * q, q, sqq)
    for _ in range(5):
        changed = all_zero & ~all_zero
        for j in range(at, at + LANES * n, LANES):
            xj, wj, q = load(x, j), load(w, j), load(codes, j)
            new_sxq = fma_lanes(-(wj * q), xj, sxq)
            new_sqq = fma_lanes(-(wj * q), q, sqq)
            valid = (new_sxq > 0) & (new_sqq > 0)
            y = xj * new_sqq / select(valid, new_sxq, splat(1))
            new_q = min_lanes(clamp(round_product_lanes(y, splat(1)), 0, nmax), splat(nmax))
            new_sxq = fma_lanes(wj * new_q, xj, new_sxq)
            new_sqq = fma_lanes(wj * new_q, new_q, new_sqq)
            changes = valid & ~(new_q == q) & (new_sxq * new_sxq * sqq > sxq * sxq * new_sqq)
            store(codes, j, select(changes, new_q, q))
            sxq, sqq = select(changes, new_sxq, sxq), select(changes, new_sqq, sqq)
            changed = changed | changes
        if not any_lane(changed):
            break
    for j in range(at, at + LANES * n, LANES):
        store(codes, j, select(all_zero, splat(0), load(codes, j)))
    # Where the sums of weights are 0 or overflow, the scale is that which fits the largest element.
    scale = select((sqq > 0) & (sqq < np.float32(3e38)), sxq / sqq, 1 / inverse)
    return select(all_zero, splat(0), scale)


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
def scale_and_min(x, w, at, n, nmax, first, step, steps, absolute, codes):
    """Scale and minimum of n elements for codes 0 ... nmax (make_qkx2_quants [QKX2]): x is about scale * code + min, min <= 0.

    Tries steps + 1 start scales (nmax + first + step * s) / (max - min), refits scale and minimum to the codes of each, and
    keeps those of least weighted squared (if `absolute`: weighted absolute) error. `codes` is scratch. Returns (scale, -min),
    the scale 0 for constant blocks.
    """
    min_, max_ = _min_and_max(x, at, n)
    constant = max_ - min_ < 1e-10
    max_ = select(constant, min_ + 1, max_)
    inverse = nmax / (max_ - min_)
    scale = 1 / inverse
    sw, sx, best_error = splat(0), splat(0), splat(0)
    for i in range(at, at + LANES * n, LANES):
        xi, wi = load(x, i), load(w, i)
        sw = sw + wi
        sx = fma_lanes(wi, xi, sx)
        q = clamp(round_product_lanes(inverse, xi - min_), 0, nmax)
        diff = fma_lanes(scale, q, min_) - xi
        best_error = fma_lanes(wi, abs(diff) if absolute else diff * diff, best_error)
    best_min = min_
    for s in range(steps + 1):
        inverse = (fma(step, s, first) + np.float32(nmax)) / (max_ - best_min)
        sq, sqq, sxq = splat(0), splat(0), splat(0)
        for i in range(n):
            xi, wi = load(x, at + LANES * i), load(w, at + LANES * i)
            q = clamp(round_product_lanes(inverse, xi - best_min), 0, nmax)
            store(codes, at + LANES * i, q)
            wq = wi * q
            sq = fma_lanes(wi, q, sq)
            sqq = fma_lanes(wq, q, sqq)
            sxq = fma_lanes(wq, xi, sxq)
        determinant = fma_lanes(-sq, sq, sw * sqq)
        solvable = determinant > 0
        divisor = select(solvable, determinant, splat(1))
        new_scale = fma_lanes(-sx, sq, sw * sxq) / divisor
        new_min = fma_lanes(-sq, sxq, sqq * sx) / divisor
        positive_min = new_min > 0
        new_scale = select(positive_min, sxq / select(sqq > 0, sqq, splat(1)), new_scale)
        new_min = select(positive_min, splat(0), new_min)
        error = splat(0)
        for i in range(at, at + LANES * n, LANES):
            diff = fma_lanes(new_scale, load(codes, i), new_min) - load(x, i)
            error = fma_lanes(load(w, i), abs(diff) if absolute else diff * diff, error)
        better = solvable & (error < best_error * np.float32(1 + _TIE))
        scale, best_min = select(better, new_scale, scale), select(better, new_min, best_min)
        best_error = select(better, error, best_error)
    return select(constant, splat(0), scale), -best_min


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
def _sums_f64(x, w64, wx64, n, nmax, at, inverse, min_):
    """Sums of w q, w q q, w x q in float64 (products of float32 are exact in it), q the codes of (x - min) * inverse."""
    sq = sqq = sxq = to_float64(splat(0))
    for i in range(0, LANES * n, LANES):
        q = to_float64(clamp(round_product_lanes(inverse, load(x, at + i) - min_), 0, nmax))
        w = load(w64, i)
        sq = fma_lanes(w, q, sq)
        sqq = fma_lanes(w * q, q, sqq)
        sxq = fma_lanes(load(wx64, i), q, sxq)
    return sq, sqq, sxq


@kernel
def scale_and_min_f64(x, w, at, n, nmax, first, step, steps, w64, wx64, codes):
    """Scale and minimum of n elements for codes 0 ... nmax (make_qkx3_quants [QKX3]): as scale_and_min, with float64 sums.

    The error is the squared one, start scales are all measured from the smallest element, and coordinate ascent follows (as in
    ik_llama.cpp). Writes the codes. Returns (scale, -min). w64, wx64: float64 scratch [16 * n].
    """
    min_, max_ = _min_and_max(x, at, n)
    constant = max_ - min_ < 1e-10
    max_ = select(constant, min_ + 1, max_)
    sw = sx = to_float64(splat(0))
    for i in range(0, LANES * n, LANES):
        w_wide = to_float64(load(w, at + i))
        wx_wide = w_wide * to_float64(load(x, at + i))
        store(w64, i, w_wide)
        store(wx64, i, wx_wide)
        sw, sx = sw + w_wide, sx + wx_wide
    inverse, code_min = nmax / (max_ - min_), min_
    scale = 1 / inverse
    sq, sqq, sxq = _sums_f64(x, w64, wx64, n, nmax, at, inverse, min_)
    best = _explained_squares(scale, min_, sw, sx, sq, sqq, sxq)
    for s in range(steps + 1):
        trial_inverse = (fma(step, s, first) + np.float32(nmax)) / (max_ - min_)
        new_sq, new_sqq, new_sxq = _sums_f64(x, w64, wx64, n, nmax, at, trial_inverse, min_)
        new_scale, new_min, solvable = _fit_scale_and_min(sw, sx, new_sq, new_sqq, new_sxq)
        explained = _explained_squares(new_scale, new_min, sw, sx, new_sq, new_sqq, new_sxq)
        better = solvable & (explained > best * (1 - _TIE_F64))
        inverse, code_min = select(better, trial_inverse, inverse), select(better, min_, code_min)
        scale, min_, best = select(better, new_scale, scale), select(better, new_min, min_), select(better, explained, best)
        sq, sqq, sxq = select(better, new_sq, sq), select(better, new_sqq, sqq), select(better, new_sxq, sxq)
    for i in range(at, at + LANES * n, LANES):
        q = clamp(round_product_lanes(inverse, load(x, i) - code_min), 0, nmax)
        store(codes, i, select(constant, splat(0), q))
    return _coordinate_ascent_min(x, w, at, n, nmax, codes, ~constant, scale, min_, sw, sx, sq, sqq, sxq, best)


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
