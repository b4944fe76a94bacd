"""Searches for the scale (and minimum) of blocks whose codes are equally spaced, sixteen blocks at a time.

x and w are arrays of lanes (see lanes.py): element i of a block lies at [at + 16 * i ...], w being the weights of the squared
errors. For fixed codes q the best scale is sum(w x q) / sum(w q q), and sum(w x q)^2 / sum(w q q) is what it saves of the
weighted squared error: the score of a candidate. Names in brackets are those of spec D.0.
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
def largest(x, at, n):
    """(the element of largest magnitude, the first of equals, with its sign; its magnitude) of n elements, as lanes."""
    best, magnitude = splat(0), splat(0)
    for i in range(n):
        v = load(x, at + LANES * i)
        farther = abs(v) > magnitude
        best = select(farther, v, best)
        magnitude = select(farther, abs(v), magnitude)
    return best, magnitude


@kernel
def signed_scale(x, w, at, n, nmax, codes):
    """Scale and codes -nmax ... nmax - 1 of n elements [QXF]: a grid of start scales, then ascent code by code.

    Writes the codes to the lanes array `codes` at the place of their elements; returns the scale (0, with codes -nmax, for
    blocks below 1e-15). Sums are plain, not fused: this is the reference's one search that its compiler left so.
    """
    low, high = -nmax, nmax - 1
    extreme, magnitude = largest(x, at, n)
    dead = magnitude < 1e-15
    extreme = select(dead, splat(1), extreme)
    inverse, scale, best = splat(0), splat(0), splat(0)
    sxq, sqq = splat(0), splat(0)
    for k in range(-1, 19):
        # The scale that puts the largest element at the end of the range goes first, before those around it at both ends.
        shift = np.float32(0.1) * np.float32(k - 9 if k >= 0 else 0)
        one = -(np.float32(nmax) + shift) / extreme
        two = (np.float32(nmax - 1) + shift) / extreme
        xq1, qq1, xq2, qq2 = splat(0), splat(0), splat(0), splat(0)
        for i in range(at, at + LANES * n, LANES):
            xi, wi = load(x, i), load(w, i)
            wx = wi * xi
            q = clamp(round_product_lanes(one, xi), low, high)
            xq1 = xq1 + wx * q
            qq1 = qq1 + (wi * q) * q
            q = clamp(round_product_lanes(two, xi), low, high)
            xq2 = xq2 + wx * q
            qq2 = qq2 + (wi * q) * q
        better = (qq1 > 0) & (xq1 * xq1 > best * qq1)
        inverse, scale = select(better, one, inverse), select(better, xq1 / qq1, scale)
        best = select(better, scale * xq1, best)
        sxq, sqq = select(better, xq1, sxq), select(better, qq1, sqq)
        better = (qq2 > 0) & (xq2 * xq2 > best * qq2)
        if k < 0 or not any_lane(better):
            continue
        inverse, scale = select(better, two, inverse), select(better, xq2 / qq2, scale)
        best = select(better, scale * xq2, best)
        sxq, sqq = select(better, xq2, sxq), select(better, qq2, sqq)
    # Squares of huge weights overflow, those of tiny ones vanish: then the scale that fits the largest element has to do.
    lost = ~dead & ~((abs(scale) > 0) & (abs(scale) < np.float32(3e38)))
    inverse = select(lost, -nmax / extreme, inverse)
    for i in range(at, at + LANES * n, LANES):
        q = clamp(round_product_lanes(inverse, load(x, i)), low, high)
        store(codes, i, select(dead, splat(low), q))
    scale = _ascend(x, w, at, n, low, high, codes, select(dead | lost, splat(0), scale), sxq, sqq, best)
    return select(lost, extreme / -nmax, scale)


@kernel
def _ascend(x, w, at, n, low, high, codes, scale, sxq, sqq, best):
    """Moves one code at a time by one, the one with the steepest gain, as long as the score improves; returns the scale."""
    active = abs(scale) > 0
    for _ in range(n * (high - low)):
        steepest, where, move = splat(0), splat(-1), splat(0)
        wm, xm, qm = splat(0), splat(0), splat(0)
        for i in range(n):
            place = at + LANES * i
            xi, wi, q = load(x, place), load(w, place), load(codes, place)
            gain = (scale * wi) * (xi - scale * q)
            up, down = (gain > 0) & (q < high), (gain < 0) & (q > low)
            take = (abs(gain) > steepest) & (up | down)
            steepest = select(take, abs(gain), steepest)
            where = select(take, splat(i), where)
            move = select(take, select(up, splat(1), splat(-1)), move)
            wm, xm, qm = select(take, wi, wm), select(take, xi, xm), select(take, q, qm)
        txq = sxq + (wm * xm) * move
        tqq = fma_lanes(wm, 2 * qm * move + 1, sqq)
        active = active & (where >= 0) & (tqq > 0) & (txq * txq > best * tqq)
        if not any_lane(active):
            break
        move_codes(codes, at, n, active, where, move)
        sxq, sqq = select(active, txq, sxq), select(active, tqq, sqq)
        scale = select(active, sxq / sqq, scale)
        best = select(active, scale * sxq, best)
    return scale


@kernel
def move_codes(codes, at, n, active, where, move):
    """Adds `move` to code number `where` of each active lane."""
    for i in range(n):
        q = load(codes, at + LANES * i)
        store(codes, at + LANES * i, select(active & (where == i), q + move, q))


@kernel
def swept_scale(x, at, n, nmax, codes):
    """Scale and codes -nmax ... nmax - 1 of n elements of weight x^2 [Q3]: one start scale, then five sweeps over single codes.

    Writes the codes to the lanes array `codes`; returns the scale (0, with codes -nmax, for blocks below 1e-15).
    """
    low, high = -nmax, nmax - 1
    extreme, magnitude = largest(x, at, n)
    dead = magnitude < 1e-15
    inverse = -nmax / select(dead, splat(1), extreme)
    sxq, sqq = splat(0), splat(0)
    for i in range(at, at + LANES * n, LANES):
        xi = load(x, i)
        wi = xi * xi
        q = clamp(round_product_lanes(inverse, xi), low, high)
        store(codes, i, select(dead, splat(low), q))
        sxq = fma_lanes(wi * xi, q, sxq)
        sqq = fma_lanes(wi * q, q, sqq)
    # Squares of huge weights overflow, cubes of tiny ones vanish: then the scale that fits the largest element has to do.
    lost = ~dead & ~((abs(sxq) > 0) & (abs(sxq) < np.float32(3e38)) & (sqq > 0) & (sqq < np.float32(3e38)))
    still = dead | lost
    for _ in range(5):
        moved = dead & ~dead
        for i in range(at, at + LANES * n, LANES):
            xi, q = load(x, i), load(codes, i)
            wi = xi * xi
            txq = fma_lanes(-(wi * xi), q, sxq)
            tqq = fma_lanes(-(wi * q), q, sqq)
            open_ = (txq > 0) & ~still
            new = clamp(round_product_lanes(xi * tqq / select(open_, txq, splat(1)), splat(1)), low, high)
            txq = fma_lanes(wi * xi, new, txq)
            tqq = fma_lanes(wi * new, new, tqq)
            take = open_ & ~(new == q) & (tqq > 0) & (txq * txq * sqq > sxq * sxq * tqq)
            store(codes, i, select(take, new, q))
            sxq, sqq = select(take, txq, sxq), select(take, tqq, sqq)
            moved = moved | take
        if not any_lane(moved):
            break
    return select(dead, splat(0), select(lost, 1 / inverse, sxq / sqq))


@kernel
def unsigned_scale(x, w, at, n, nmax, codes):
    """Scale and codes 0 ... nmax of n elements x >= 0 [QP]: nine start scales, then five sweeps over single codes."""
    top = splat(0)
    for i in range(n):
        top = max_lanes(load(x, at + LANES * i), top)
    dead = top < 1e-16
    top = select(dead, splat(1), top)
    inverse, least = nmax / top, splat(np.inf)
    for k in range(10):
        # The middle of the grid goes first.
        i = np.float32(0 if k == 0 else k - 5)
        trial = (nmax + np.float32(0.1) * i) / top
        scale = 1 / trial
        error = splat(0)
        for j in range(at, at + LANES * n, LANES):
            xj = load(x, j)
            miss = fma_lanes(-scale, min_lanes(round_product_lanes(trial, xj), splat(nmax)), xj)
            error = fma_lanes(load(w, j) * miss, miss, error)
        better = error < least
        inverse, least = select(better, trial, inverse), select(better, error, least)
    sxq, sqq = splat(0), splat(0)
    for j in range(at, at + LANES * n, LANES):
        xj, wj = load(x, j), load(w, j)
        q = min_lanes(round_product_lanes(inverse, xj), splat(nmax))
        store(codes, j, q)
        sxq = fma_lanes(wj * q, xj, sxq)
        sqq = fma_lanes(wj * q, q, sqq)
    for _ in range(5):
        moved = dead & ~dead
        for j in range(at, at + LANES * n, LANES):
            xj, wj, q = load(x, j), load(w, j), load(codes, j)
            txq = fma_lanes(-(wj * q), xj, sxq)
            tqq = fma_lanes(-(wj * q), q, sqq)
            open_ = (txq > 0) & (tqq > 0)
            new = min_lanes(clamp(round_product_lanes(xj * tqq / select(open_, txq, splat(1)), splat(1)), 0, nmax), splat(nmax))
            txq = fma_lanes(wj * new, xj, txq)
            tqq = fma_lanes(wj * new, new, tqq)
            take = open_ & ~(new == q) & (txq * txq * sqq > sxq * sxq * tqq)
            store(codes, j, select(take, new, q))
            sxq, sqq = select(take, txq, sxq), select(take, tqq, sqq)
            moved = moved | take
        if not any_lane(moved):
            break
    for j in range(at, at + LANES * n, LANES):
        store(codes, j, select(dead, splat(0), load(codes, j)))
    # Without weights, or with such that their sums overflow, the scale that fits the largest has to do.
    scale = select((sqq > 0) & (sqq < np.float32(3e38)), sxq / sqq, 1 / inverse)
    return select(dead, splat(0), scale)


@kernel
def _extent(x, at, n):
    """Smallest and largest of n elements, the smallest no more than 0, as lanes."""
    low = high = load(x, at)
    for i in range(at, at + LANES * n, LANES):
        xi = load(x, i)
        low, high = min_lanes(xi, low), max_lanes(xi, high)
    return min_lanes(low, splat(0)), high


# Where few levels are in use, codes such as 0, 2 and 0, 3 fit equally well. Of fits whose errors differ by no more than these
# shares the last is taken, which is the one with the smaller scale: the largest scale of a super-block makes those of its other
# blocks coarse. (In the reference rounding decides.)
_EQUAL, _EQUAL64 = 1e-5, 1e-9


@kernel
def offset_scale(x, w, at, n, nmax, first, step, steps, absolute, codes):
    """Scale and minimum of n elements with codes 0 ... nmax [QKX2]: x is about scale * code + minimum, minimum <= 0.

    Tries steps + 1 start scales (nmax + first + step * s) / extent, refits both each time, and keeps the least weighted squared
    (or, if asked, absolute) error. `codes` is scratch space. Returns (scale, -minimum).
    """
    low, high = _extent(x, at, n)
    flat = high - low < 1e-10
    high = select(flat, low + 1, high)
    inverse = nmax / (high - low)
    scale = 1 / inverse
    sw, sx, least = splat(0), splat(0), splat(0)
    for i in range(at, at + LANES * n, LANES):
        xi, wi = load(x, i), load(w, i)
        sw = sw + wi
        sx = fma_lanes(wi, xi, sx)
        q = clamp(round_product_lanes(inverse, xi - low), 0, nmax)
        miss = fma_lanes(scale, q, low) - xi
        least = fma_lanes(wi, abs(miss) if absolute else miss * miss, least)
    best_low = low
    for s in range(steps + 1):
        inverse = (fma(step, s, first) + np.float32(nmax)) / (high - best_low)
        sq, sqq, sxq = splat(0), splat(0), splat(0)
        for i in range(n):
            xi, wi = load(x, at + LANES * i), load(w, at + LANES * i)
            q = clamp(round_product_lanes(inverse, xi - best_low), 0, nmax)
            store(codes, at + LANES * i, q)
            wq = wi * q
            sq = fma_lanes(wi, q, sq)
            sqq = fma_lanes(wq, q, sqq)
            sxq = fma_lanes(wq, xi, sxq)
        determinant = fma_lanes(-sq, sq, sw * sqq)
        solvable = determinant > 0
        safe = select(solvable, determinant, splat(1))
        new_scale = fma_lanes(-sx, sq, sw * sxq) / safe
        new_low = fma_lanes(-sq, sxq, sqq * sx) / safe
        above = new_low > 0
        new_scale = select(above, sxq / select(sqq > 0, sqq, splat(1)), new_scale)
        new_low = select(above, splat(0), new_low)
        error = splat(0)
        for i in range(at, at + LANES * n, LANES):
            miss = fma_lanes(new_scale, load(codes, i), new_low) - load(x, i)
            error = fma_lanes(load(w, i), abs(miss) if absolute else miss * miss, error)
        better = solvable & (error < least * np.float32(1 + _EQUAL))
        scale, best_low = select(better, new_scale, scale), select(better, new_low, best_low)
        least = select(better, error, least)
    return select(flat, splat(0), scale), -best_low


@kernel
def _line(sw, sx, sq, sqq, sxq):
    """Least squares for x = scale * q + low with low <= 0, float64 sums: (scale, low, whether solvable)."""
    determinant = fma_lanes(sw, sqq, -(sq * sq))
    solvable = determinant > 0
    safe = select(solvable, determinant, to_float64(splat(1)))
    scale = to_float32(fma_lanes(sw, sxq, -(sx * sq)) / safe)
    low = to_float32(fma_lanes(sqq, sx, -(sq * sxq)) / safe)
    above = low > 0
    if any_lane(above):
        scale = select(above, to_float32(sxq / select(sqq > 0, sqq, to_float64(splat(1)))), scale)
        low = select(above, splat(0), low)
    return scale, low, solvable


@kernel
def _explained(scale, low, sw, sx, sq, sqq, sxq):
    """How much of sum(w x x) the line explains."""
    a, b = to_float64(scale), to_float64(low)
    return 2 * a * sxq + 2 * b * sx - 2 * a * b * sq - a * a * sqq - b * b * sw


@kernel
def _offset_sums(x, w64, wx64, n, nmax, at, inverse, low):
    """Sums of w q, w q q, w x q in float64 (products of float32 are exact in it), q the codes of x - low times inverse."""
    sq = sqq = sxq = to_float64(splat(0))
    for i in range(0, LANES * n, LANES):
        q = to_float64(clamp(round_product_lanes(inverse, load(x, at + i) - low), 0, nmax))
        w = load(w64, i)
        sq = fma_lanes(w, q, sq)
        sqq = fma_lanes(w * q, q, sqq)
        sxq = fma_lanes(load(wx64, i), q, sxq)
    return sq, sqq, sxq


@kernel
def offset_scale_weighted(x, w, at, n, nmax, first, step, steps, w64, wx64, codes):
    """Scale and minimum of n elements [QKX3]: offset_scale with float64 sums, followed by an ascent code by code.

    Writes the codes; returns (scale, -minimum). w64, wx64: float64 scratch of 16 * n.
    """
    low, high = _extent(x, at, n)
    flat = high - low < 1e-10
    high = select(flat, low + 1, high)
    sw = sx = to_float64(splat(0))
    for i in range(0, LANES * n, LANES):
        wide = to_float64(load(w, at + i))
        weighted = wide * to_float64(load(x, at + i))
        store(w64, i, wide)
        store(wx64, i, weighted)
        sw, sx = sw + wide, sx + weighted
    inverse, start = nmax / (high - low), low
    scale = 1 / inverse
    sq, sqq, sxq = _offset_sums(x, w64, wx64, n, nmax, at, inverse, low)
    best = _explained(scale, low, sw, sx, sq, sqq, sxq)
    for s in range(steps + 1):
        trial = (fma(step, s, first) + np.float32(nmax)) / (high - low)
        tq, tqq, txq = _offset_sums(x, w64, wx64, n, nmax, at, trial, low)
        new_scale, new_low, solvable = _line(sw, sx, tq, tqq, txq)
        gain = _explained(new_scale, new_low, sw, sx, tq, tqq, txq)
        better = solvable & (gain > best * (1 - _EQUAL64))
        inverse, start = select(better, trial, inverse), select(better, low, start)
        scale, low, best = select(better, new_scale, scale), select(better, new_low, low), select(better, gain, best)
        sq, sqq, sxq = select(better, tq, sq), select(better, tqq, sqq), select(better, txq, sxq)
    for i in range(at, at + LANES * n, LANES):
        q = clamp(round_product_lanes(inverse, load(x, i) - start), 0, nmax)
        store(codes, i, select(flat, splat(0), q))
    return _ascend_line(x, w, at, n, nmax, codes, ~flat, scale, low, sw, sx, sq, sqq, sxq, best)


@kernel
def _ascend_line(x, w, at, n, nmax, codes, active, scale, low, sw, sx, sq, sqq, sxq, best):
    """Moves the code with the largest miss by one towards it and refits, as long as that explains more: (scale, -low)."""
    scale = select(active, scale, splat(0))
    last_where, last_move = splat(-1), splat(0)
    for _ in range(nmax * n):
        largest_miss, where, move = splat(0), splat(-1), splat(0)
        wm, xm, qm = splat(0), splat(0), splat(0)
        for i in range(n):
            place = at + LANES * i
            xi, wi, q = load(x, place), load(w, place), load(codes, place)
            miss = fma_lanes(-scale, q, xi) - low
            up, down = (miss > 0) & (q < nmax), (miss < 0) & (q > 0)
            take = (abs(miss) > largest_miss) & (up | down)
            largest_miss, where = select(take, abs(miss), largest_miss), select(take, splat(i), where)
            move = select(take, select(up, splat(1), splat(-1)), move)
            wm, xm, qm = select(take, wi, wm), select(take, xi, xm), select(take, q, qm)
        undone = (where == last_where) & (move == -last_move)
        tq = sq + to_float64(wm * move)
        tqq = fma_lanes(to_float64(wm), to_float64(2 * qm * move + 1), sqq)
        txq = fma_lanes(to_float64(wm), to_float64(xm * move), sxq)
        new_scale, new_low, solvable = _line(sw, sx, tq, tqq, txq)
        gain = _explained(new_scale, new_low, sw, sx, tq, tqq, txq)
        active = active & (where >= 0) & ~undone & solvable & (new_scale >= 0) & (gain > best)
        if not any_lane(active):
            break
        move_codes(codes, at, n, active, where, move)
        last_where, last_move = where, move
        scale, low, best = select(active, new_scale, scale), select(active, new_low, low), select(active, gain, best)
        sq, sqq, sxq = select(active, tq, sq), select(active, tqq, sqq), select(active, txq, sxq)
    return scale, -low
