"""q2_K ... q6_K on a device: the searches of `codecs/kquants`, in torch.

Blocks are elements first, x and w float32 [block, blocks], with the blocks of a superblock side by side, so that a number per
block is [superblocks, blocks] when it is reshaped.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...formats.layouts import layout_of
from ..codecs.kquants.asymmetric import MINIMUM_SEARCHES, MinimumSearch
from .blocks import (
    fma,
    fused_sum,
    importance_rows,
    nearest_half,
    quotient,
    sigma2,
    signed_max,
    square_root,
    sum_in_order,
    to_blocks,
)
from .packing import half_bits, packer_of
from .scale_search import (
    round_product,
    scale_and_min,
    scale_and_min_f64,
    symmetric_scale,
    symmetric_scale_by_sweeps,
    unsigned_scale,
)

SUPERBLOCK = 256


_SYMMETRIC = {"q3_K": (4, 32), "q6_K": (32, 128)}  # largest magnitudes of a code and of a scale code


def encode(x: Tensor, importance: Tensor | None, type_name: str) -> Tensor:
    """float32 [rows, n], importance [n] or [rows, n] -> uint8 [rows, row_bytes]."""
    block = layout_of(type_name).group
    importance = importance_rows(importance, x)
    xs = x.reshape(-1, SUPERBLOCK)
    w = None
    if importance is not None:
        w = importance.reshape(-1, SUPERBLOCK)
        if type_name != "q6_K":
            factor = MINIMUM_SEARCHES[type_name].sigma2_factor if type_name in MINIMUM_SEARCHES else 2
            w = w * square_root(fma(xs, xs, sigma2(xs, factor)))
    xb, wb = to_blocks(xs, block), None if w is None else to_blocks(w, block)
    if type_name in MINIMUM_SEARCHES:
        numbers = _asymmetric(xb, wb, MINIMUM_SEARCHES[type_name])
    else:
        numbers = _symmetric(xb, wb, *_SYMMETRIC[type_name], type_name == "q6_K")
    return packer_of(type_name, x.device)(numbers).view(len(x), -1)


def _per_superblock(numbers: Tensor, blocks: int) -> Tensor:
    """[any blocks] -> [superblocks, blocks of one]."""
    return numbers.view(-1, blocks)


def _elements(values: Tensor, blocks: int) -> Tensor:
    """[block, any blocks] -> [superblocks, 256]."""
    return values.T.reshape(-1, blocks * values.shape[0])


def _asymmetric(x: Tensor, w: Tensor | None, o: MinimumSearch) -> dict[str, Tensor]:
    blocks = SUPERBLOCK // x.shape[0]
    if w is None:
        weights = x.abs() if o.is_q2_K else square_root(fused_sum(x, x) / len(x)) + x.abs()
        scale, minimum, codes = scale_and_min(x, weights, o.nmax, o.first, 0.1, o.steps, o.is_q2_K)
        d, scales = _by_largest(_per_superblock(scale, blocks), o.max_scale_code)
        dmin, minima = _by_largest(_per_superblock(minimum, blocks), o.max_scale_code)
    else:
        scale, minimum, codes = scale_and_min_f64(x, w, o.nmax, -0.9, 0.05, 36)
        sum_w = _per_superblock(sum_in_order(w), blocks).T.contiguous()
        d, scales = unsigned_scale(_per_superblock(scale, blocks).T.contiguous(), sum_w, o.max_scale_code)
        dmin, minima = unsigned_scale(_per_superblock(minimum, blocks).T.contiguous(), sum_w, o.max_scale_code)
        scales, minima = scales.T, minima.T
    d16, dmin16 = nearest_half(d), nearest_half(dmin)
    if not o.is_q2_K or w is None:
        d, dmin = d16.float(), dmin16.float()
    codes = _codes_at(x, d, dmin, scales, minima, o.nmax, codes)
    if o.is_q2_K:
        if w is None:
            w = torch.ones_like(x)
        else:
            codes, d16, dmin16 = _refit_q2_K(x, w, codes, scales, minima, d16, dmin16)
        codes, scales, minima, d16, dmin16 = _prefer_ternary(x, w, codes, scales, minima, d16, dmin16)
    return {
        "codes": _elements(codes, blocks),
        "d": half_bits(d16),
        "scales": scales,
        "dmin": half_bits(dmin16),
        "minima": minima,
    }


def _by_largest(scales: Tensor, max_code: int) -> tuple[Tensor, Tensor]:
    """[superblocks, blocks] scales or minima to codes 0 ... max_code by their maximum: (d, codes)."""
    largest = scales.amax(1)
    largest = torch.where(largest > 0, largest, 0.0)  # not -0
    inverse = torch.where(largest > 0, quotient(max_code, torch.where(largest > 0, largest, 1.0)), 0.0)
    return quotient(largest, max_code), round_product(scales, inverse[:, None]).clamp_(0, max_code)


def _at_blocks(d: Tensor, codes: Tensor) -> Tensor:
    """d [superblocks] times codes [superblocks, blocks] -> [any blocks]."""
    return (d[:, None] * codes).reshape(-1)


def _codes_at(x, d, dmin, scales, minima, nmax, otherwise) -> Tensor:
    """Codes at the scales that a decoder uses; where one is 0, `otherwise`."""
    scale = _at_blocks(d, scales)
    codes = ((x + _at_blocks(dmin, minima)) / torch.where(scale != 0, scale, 1.0)).round().clamp(0, nmax)
    return torch.where(scale != 0, codes, otherwise)


def _error_q2_K(x, w, codes, scales, minima, d16, dmin16) -> Tensor:
    """Weighted squared error per superblock, as decoded."""
    difference = _at_blocks(d16.float(), scales) * codes - _at_blocks(dmin16.float(), minima) - x
    return _sum_of_superblock(w * difference, difference)


def _sum_of_superblock(a: Tensor, b: Tensor) -> Tensor:
    """Sum of a * b [16, any blocks] over each superblock, in order."""
    a, b = (t.view(16, -1, 16).permute(2, 0, 1).reshape(SUPERBLOCK, -1) for t in (a, b))
    return fused_sum(a, b)


def _refit_q2_K(x, w, codes, scales, minima, d16, dmin16) -> tuple[Tensor, Tensor, Tensor]:
    """d and dmin refitted to the codes by weighted least squares, and the codes found again, where that is closer."""

    def total(factors: Tensor, per_block: Tensor) -> Tensor:
        return fused_sum(factors.T, per_block.view(-1, 16).T)

    wq, s, m = w * codes, scales, minima
    ss, sm, mm = total(s * s, fused_sum(wq, codes)), total(s * m, sum_in_order(wq)), total(m * m, sum_in_order(w))
    xs, xm = total(s, fused_sum(wq, x)), total(m, fused_sum(w, x))
    determinant = ss * mm - sm * sm
    solvable = determinant > 1e-6 * ss * mm
    divisor = torch.where(solvable, determinant, 1.0)
    d, dmin = (mm * xs - sm * xm) / divisor, (sm * xs - ss * xm) / divisor
    solvable = solvable & (d > 0) & (dmin >= 0)
    new_d, new_dmin = torch.where(solvable, nearest_half(d), d16), torch.where(solvable, nearest_half(dmin), dmin16)
    new_codes = _codes_at(x, new_d.float(), new_dmin.float(), scales, minima, 3, codes)
    new_error = _error_q2_K(x, w, new_codes, scales, minima, new_d, new_dmin)
    better = new_error < _error_q2_K(x, w, codes, scales, minima, d16, dmin16)
    codes = torch.where(better.repeat_interleave(16), new_codes, codes)
    return codes, torch.where(better, new_d, d16), torch.where(better, new_dmin, dmin16)


def _prefer_ternary(x, w, codes, scales, minima, d16, dmin16) -> tuple[Tensor, ...]:
    """-amax, 0 and amax for superblocks where that is closer than the result of the search."""
    amax = x.abs().amax(0).view(-1, 16).amax(1)
    threshold, scale = (amax * 0.5).repeat_interleave(16), nearest_half(amax)
    digits = torch.where(x >= threshold, 2.0, torch.where(x <= -threshold, 0.0, 1.0))
    difference = x - (digits - 1) * scale.float().repeat_interleave(16)
    error = _sum_of_superblock(w * difference, difference)
    better = (_error_q2_K(x, w, codes, scales, minima, d16, dmin16) > error) & (amax > 0)
    codes = torch.where(better.repeat_interleave(16), digits, codes)
    scales, minima = torch.where(better[:, None], 1.0, scales), torch.where(better[:, None], 1.0, minima)
    return codes, scales, minima, torch.where(better, scale, d16), torch.where(better, scale, dmin16)


def _symmetric(x: Tensor, w: Tensor | None, nmax: int, scale_max: int, is_q6_K: bool) -> dict[str, Tensor]:
    if w is None and is_q6_K:
        w = x * x
    scale, codes = symmetric_scale_by_sweeps(x, nmax) if w is None else symmetric_scale(x, w, nmax)
    per_superblock = _per_superblock(scale, 16).T.contiguous()  # [16, superblocks]
    largest = signed_max(per_superblock)
    nonzero = largest.abs() >= (1e-15 if is_q6_K else 1e-37)  # the inverse of a smaller scale is infinite
    if w is not None and not is_q6_K:
        d, scales = symmetric_scale(per_superblock, _per_superblock(sum_in_order(w), 16).T.contiguous(), scale_max)
    else:
        inverse = torch.where(nonzero, quotient(-scale_max, torch.where(nonzero, largest, 1.0)), 0.0)
        d = torch.where(nonzero, quotient(1, inverse), 0.0)
        scales = round_product(per_superblock, inverse).clamp_(-scale_max, scale_max - 1)
        scales = scales if is_q6_K else torch.where(nonzero, scales, float(-scale_max))
    d16, scales = nearest_half(d), scales.T
    scale = _at_blocks(d16.float(), scales)
    at_scale = (x / torch.where(scale != 0, scale, 1.0)).round().clamp(-nmax, nmax - 1)
    codes = torch.where(scale != 0, at_scale, codes) + nmax
    numbers = {"codes": _elements(codes, 16), "d": half_bits(d16), "scales": scales + scale_max}
    if is_q6_K:  # a superblock of zeros is all zero bytes
        numbers["scales"] = scales.int() & 255
        numbers = {name: torch.where(nonzero[:, None], values, 0) for name, values in numbers.items()}
    return numbers
