"""Searches for the scale of blocks with equally spaced codes, sixteen blocks at a time (with a minimum: minimum_search.py).

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
)
from ...simd.target import target

# Whether registers hold what a sweep needs of four times sixteen blocks. With two there is enough to do elsewhere, too, while
# one of them waits for its last code, and they are done after fewer sweeps.
_FOUR_AT_ONCE = target().lane_registers > 8


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

    Writes the codes to `codes`, an array of float32 lanes, at the place of their elements. Returns the scale: 0, with codes
    -nmax, for blocks whose amax is below 1e-15. Products are added without fusing: the reference's compiler fused all sums but
    these.
    """
    low, high = -nmax, nmax - 1
    signed_max, amax = largest_magnitude(x, at, n)
    all_zero = amax < 1e-15
    signed_max = select(all_zero, splat(1), signed_max)
    for i in range(at, at + LANES * n, LANES):
        store(codes, i, load(w, i) * load(x, i))  # until the codes are known, their places hold w x
    # First the scale that maps the signed maximum to the negative end of the range; then scales around both ends.
    inverse = -np.float32(nmax) / signed_max
    sxq, sqq = _code_products(x, w, codes, at, n, inverse, low, high)
    usable = (sqq > 0) & (sxq * sxq > splat(0) * sqq)
    inverse, scale = select(usable, inverse, splat(0)), select(usable, sxq / sqq, splat(0))
    best = select(usable, scale * sxq, splat(0))
    sxq, sqq = select(usable, sxq, splat(0)), select(usable, sqq, splat(0))
    for k in range(19):
        shift = np.float32(0.1) * np.float32(k - 9)
        negative_end = -(np.float32(nmax) + shift) / signed_max
        positive_end = (np.float32(nmax - 1) + shift) / signed_max
        # No code is larger than that of the signed maximum, nmax + shift or nmax - 1 + shift: most need no limit.
        sxq1, sqq1, sxq2, sqq2 = _code_products_of_both(
            x, w, codes, at, n, negative_end, positive_end, low, high, k > 3, k > 13
        )
        better = (sqq1 > 0) & (sxq1 * sxq1 > best * sqq1)
        if any_lane(better):
            inverse, scale = select(better, negative_end, inverse), select(better, sxq1 / sqq1, scale)
            best = select(better, scale * sxq1, best)
            sxq, sqq = select(better, sxq1, sxq), select(better, sqq1, sqq)
        better = (sqq2 > 0) & (sxq2 * sxq2 > best * sqq2)
        if any_lane(better):
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
def _code_products(x, w, wx, at, n, inverse, low, high):
    """sxq and sqq of the codes low ... high at a scale; wx: array of lanes with w x."""
    sxq, sqq = splat(0), splat(0)
    for i in range(at, at + LANES * n, LANES):
        q = clamp(round_product_lanes(inverse, load(x, i)), low, high)
        sxq = sxq + load(wx, i) * q
        sqq = sqq + (load(w, i) * q) * q
    return sxq, sqq


