"""iq2_k ... iq6_k and iq2_ks ... iq5_ks on a device: the searches of `codecs/iqk`, in torch.

A row here is what shares one stored scale d, as there: a superblock of the K types, a row of the matrix of the KS types.
Blocks are elements first, [block, blocks], those of a row side by side.

The scale search for tables of four values is exhaustive (`codecs/iqk/boundary_search.py` says why this is enough): as the
scale grows from zero each weight changes its value at most twice, from an outer value to inner ones, at known scales. The
events of a block are sorted by their scale, and running sums give the score after each.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from ...formats import TYPES
from ...formats.layouts import layout_of
from ..codecs.iqk.fit import MAGNITUDE, ODD, SEARCHED, SIGNED
from ..codecs.iqk.iq_k_ks import IQK_TYPES, IqkType
from ..codecs.iqk.table_search import MIN_AMAX, ORDINARY_EXPONENTS
from .blocks import (
    fma,
    fused_sum,
    guarded_importance,
    nearest_half,
    normalised_importance,
    normalised_rows,
    quotient,
    scaled,
    signed_max,
    sum_in_order,
    superblock_weights,
    to_blocks,
    wide,
)
from .packing import half_bits, number_bytes, packer_of
from .scale_search import round_product


def search_boundaries(x: Tensor, w: Tensor, table: np.ndarray) -> tuple[Tensor, Tensor]:
    """Scale float32 and flag uint8 of each block [blocks], for x, w [block, blocks]; table: float32 [2, 4 or more].

    Blocks of zeros get 0 and 0.
    """
    best = torch.zeros(x.shape[1], dtype=wide(x.device), device=x.device)
    scale = torch.zeros_like(best)
    flags = torch.zeros(x.shape[1], dtype=torch.uint8, device=x.device)
    last = torch.zeros_like(x, dtype=torch.bool).scatter_(0, x.argmax(0, keepdim=True), True)
    for variant in range(4):
        shifted, down = variant % 2, variant >= 2
        values = [float(v) for v in table[shifted][:4]]
        sxq, sqq = _best_cut(-x if down else x, w, values, last, values[0] if down else values[3])
        if down:
            sxq = -sxq
        better = (sqq > 0) & (sxq * sxq > best * sqq)
        scale = torch.where(better, sxq / sqq, scale)
        best = torch.where(better, scale * sxq, best)
        flags = torch.where(better, shifted, flags)
    zero = x.abs().amax(0) < float(MIN_AMAX)
    return torch.where(zero, 0.0, scale).float(), torch.where(zero, 0, flags)


def _best_cut(y: Tensor, w: Tensor, values: list[float], last: Tensor, last_value: float) -> tuple[Tensor, Tensor]:
    """Sums w y q and w q q, float64 [blocks], of the cut of best score. `last` marks the weight that keeps its value."""
    v0, v1, v2, v3 = values
    dtype = wide(y.device)
    positive, negative = y > 0, (y < 0) & ~last
    outer = torch.where(positive, v3, torch.where(y < 0, v0, v2))
    inner = torch.where(y < 0, v1, v2)
    outer, inner = torch.where(last, last_value, outer), torch.where(last, last_value, inner)
    wy, w = w.to(dtype) * y, w.to(dtype)
    # When y / scale passes the middle between two values: from the outer one to an inner, and of negatives to the third.
    keys = torch.cat([torch.maximum(y * (2 / (v2 + v3)), y * (2 / (v0 + v1))), y * (2 / (v1 + v2))])
    second = torch.where(negative, 1.0, 0.0)
    gains = torch.cat([wy * (inner - outer), wy * second * (v2 - v1)])
    costs = torch.cat([w * (inner * inner - outer * outer), w * second * (v2 * v2 - v1 * v1)])
    order = keys.argsort(0)
    sxq = torch.cat([(wy * outer).sum(0, keepdim=True), gains.gather(0, order)]).cumsum(0)
    sqq = torch.cat([(w * outer * outer).sum(0, keepdim=True), costs.gather(0, order)]).cumsum(0)
    score = torch.where(sqq > 0, sxq * sxq / torch.where(sqq > 0, sqq, 1.0), 0.0)
    at = score.argmax(0, keepdim=True)
    return sxq.gather(0, at)[0], sqq.gather(0, at)[0]


SUPERBLOCK = 256


class _Tables:
    """The value tables of a type on a device. values: float32 [2, entries]; midpoints: float32 [2, entries - 1]."""

    def __init__(self, kind: IqkType, device: torch.device):
        self.host = kind.table
        self.values = torch.from_numpy(kind.table).to(device)
        self.midpoints = (self.values[:, 1:] + self.values[:, :-1]) / 2

    def codes(self, y: Tensor, table: int) -> Tensor:
        """int32: the number of midpoints that are <= y."""
        return torch.bucketize(y, self.midpoints[table], right=True, out_int32=True)

    def nearest(self, y: Tensor, flags: Tensor) -> tuple[Tensor, Tensor]:
        """y [block, blocks] and flags [blocks] -> (codes int32, their values)."""
        codes = torch.where(flags > 0, self.codes(y, 1), self.codes(y, 0))
        entries = self.values.shape[1]
        return codes, self.values.view(-1)[(codes + flags.int() * entries).long()]


@cache
def _tables(name: str, device: torch.device) -> _Tables:
    return _Tables(IQK_TYPES[name], device)


def encode(x: Tensor, importance: Tensor | None, type_name: str) -> Tensor:
    """float32 [rows, n], importance [n] or [rows, n] -> uint8 [rows, row_bytes]."""
    kind, tensor_type = IQK_TYPES[type_name], TYPES[type_name]
    rows, n = x.shape
    row = n if tensor_type.row_meta else SUPERBLOCK
    qw = normalised_importance(guarded_importance(x, importance, kind.block))
    x, exponents = normalised_rows(x.reshape(-1, row), ORDINARY_EXPONENTS, float(MIN_AMAX))
    superblocks, qw = x.reshape(-1, SUPERBLOCK), None if qw is None else qw.reshape(-1, SUPERBLOCK)
    w = superblock_weights(superblocks, qw, kind.sigma2_factor, kind.sigma2_share).view(x.shape)
    codes, flags, int_scales, d = _fit(x, w, kind, _tables(type_name, x.device))
    d = scaled(d, exponents)
    if kind.zero_bytes:
        d = torch.where(d == 0, 0.0, d) if not tensor_type.row_meta else d
    numbers = _numbers(kind, codes.view(-1, SUPERBLOCK), flags, int_scales)
    if kind.zero_bytes:
        live = (d != 0).repeat_interleave(row // SUPERBLOCK)
        numbers = {name: torch.where(live[:, None], values, 0) for name, values in numbers.items()}
    if not tensor_type.row_meta:
        numbers["d"] = half_bits(nearest_half(d))
        return packer_of(type_name, x.device)(numbers).view(rows, -1)
    packed = packer_of(type_name, x.device)(numbers).view(rows, -1)
    return torch.cat([number_bytes(d if tensor_type.row_meta == 4 else nearest_half(d)), packed], dim=1)


def _numbers(kind: IqkType, codes: Tensor, flags: Tensor, int_scales: Tensor) -> dict[str, Tensor]:
    """The numbers of the layout's fields per superblock, but for d."""
    layout = layout_of(kind.name)
    per_block = SUPERBLOCK // kind.block
    scales = int_scales.view(-1, per_block).int()
    numbers = {"codes": codes, "flags": flags.view(-1, per_block).int()}
    if layout.signs is not None:
        numbers["signs"], scales = (scales < 0).int(), scales.abs()
    assert layout.levels is not None
    lowest = int(layout.levels.min())
    inverse = np.zeros(int(layout.levels.max()) - lowest + 1, np.int32)
    inverse[layout.levels.astype(int) - lowest] = np.arange(len(layout.levels))
    numbers["scales"] = torch.from_numpy(inverse).to(scales.device)[(scales - lowest).long()]
    return numbers


