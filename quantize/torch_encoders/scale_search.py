"""Searches for the scale (and minimum) of blocks with equally spaced codes: those of `codecs/scale_search.py`, in torch.

x and w: float32 [n, blocks], weights w of the squared errors. Scores and names are explained there; docs/formats/encoders.md
has the searches in formulas. Codes come back as float32 [n, blocks].
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .blocks import fma, fused_sum, quotient, signed_max, sum_in_order, wide

_TIE, _TIE_F64 = 1e-5, 1e-9  # see codecs/scale_search.py
_LARGEST = 3e38


def round_product(x: Tensor, factor: Tensor) -> Tensor:
    """The whole number nearest to the exact product, ties to even: searches put the largest element on ties on purpose."""
    return (x.to(wide(x.device)) * factor).round_().float()


def codes_of(x: Tensor, inverse: Tensor, low: float, high: float) -> Tensor:
    """The nearest codes of x * inverse."""
    return round_product(x, inverse).clamp_(low, high)


def _start(nmax: int, first: float, step: float, s: int) -> float:
    """nmax + (first + step * s), rounded to float32 as the codecs do."""
    return float(np.float32(np.float64(np.float32(step)) * s + np.float64(np.float32(first))) + np.float32(nmax))


def symmetric_scale(x: Tensor, w: Tensor, nmax: int) -> tuple[Tensor, Tensor]:
    """Scale [blocks] and codes -nmax ... nmax - 1 (make_qx_quants): candidate scales, then coordinate ascent."""
    low, high = -nmax, nmax - 1
    largest = signed_max(x)
    all_zero = largest.abs() < 1e-15
    largest = torch.where(all_zero, 1.0, largest)
    inverse, scale, best, sxq, sqq = (torch.zeros_like(largest) for _ in range(5))
    wx = w * x
    for k in range(-1, 19):
        shift = np.float32(0.1) * np.float32(k - 9 if k >= 0 else 0)
        ends = quotient(-float(np.float32(nmax) + shift), largest), quotient(float(np.float32(nmax - 1) + shift), largest)
        for trial in ends if k >= 0 else ends[:1]:
            q = codes_of(x, trial, low, high)
            new_sxq, new_sqq = sum_in_order(wx * q), sum_in_order(w * q * q)
            better = (new_sqq > 0) & (new_sxq * new_sxq > best * new_sqq)
            new_scale = new_sxq / new_sqq
            inverse, scale = torch.where(better, trial, inverse), torch.where(better, new_scale, scale)
            best = torch.where(better, scale * new_sxq, best)
            sxq, sqq = torch.where(better, new_sxq, sxq), torch.where(better, new_sqq, sqq)
    degenerate = ~all_zero & ~((scale.abs() > 0) & (scale.abs() < _LARGEST))
    inverse = torch.where(degenerate, quotient(-nmax, largest), inverse)
    codes = torch.where(all_zero, float(low), codes_of(x, inverse, low, high))
    scale = torch.where(all_zero | degenerate, 0.0, scale)
    scale = _coordinate_ascent(x, w, codes, low, high, scale, sxq, sqq, best)
    return torch.where(degenerate, quotient(largest, -nmax), scale), codes


def _coordinate_ascent(x, w, codes, low, high, scale, sxq, sqq, best) -> Tensor:
    """Changes one code of a block at a time, that with the steepest gradient, in place, as long as the score improves."""
    blocks = torch.nonzero(scale.abs() > 0)[:, 0]
    result = scale.clone()
    x, w, scale, sxq, sqq, best = x[:, blocks], w[:, blocks], scale[blocks], sxq[blocks], sqq[blocks], best[blocks]
    for _ in range(x.shape[0] * (high - low)):
        q = codes[:, blocks]
        gain = (scale * w) * (x - scale * q)
        possible = ((gain > 0) & (q < high)) | ((gain < 0) & (q > low))
        steepest = torch.where(possible, gain.abs(), 0.0)
        at = steepest.argmax(0, keepdim=True)
        move = gain.gather(0, at)[0].sign()
        w_at, x_at, q_at = w.gather(0, at)[0], x.gather(0, at)[0], q.gather(0, at)[0]
        new_sxq, new_sqq = sxq + w_at * x_at * move, fma(w_at, 2 * q_at * move + 1, sqq)
        active = (steepest.gather(0, at)[0] > 0) & (new_sqq > 0) & (new_sxq * new_sxq > best * new_sqq)
        keep = torch.nonzero(active)[:, 0]
        if not len(keep):
            break
        blocks, at, move = blocks[keep], at[0, keep], move[keep]
        codes[at, blocks] += move
        x, w, sxq, sqq = x[:, keep], w[:, keep], new_sxq[keep], new_sqq[keep]
        scale = sxq / sqq
        best = scale * sxq
        result[blocks] = scale
    return result


def symmetric_scale_by_sweeps(x: Tensor, nmax: int) -> tuple[Tensor, Tensor]:
    """Scale and codes -nmax ... nmax - 1 with weights x^2 (make_q3_quants): one start scale, five sweeps."""
    low, high = -nmax, nmax - 1
    largest = signed_max(x)
    all_zero = largest.abs() < 1e-15
    inverse = quotient(-nmax, torch.where(all_zero, 1.0, largest))
    w = x * x
    codes = torch.where(all_zero, float(low), codes_of(x, inverse, low, high))
    sxq, sqq = fused_sum(w * x, codes), fused_sum(w * codes, codes)
    degenerate = ~all_zero & ~((sxq.abs() > 0) & (sxq.abs() < _LARGEST) & (sqq > 0) & (sqq < _LARGEST))
    fixed = all_zero | degenerate
    for _ in range(5):
        for xi, wi, q in zip(x, w, codes, strict=True):
            new_sxq, new_sqq = fma(-(wi * xi), q, sxq), fma(-(wi * q), q, sqq)
            valid = (new_sxq > 0) & ~fixed
            new_q = (xi * new_sqq / torch.where(valid, new_sxq, 1.0)).round().clamp(low, high)
            new_sxq, new_sqq = fma(wi * xi, new_q, new_sxq), fma(wi * new_q, new_q, new_sqq)
            better = valid & (new_q != q) & (new_sqq > 0) & (new_sxq * new_sxq * sqq > sxq * sxq * new_sqq)
            q.copy_(torch.where(better, new_q, q))
            sxq, sqq = torch.where(better, new_sxq, sxq), torch.where(better, new_sqq, sqq)
    return torch.where(all_zero, 0.0, torch.where(degenerate, quotient(1, inverse), sxq / sqq)), codes


def unsigned_scale(x: Tensor, w: Tensor, nmax: int) -> tuple[Tensor, Tensor]:
    """Scale and codes 0 ... nmax of x >= 0 (make_qp_quants): ten start scales, then five sweeps over the codes."""
    x_max = x.amax(0)
    all_zero = x_max < 1e-16
    x_max = torch.where(all_zero, 1.0, x_max)
    inverse, best_error = quotient(nmax, x_max), torch.full_like(x_max, torch.inf)
    for k in range(10):
        trial = quotient(float(np.float32(nmax) + np.float32(0.1) * np.float32(0 if k == 0 else k - 5)), x_max)
        difference = fma(-quotient(1, trial), round_product(x, trial).clamp_(max=nmax), x)
        error = fused_sum(w * difference, difference)
        better = error < best_error
        inverse, best_error = torch.where(better, trial, inverse), torch.where(better, error, best_error)
    codes = round_product(x, inverse).clamp_(max=nmax)
    sxq, sqq = fused_sum(w * codes, x), fused_sum(w * codes, codes)
    for _ in range(5):
        for xj, wj, q in zip(x, w, codes, strict=True):
            new_sxq, new_sqq = fma(-(wj * q), xj, sxq), fma(-(wj * q), q, sqq)
            valid = (new_sxq > 0) & (new_sqq > 0)
            new_q = (xj * new_sqq / torch.where(valid, new_sxq, 1.0)).round().clamp(0, nmax)
            new_sxq, new_sqq = fma(wj * new_q, xj, new_sxq), fma(wj * new_q, new_q, new_sqq)
            changes = valid & (new_q != q) & (new_sxq * new_sxq * sqq > sxq * sxq * new_sqq)
            q.copy_(torch.where(changes, new_q, q))
            sxq, sqq = torch.where(changes, new_sxq, sxq), torch.where(changes, new_sqq, sqq)
    codes = torch.where(all_zero, 0.0, codes)
    scale = torch.where((sqq > 0) & (sqq < _LARGEST), sxq / sqq, quotient(1, inverse))
    return torch.where(all_zero, 0.0, scale), codes


def _range(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(smallest element, 0 at most; largest; which blocks are constant, whose largest is one above)."""
    low, high = x.amin(0).clamp(max=0), x.amax(0)
    constant = high - low < 1e-10
    return low, torch.where(constant, low + 1, high), constant


