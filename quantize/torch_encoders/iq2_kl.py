"""iq2_kl on a device: the search of `codecs/iqk/iq2_kl_search.py`, in torch.

All 32 pairs of values are tried for the 16 pairs of weights of each block: float32 [32, 16, blocks].
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ..codecs.iqk.iq2_kl import MAX_INT_SCALE, MIN_INT_SCALE, SIGMA2_FACTOR
from ..codecs.iqk.iq2_kl_search import BLOCK, PAIRS, TRIAL_FACTORS
from ..codecs.iqk.table_search import MIN_AMAX, ORDINARY_EXPONENTS
from .blocks import (
    fma,
    guarded_importance,
    nearest_half,
    normalised_importance,
    normalised_rows,
    quotient,
    scaled,
    signed_max,
    sum_by_halves,
    sum_in_order,
    superblock_weights,
    to_blocks,
)
from .packing import number_bytes, packer_of
from .scale_search import round_product

SUPERBLOCK = 256


@cache
def _pairs(device: torch.device) -> tuple[Tensor, Tensor]:
    """First and second value of each pair, float32 [32, 1, 1] each."""
    first, second = torch.from_numpy(PAIRS).to(device).T[:, :, None, None].contiguous()
    return first, second


def encode(x: Tensor, importance: Tensor | None, type_name: str) -> Tensor:
    """float32 [rows, n], importance [n] or [rows, n] -> uint8 [rows, row_bytes]."""
    rows, n = x.shape
    qw = normalised_importance(guarded_importance(x, importance, BLOCK))
    x, exponents = normalised_rows(x, ORDINARY_EXPONENTS, float(MIN_AMAX))
    if qw is None:
        w = x.abs()
    else:
        w = superblock_weights(x.reshape(-1, SUPERBLOCK), qw.reshape(-1, SUPERBLOCK), float(SIGMA2_FACTOR), 0.0)
    codes, int_scales, d = _fit(to_blocks(x, BLOCK), to_blocks(w, BLOCK), rows)
    numbers = {
        "codes": codes.T.reshape(-1, SUPERBLOCK // 2),
        "scales": (int_scales - MIN_INT_SCALE).view(-1, SUPERBLOCK // BLOCK).int(),
    }
    live = (d != 0).repeat_interleave(n // SUPERBLOCK)[:, None]
    packed = packer_of(type_name, x.device)({name: torch.where(live, values, 0) for name, values in numbers.items()})
    d = nearest_half(torch.where(d == 0, 0.0, scaled(d, exponents)))  # not -0
    return torch.cat([number_bytes(d), packed.view(rows, -1)], dim=1)


def _fit(x: Tensor, w: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, w [32, blocks] -> codes int64 [16, blocks], integer scales float32 [blocks], d [rows]."""
    first, second = _pairs(x.device)
    w1, w2 = w[0::2], w[1::2]
    p = fma(w1 * x[0::2], first, w2 * x[1::2] * second)
    c = fma(w1, first * first, w2 * (second * second))
    scales = _search(x, p, c)
    d = quotient(-signed_max(scales.view(rows, -1).T.contiguous()), -MIN_INT_SCALE)
    blocks = len(scales) // rows
    row_scales = d.repeat_interleave(blocks)
    middle = torch.where(row_scales != 0, round_product(scales, _inverse(1, row_scales)), 0.0)
    int_scales, least = torch.zeros_like(middle), torch.zeros_like(middle)
    for step in (0, -1, 1):
        trial = (middle + step).clamp_(MIN_INT_SCALE, MAX_INT_SCALE)
        scale = row_scales * trial
        cost = fma(_inverse(-2, scale), p, c).amin(0)
        score = torch.where(scale != 0, _sum_of_lanes(cost) * scale * scale, 0.0)
        better = score < least
        int_scales, least = torch.where(better, trial, int_scales), torch.where(better, score, least)
    codes = fma(_inverse(-2, row_scales * int_scales), p, c).argmin(0)
    xq, qq = (sum_in_order(terms.gather(0, codes[None])[0]) for terms in (p, c))
    sxq, sqq = (sum_in_order(t.view(rows, -1).T) for t in (int_scales * xq, int_scales * int_scales * qq))
    return codes, int_scales, torch.where(sqq > 0, sxq / torch.where(sqq > 0, sqq, 1.0), d)


def _search(x: Tensor, p: Tensor, c: Tensor) -> Tensor:
    """The scale of least weighted error of each block; 0 for blocks of zeros."""
    largest = signed_max(x)
    zero = largest.abs() < float(MIN_AMAX)
    best, best_xq, best_qq = torch.zeros_like(largest), torch.zeros_like(largest), torch.ones_like(largest)
    for factor in TRIAL_FACTORS:
        plus = quotient(float(2 * PAIRS[0, 0] * factor), torch.where(zero, 1.0, largest))
        for twice_inverse in (plus, -plus):
            costs = fma(-twice_inverse, p, c)
            at = costs.argmin(0, keepdim=True)
            xq = p.gather(0, at)[0]
            sxq, sqq = _sum_of_lanes(xq), _sum_of_lanes(fma(twice_inverse, xq, costs.gather(0, at)[0]))
            better = (sqq > 0) & (sxq * sxq * best_qq > best * sqq)
            best, best_xq = torch.where(better, sxq * sxq, best), torch.where(better, sxq, best_xq)
            best_qq = torch.where(better, sqq, best_qq)
    return torch.where(zero, 0.0, best_xq / best_qq)


def _sum_of_lanes(lanes: Tensor) -> Tensor:
    """[16, blocks] -> [blocks], in the order of `simd.lanes.reduce_sum`."""
    return sum_by_halves(lanes[:8]) + sum_by_halves(lanes[8:])


def _inverse(numerator: float, scale: Tensor) -> Tensor:
    """numerator / scale; 0 where that is 0."""
    return torch.where(scale != 0, quotient(numerator, torch.where(scale != 0, scale, 1.0)), 0.0)