def _fit(x: Tensor, w: Tensor, kind: IqkType, tables: _Tables) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, w [rows, n] -> codes int32 [rows, n], flags and int_scales [rows, blocks], d [rows]."""
    rows = len(x)
    xb, wb = to_blocks(x, kind.block), to_blocks(w, kind.block)
    scales, flags = search_boundaries(xb, wb, kind.table) if kind.trials == (0, 0) else _search(xb, wb, kind, tables)
    if kind.requantise:
        _, q = tables.nearest(xb * _inverse(scales), flags)
        sxq, sqq = _weighted_sums(xb, wb, q)
        scales = torch.where((scales != 0) & (sqq > 0), sxq / torch.where(sqq > 0, sqq, 1.0), scales)
    d, int_scales = _integer_scales(scales.view(rows, -1), wb, kind)
    scale = (d[:, None] * int_scales).view(-1)
    codes, q = tables.nearest(xb * _inverse(scale), flags)
    q = q * torch.where(scale != 0, int_scales.view(-1), 0.0)
    if kind.zero_codes:
        codes = torch.where(scale == 0, 0, codes)
    q = q.T.reshape(x.shape)
    if kind.pairwise_sums:
        sxq, sqq = _pairwise_weighted_sums(x, w, q)
    else:
        sxq, sqq = _weighted_sums(x.T.contiguous(), w.T.contiguous(), q.T.contiguous())
    d = torch.where(sqq > 0, sxq / torch.where(sqq > 0, sqq, 1.0), d)
    return codes.T.reshape(x.shape), flags.view(rows, -1), int_scales, d * float(np.float32(kind.scale_factor))


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale != 0, quotient(1, torch.where(scale != 0, scale, 1.0)), 0.0)


def _weighted_sums(x: Tensor, w: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    wq = w * q
    return fused_sum(wq, x), fused_sum(wq, q)


def _pairwise_weighted_sums(x: Tensor, w: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, n], with the terms of elements 16 apart in each 32 added before they join the sum."""
    x, w, q = (t.view(len(t), -1, 2, 16) for t in (x, w, q))
    wq, wq2 = (w * q)[:, :, 0], (w * q)[:, :, 1]

    def total(of: Tensor) -> Tensor:
        return sum_in_order(fma(wq, of[:, :, 0], wq2 * of[:, :, 1]).flatten(1).T)

    return total(x), total(q)