def scale_and_min(
    x: Tensor, w: Tensor, nmax: int, first: float, step: float, steps: int, absolute: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Scale and minimum for codes 0 ... nmax (make_qkx2_quants): (scale, -min, codes of the last trial), the scale 0 for
    constant blocks."""
    low, high, constant = _range(x)

    def error_of(scale: Tensor, low: Tensor, q: Tensor) -> Tensor:
        difference = fma(scale, q, low) - x
        return fused_sum(w, difference.abs() if absolute else difference * difference)

    inverse = quotient(nmax, high - low)
    scale, best_low = quotient(1, inverse), low
    sw, sx = sum_in_order(w), fused_sum(w, x)
    q = codes_of(x - low, inverse, 0, nmax)
    best_error = error_of(scale, low, q)
    for s in range(steps + 1):
        inverse = quotient(_start(nmax, first, step, s), high - best_low)
        q = codes_of(x - best_low, inverse, 0, nmax)
        wq = w * q
        sq, sqq, sxq = fused_sum(w, q), fused_sum(wq, q), fused_sum(wq, x)
        determinant = fma(-sq, sq, sw * sqq)
        solvable = determinant > 0
        divisor = torch.where(solvable, determinant, 1.0)
        new_scale, new_low = fma(-sx, sq, sw * sxq) / divisor, fma(-sq, sxq, sqq * sx) / divisor
        positive = new_low > 0
        new_scale = torch.where(positive, sxq / torch.where(sqq > 0, sqq, 1.0), new_scale)
        new_low = torch.where(positive, 0.0, new_low)
        error = error_of(new_scale, new_low, q)
        better = solvable & (error < best_error * float(np.float32(1 + _TIE)))
        scale, best_low = torch.where(better, new_scale, scale), torch.where(better, new_low, best_low)
        best_error = torch.where(better, error, best_error)
    return torch.where(constant, 0.0, scale), -best_low, q


def _fit(sw, sx, sq, sqq, sxq) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted least squares of x = scale * q + min with min <= 0 from wide sums: (scale, min, where it can be solved)."""
    determinant = sw * sqq - sq * sq
    solvable = determinant > 0
    divisor = torch.where(solvable, determinant, 1.0)
    scale, low = ((sw * sxq - sx * sq) / divisor).float(), ((sqq * sx - sq * sxq) / divisor).float()
    positive = low > 0
    scale = torch.where(positive, (sxq / torch.where(sqq > 0, sqq, 1.0)).float(), scale)
    return scale, torch.where(positive, 0.0, low), solvable


def _explained(scale, low, sw, sx, sq, sqq, sxq) -> Tensor:
    """The part of sum(w x x) that scale * q + min explains."""
    a, b = scale.to(sw.dtype), low.to(sw.dtype)
    return 2 * a * sxq + 2 * b * sx - 2 * a * b * sq - a * a * sqq - b * b * sw


def scale_and_min_f64(x: Tensor, w: Tensor, nmax: int, first: float, step: float, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """As scale_and_min with float64 sums and coordinate ascent (make_qkx3_quants): (scale, -min, codes)."""
    low, high, constant = _range(x)
    w64 = w.to(wide(x.device))
    wx64 = w64 * x
    sw, sx = w64.sum(0), wx64.sum(0)

    def sums(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        wq = w64 * q
        return wq.sum(0), (wq * q).sum(0), (wx64 * q).sum(0)

    inverse = quotient(nmax, high - low)
    scale, code_low = quotient(1, inverse), low
    fit = (scale, low, *sums(codes_of(x - low, inverse, 0, nmax)))
    best = _explained(scale, low, sw, sx, *fit[2:])
    for s in range(steps + 1):
        trial = quotient(_start(nmax, first, step, s), high - fit[1])
        new_sums = sums(codes_of(x - fit[1], trial, 0, nmax))
        new_scale, new_low, solvable = _fit(sw, sx, *new_sums)
        explained = _explained(new_scale, new_low, sw, sx, *new_sums)
        better = solvable & (explained > best * (1 - _TIE_F64))
        inverse, code_low = torch.where(better, trial, inverse), torch.where(better, fit[1], code_low)
        fit = tuple(torch.where(better, new, old) for new, old in zip((new_scale, new_low, *new_sums), fit, strict=True))
        best = torch.where(better, explained, best)
    codes = torch.where(constant, 0.0, codes_of(x - code_low, inverse, 0, nmax))
    return *_coordinate_ascent_min(x, w, codes, nmax, ~constant, sw, sx, fit, best), codes


def _coordinate_ascent_min(x, w, codes, nmax, active, sw, sx, fit, best) -> tuple[Tensor, Tensor]:
    """Moves the code of largest error of a block by one, in place, and refits, as long as that explains more: (scale, -min)."""
    scale_out, low_out = torch.where(active, fit[0], 0.0), fit[1].clone()
    blocks = torch.nonzero(active)[:, 0]
    x, w, sw, sx, best = x[:, blocks], w[:, blocks], sw[blocks], sx[blocks], best[blocks]
    scale, low, sq, sqq, sxq = (f[blocks] for f in fit)
    last_at, last_move = torch.full_like(blocks, -1), torch.zeros_like(scale)
    for _ in range(nmax * x.shape[0]):
        q = codes[:, blocks]
        difference = x - scale * q - low
        possible = ((difference > 0) & (q < nmax)) | ((difference < 0) & (q > 0))
        size = torch.where(possible, difference.abs(), 0.0)
        at = size.argmax(0, keepdim=True)
        move = difference.gather(0, at)[0].sign()
        w_at, x_at, q_at = w.gather(0, at)[0].to(sw.dtype), x.gather(0, at)[0], q.gather(0, at)[0]
        new_sums = sq + w_at * move, sqq + w_at * (2 * q_at * move + 1), sxq + w_at * x_at * move
        new_scale, new_low, solvable = _fit(sw, sx, *new_sums)
        explained = _explained(new_scale, new_low, sw, sx, *new_sums)
        undoes = (at[0] == last_at) & (move == -last_move)
        improves = (size.gather(0, at)[0] > 0) & ~undoes & solvable & (new_scale >= 0) & (explained > best)
        keep = torch.nonzero(improves)[:, 0]
        if not len(keep):
            break
        blocks, last_at, last_move = blocks[keep], at[0, keep], move[keep]
        codes[last_at, blocks] += last_move
        x, w, sw, sx, best = x[:, keep], w[:, keep], sw[keep], sx[keep], explained[keep]
        scale, low, sq, sqq, sxq = (f[keep] for f in (new_scale, new_low, *new_sums))
        scale_out[blocks], low_out[blocks] = scale, low
    return scale_out, -low_out
