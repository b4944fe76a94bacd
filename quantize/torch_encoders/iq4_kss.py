"""iq4_kss on a device: the search of `codecs/iqk/iq4_kss_search.py`, in torch.

A block of 32 is eight quadruples of weights whose codes have even parity: float32 [4, 1, 8, blocks], the weights of a quadruple
first. What depends on the table, the plain one or its shifted copy, has two in the place of the one.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from ..codecs.iqk.iq4_kss import MAX_INT_SCALE, ROUNDS, SIGMA2_FACTOR, SIGMA2_SHARE
from ..codecs.iqk.iq4_kss_search import BLOCK, QUADS, TRIAL_FACTORS
from ..codecs.iqk.table_search import MIN_AMAX, ORDINARY_EXPONENTS
from ..codecs.iqk.value_tables import V4
from .blocks import (
    fma,
    guarded_importance,
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
from .packing import number_bytes
from .scale_search import round_product

SUPERBLOCK = 256
_PLACES = (np.arange(0, 2 * QUADS, 2) + np.array([[0], [16], [1], [17]])).reshape(-1)  # in a block, of quadruples' weights


class _Tables:
    """On a device: values of the plain table whose codes have even parity and odd parity (0 and 1), and the middles between."""

    def __init__(self, device: torch.device):
        is_odd = np.array([code.bit_count() % 2 for code in range(V4.shape[1])])
        self.plain = torch.from_numpy(V4[0]).to(device)
        self.values = [torch.from_numpy(V4[0, is_odd == parity]).to(device) for parity in range(2)]
        self.middles = [(values[1:] + values[:-1]) / 2 for values in self.values]
        self.shifts = torch.from_numpy(V4[:, 0] - V4[0, 0]).to(device).view(2, 1, 1)
        self.places = torch.from_numpy(_PLACES).to(device)

    def nearest(self, y: Tensor, parity: int) -> Tensor:
        """The value of this parity that is nearest to each of y."""
        return self.values[parity][torch.bucketize(y, self.middles[parity], right=True, out_int32=True).long()]


@cache
def _tables(device: torch.device) -> _Tables:
    return _Tables(device)


def encode(x: Tensor, importance: Tensor | None, type_name: str) -> Tensor:
    """float32 [rows, n], importance [n] or [rows, n] -> uint8 [rows, row_bytes]."""
    rows, n = x.shape
    qw = normalised_importance(guarded_importance(x, importance, BLOCK))
    x, exponents = normalised_rows(x, ORDINARY_EXPONENTS, float(MIN_AMAX))
    superblocks, qw = x.reshape(-1, SUPERBLOCK), None if qw is None else qw.reshape(-1, SUPERBLOCK)
    w = superblock_weights(superblocks, qw, float(SIGMA2_FACTOR), float(SIGMA2_SHARE))
    tables = _tables(x.device)
    values, flags, int_scales, d = _fit(_quads(x, tables), _quads(w, tables), rows, tables)
    words = torch.where((d != 0).repeat_interleave(n // BLOCK), _words(values, flags, int_scales, tables), 0)
    packed = torch.stack([words & 255, words >> 8], dim=-1).to(torch.uint8)  # [8, blocks, 2]
    return torch.cat([number_bytes(scaled(d, exponents)), packed.transpose(0, 1).reshape(rows, -1)], dim=1)


def _quads(x: Tensor, tables: _Tables) -> Tensor:
    return to_blocks(x, BLOCK)[tables.places].view(4, 1, QUADS, -1)


def _assign(x: Tensor, w: Tensor, scale: Tensor, tables: _Tables) -> tuple[Tensor, Tensor, Tensor]:
    """Best values at a scale [blocks] with either table: float32 [4, 2, 8, blocks], sums of w x q and w q q [2, blocks]."""
    inverse = torch.where(scale != 0, quotient(1, torch.where(scale != 0, scale, 1.0)), 0.0)
    y = x * inverse - tables.shifts
    even, odd = (tables.nearest(y, parity) for parity in range(2))
    loss = w * ((even - odd) * ((even + odd) - (y + y)))  # of the even one
    is_odd = loss > 0
    of_parity, loss = is_odd.sum(0, keepdim=True) % 2, loss.abs_()
    changes = torch.zeros_like(is_odd).scatter_(0, loss.argmin(0, keepdim=True), of_parity > 0)
    q = torch.where(is_odd ^ changes, odd, even) + tables.shifts
    wq = w * q
    xq = fma(wq[0], x[0], fma(wq[1], x[1], fma(wq[2], x[2], wq[3] * x[3])))
    qq = fma(wq[0], q[0], fma(wq[1], q[1], fma(wq[2], q[2], wq[3] * q[3])))
    return q, sum_by_halves(xq.transpose(0, 1)), sum_by_halves(qq.transpose(0, 1))


def _search(x: Tensor, w: Tensor, tables: _Tables) -> Tensor:
    """The scale of least weighted error of each block, with either table; 0 for blocks of zeros."""
    largest = signed_max(_in_order(x, tables))
    best, best_xq, best_qq = torch.zeros_like(largest), torch.zeros_like(largest), torch.ones_like(largest)
    for factor in TRIAL_FACTORS:
        scale = quotient(largest, float(V4[0, 0] * factor))
        for trial in (scale, -scale):
            _, sxq, sqq = _assign(x, w, trial, tables)
            for xq, qq in zip(sxq, sqq, strict=True):
                score = xq * xq
                better = score * best_qq > best * qq
                best, best_xq = torch.where(better, score, best), torch.where(better, xq, best_xq)
                best_qq = torch.where(better, qq, best_qq)
    return torch.where(largest.abs() < float(MIN_AMAX), 0.0, best_xq / best_qq)


def _in_order(quads: Tensor, tables: _Tables) -> Tensor:
    """The inverse of _quads: [32, blocks]."""
    flat = quads.reshape(BLOCK, -1)
    return torch.empty_like(flat).index_copy_(0, tables.places, flat)


def _fit(x: Tensor, w: Tensor, rows: int, tables: _Tables) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quadruples -> (values float32 [4, 8, blocks], flags bool [blocks], odd integer scales float32 [blocks], d [rows])."""
    scales = _search(x, w, tables).view(rows, -1)
    blocks = scales.shape[1]
    d = quotient(signed_max(scales.T.contiguous()).abs(), MAX_INT_SCALE)
    ratio = scales / torch.where(d != 0, d, 1.0)[:, None] + MAX_INT_SCALE
    odd = 2 * round_product(ratio, torch.full_like(ratio, 0.5)).clamp_(0, MAX_INT_SCALE) - MAX_INT_SCALE
    int_scales = torch.where(d[:, None] != 0, odd, 1.0).view(-1)
    values, flags = torch.zeros_like(x[:, 0]), torch.zeros_like(int_scales, dtype=torch.bool)
    for _ in range(ROUNDS):
        row_scales = d.repeat_interleave(blocks)
        middle, least = int_scales, torch.full_like(int_scales, torch.inf)
        sxq, sqq = torch.zeros_like(int_scales), torch.zeros_like(int_scales)
        for step in (0, -2, 2):
            trial = middle + step
            scale = row_scales * trial
            q, xq, qq = _assign(x, w, scale, tables)
            for flag in range(2):
                error = scale * (scale * qq[flag] - 2 * xq[flag])
                better = (trial.abs() <= MAX_INT_SCALE) & (error < least)
                least, int_scales = torch.where(better, error, least), torch.where(better, trial, int_scales)
                flags, values = torch.where(better, flag > 0, flags), torch.where(better, q[:, flag], values)
                sxq = torch.where(better, trial * xq[flag], sxq)
                sqq = torch.where(better, trial * trial * qq[flag], sqq)
        sxq, sqq = (sum_in_order(total.view(rows, -1).T) for total in (sxq, sqq))
        d = torch.where(sqq > 0, sxq / torch.where(sqq > 0, sqq, 1.0), d)
    return values, flags, int_scales, d


def _words(values: Tensor, flags: Tensor, int_scales: Tensor, tables: _Tables) -> Tensor:
    """The 16-bit words of blocks: int32 [8, blocks]."""
    plain_shift, shift = tables.shifts.view(2)
    plain = values - torch.where(flags, shift, plain_shift)
    codes = torch.bucketize(plain, tables.plain, out_int32=True)
    v = codes[0] | codes[1] << 4 | codes[2] << 8 | codes[3] << 12
    for step in (1, 2, 4, 8):  # each bit the parity of the bits of v up to it
        v = (v ^ v << step) & 0xFFFF
    byte = (int_scales + MAX_INT_SCALE).int() | flags.int()
    bit = torch.arange(QUADS, device=v.device, dtype=torch.int32)[:, None]
    return (v << 1 & 0xFFFF) | (byte >> bit & 1)