@kernel(forceinline=True)
def _code_products_of_both(x, w, wx, at, n, negative_end, positive_end, low, high, first_above, beyond):
    """sxq and sqq at one scale and at another; first_above: codes of the first may be above `high`; beyond: those of the second
    too, and those of the first below `low`."""
    sxq1, sqq1, sxq2, sqq2 = splat(0), splat(0), splat(0), splat(0)
    for i in range(at, at + LANES * n, LANES):
        xi, wi, wxi = load(x, i), load(w, i), load(wx, i)
        q = round_product_lanes(negative_end, xi)
        if beyond:
            q = max_lanes(q, splat(low))
        if first_above:
            q = min_lanes(q, splat(high))
        sxq1 = sxq1 + wxi * q
        sqq1 = sqq1 + (wi * q) * q
        q = round_product_lanes(positive_end, xi)
        if beyond:
            q = min_lanes(q, splat(high))
        sxq2 = sxq2 + wxi * q
        sqq2 = sqq2 + (wi * q) * q
    return sxq1, sqq1, sxq2, sqq2


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
def symmetric_scales_by_sweeps(x, at, n, nmax, codes):
    """Scales and codes -nmax ... nmax - 1 of four times n elements, with weights x^2 (make_q3_quants [Q3]): one start scale,
    five sweeps.

    A sweep sets each code in turn to the best one given the others: each waits for the last one, so that four blocks side by
    side take little longer than one. Writes the codes to the array of lanes `codes`. Returns the scales: 0, with codes -nmax,
    for blocks whose amax is below 1e-15.
    """
    low, high, step = -nmax, nmax - 1, LANES * n
    if not _FOUR_AT_ONCE:
        scale0, scale1 = _scales_by_sweeps_of_two(x, at, n, nmax, codes)
        scale2, scale3 = _scales_by_sweeps_of_two(x, at + 2 * step, n, nmax, codes)
        return scale0, scale1, scale2, scale3
    zero0, degenerate0, inverse0, sxq0, sqq0 = _start_of_sweeps(x, at, n, nmax, codes)
    zero1, degenerate1, inverse1, sxq1, sqq1 = _start_of_sweeps(x, at + step, n, nmax, codes)
    zero2, degenerate2, inverse2, sxq2, sqq2 = _start_of_sweeps(x, at + 2 * step, n, nmax, codes)
    zero3, degenerate3, inverse3, sxq3, sqq3 = _start_of_sweeps(x, at + 3 * step, n, nmax, codes)
    fixed0, fixed1, fixed2, fixed3 = zero0 | degenerate0, zero1 | degenerate1, zero2 | degenerate2, zero3 | degenerate3
    for _ in range(5):
        changed = zero0 & ~zero0
        for i in range(at, at + step, LANES):
            sxq0, sqq0, better0 = _sweep_code(x, codes, i, low, high, fixed0, sxq0, sqq0)
            sxq1, sqq1, better1 = _sweep_code(x, codes, i + step, low, high, fixed1, sxq1, sqq1)
            sxq2, sqq2, better2 = _sweep_code(x, codes, i + 2 * step, low, high, fixed2, sxq2, sqq2)
            sxq3, sqq3, better3 = _sweep_code(x, codes, i + 3 * step, low, high, fixed3, sxq3, sqq3)
            changed = changed | better0 | better1 | better2 | better3
        if not any_lane(changed):
            break
    return (
        _scale_of_sweeps(zero0, degenerate0, inverse0, sxq0, sqq0), _scale_of_sweeps(zero1, degenerate1, inverse1, sxq1, sqq1),
        _scale_of_sweeps(zero2, degenerate2, inverse2, sxq2, sqq2), _scale_of_sweeps(zero3, degenerate3, inverse3, sxq3, sqq3),
    )  # fmt: skip


@kernel
def _scales_by_sweeps_of_two(x, at, n, nmax, codes):
    """As symmetric_scales_by_sweeps, of two times n elements."""
    low, high, step = -nmax, nmax - 1, LANES * n
    zero0, degenerate0, inverse0, sxq0, sqq0 = _start_of_sweeps(x, at, n, nmax, codes)
    zero1, degenerate1, inverse1, sxq1, sqq1 = _start_of_sweeps(x, at + step, n, nmax, codes)
    fixed0, fixed1 = zero0 | degenerate0, zero1 | degenerate1
    for _ in range(5):
        changed = zero0 & ~zero0
        for i in range(at, at + step, LANES):
            sxq0, sqq0, better0 = _sweep_code(x, codes, i, low, high, fixed0, sxq0, sqq0)
            sxq1, sqq1, better1 = _sweep_code(x, codes, i + step, low, high, fixed1, sxq1, sqq1)
            changed = changed | better0 | better1
        if not any_lane(changed):
            break
    scale0 = _scale_of_sweeps(zero0, degenerate0, inverse0, sxq0, sqq0)
    return scale0, _scale_of_sweeps(zero1, degenerate1, inverse1, sxq1, sqq1)


@kernel
def _scale_of_sweeps(all_zero, degenerate, inverse, sxq, sqq):
    return select(all_zero, splat(0), select(degenerate, 1 / inverse, sxq / sqq))


@kernel
def _start_of_sweeps(x, at, n, nmax, codes):
    """The codes of n elements at the scale of the largest one: whether all are 0, whether that scale has to stay, its inverse,
    sxq and sqq."""
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
    return all_zero, degenerate, inverse, sxq, sqq


@kernel
def _sweep_code(x, codes, i, low, high, fixed, sxq, sqq):
    """Sets the code of an element to the best one given the others: sxq and sqq with it, and where it is another."""
    xi, q = load(x, i), load(codes, i)
    wi = xi * xi
    new_sxq = fma_lanes(-(wi * xi), q, sxq)
    new_sqq = fma_lanes(-(wi * q), q, sqq)
    valid = (new_sxq > 0) & ~fixed
    new_q = clamp(round_product_lanes(xi * new_sqq / new_sxq, splat(1)), low, high)  # any number where it is not valid
    new_sxq = fma_lanes(wi * xi, new_q, new_sxq)
    new_sqq = fma_lanes(wi * new_q, new_q, new_sqq)
    better = valid & ~(new_q == q) & (new_sqq > 0) & (new_sxq * new_sxq * sqq > sxq * sxq * new_sqq)
    store(codes, i, select(better, new_q, q))
    return select(better, new_sxq, sxq), select(better, new_sqq, sqq), better


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