def _search(x: Tensor, w: Tensor, kind: IqkType, tables: _Tables) -> tuple[Tensor, Tensor]:
    """Scale and flag of each block of least weighted error, of trials around the largest weight on the first table value."""
    largest = signed_max(x)
    zero = largest.abs() < float(MIN_AMAX)
    largest = torch.where(zero, 1.0, largest)
    scale, best = torch.zeros_like(largest), torch.zeros_like(largest)
    flags = torch.zeros_like(largest, dtype=torch.uint8)
    ntry, step = kind.trials
    first_plain, first_shifted = (float(tables.host[flag, 0]) for flag in (0, 1))
    first = quotient(1, quotient(-largest, first_plain))
    trials = [(first, 0), (-first, 0)]
    for i in range(-ntry, ntry + 1):
        for flag, value in enumerate((first_plain, first_shifted)):
            inverse = quotient(i * step + value, largest)
            trials += [(inverse, flag), (-inverse, flag)]
    for number, (inverse, flag) in enumerate(trials):
        q = tables.values[flag][tables.codes(x * inverse, flag).long()]
        sxq, sqq = _weighted_sums(x, w, q)
        better = (sqq > 0) & (sxq * sxq > best * sqq)
        scale = torch.where(better, sxq / torch.where(sqq > 0, sqq, 1.0), scale)
        best = torch.where(better, scale * sxq, best)
        if number > 1:  # the first two are of the plain table anyway
            flags = torch.where(better, flag, flags)
    return torch.where(zero, 0.0, scale), torch.where(zero, 0, flags)


def _integer_scales(scales: Tensor, wb: Tensor, kind: IqkType) -> tuple[Tensor, Tensor]:
    """Block scales [rows, blocks] -> (d [rows], whole numbers float32 [rows, blocks])."""
    method, divisor, low, high = kind.scheme
    columns = scales.T.contiguous()
    largest = signed_max(columns)
    if method == SEARCHED:
        d = _search_row_scale(columns, sum_in_order(wb).view(scales.shape).T.contiguous(), largest, divisor)
    else:
        d = quotient(-largest if method == SIGNED else largest.abs(), divisor)
    inverse = _inverse(d)[:, None].expand_as(scales)
    half = torch.full_like(inverse, 0.5)
    if method == MAGNITUDE:
        odd = 2 * round_product(fma(inverse, scales.abs(), torch.full_like(inverse, -1)), half).clamp_(low, high) + 1
        return d, torch.where(scales < 0, -odd, odd)
    if method == ODD:
        return d, 2 * round_product(fma(inverse, scales, torch.full_like(inverse, divisor)), half).clamp_(low, high) - divisor
    return d, round_product(scales, inverse).clamp_(low, high)


def _search_row_scale(scales: Tensor, weights: Tensor, largest: Tensor, limit: int) -> Tensor:
    """d of least weighted error for scales [blocks, rows] as its multiples -limit ... limit - 1; 0 where all are 0."""
    zero = largest == 0
    divisor = torch.where(zero, 1.0, largest)
    d, best = torch.zeros_like(largest), torch.zeros_like(largest)
    for trial in range(19):
        i = trial - 9 if trial > 9 else trial - 10 if trial else 0
        inverse = quotient(-float(np.float32(limit) + np.float32(0.1) * np.float32(i)), divisor)
        q = round_product(scales, inverse).clamp_(-limit, limit - 1)
        sxq, sqq = _weighted_sums(scales, weights, q)
        better = (sqq > 0) & ((sxq * sxq > best * sqq) if trial else torch.ones_like(zero))
        d = torch.where(better, sxq / torch.where(sqq > 0, sqq, 1.0), d)
        best = torch.where(better, d * sxq, best)
    return torch.where(zero, 0.0, d)
