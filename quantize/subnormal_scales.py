"""Rows of weights so small that the float16 scales of their type are subnormal, encoded with what those can hold.

Below 2^-14 float16 numbers are multiples of 2^-24, so that a small scale is coarse or zero. The reference's encoders give a
block the smallest scale d that its largest scale code allows. Here the rows are encoded as multiples of a power of two, whose
scales are exact; then larger d are tried with smaller scale codes, and weights are rounded to what d times those can represent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ..formats import layouts
from .plain_rows import PlainRows

if TYPE_CHECKING:
    from ..formats.layouts import BlockLayout
    from ..formats.layouts.block_bits import BlockBits

_SMALLEST = 2.0**-24  # float16
_STEPS_PER_OCTAVE = 4  # of the scales that are tried
_WEIGHTS = 1 << 16  # at a time


def has_float16_scales(name: str) -> bool:
    """Whether the type's weights have float16 scales, of a block or a row."""
    layout = layouts.layout_of(name)
    return layout.number is None and (layout.row_scale == "f16" or (layout.d is not None and layout.d_format == "f16"))


def encode_small(x: np.ndarray, plain: PlainRows, importance: np.ndarray | None) -> np.ndarray:
    """Encodes small weights, float32 [rows, n] in whole groups of interleaved rows: uint8 [rows, row_bytes] of `plain.type`.

    importance: as for `encode`. `has_float16_scales` must hold for the type, and no scale may be above float16's range.
    """
    step = max(1, _WEIGHTS // (x.shape[1] * plain.type.rows)) * plain.type.rows
    return np.concatenate([_refit(x[i : i + step], plain, importance) for i in range(0, len(x), step)])


def _refit(x: np.ndarray, plain: PlainRows, importance: np.ndarray | None) -> np.ndarray:
    from ..formats.layouts.block_bits import BlockBits

    name, n_rows = plain.type.name, plain.type.rows
    layout = layouts.layout_of(name)
    amax = np.abs(x).max(1)
    exponents = np.frexp(np.where(amax > 0, amax, 1))[1]
    rows = BlockBits.unpack(plain.encode(np.ldexp(x, -exponents[:, None]), importance), name, x.shape[1])
    shape = (len(x) // n_rows, n_rows, x.shape[1] // layout.block, layout.block)
    power = np.ldexp(1.0, exponents).reshape(-1, 1, n_rows, 1)
    target = x.astype(np.float64).reshape(shape).transpose(0, 2, 1, 3)
    weight = np.broadcast_to(1 if importance is None else importance.astype(np.float64), x.shape).reshape(shape)
    weight = weight.transpose(0, 2, 1, 3)
    target = target + _put_minima(layout, rows, power, weight)
    _put_scales(layout, rows, power, target, weight)
    return rows.packed()


def _put_minima(layout: BlockLayout, rows: BlockBits, power: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """What is subtracted from weights, per weight: as encoded times `power`, then as float16 holds it, which is written."""
    if layout.offset is not None:
        offset = (rows.float16s(layout.offset) * power).astype(np.float16)
        rows.put_float16s(layout.offset, offset)
        return -offset.astype(np.float64)
    if layout.dmin is None or layout.minima is None:
        return np.zeros(1)
    wanted = rows.float16s(layout.dmin) * power * rows.numbers(layout.minima)
    totals = _runs(weight, wanted.shape[-1]).sum(-1)
    codes = np.arange(1 << layout.minima.shape[-1], dtype=np.float64)

    def cost(minima: np.ndarray) -> np.ndarray:
        return totals * np.square(minima - wanted)

    dmin, chosen = _best_scale(wanted, codes, cost, np.zeros(1, bool), by_row=False)
    rows.put_float16s(layout.dmin, dmin)
    rows.put(layout.minima, chosen)
    return _per_weight(dmin * chosen, layout.block)


def _put_scales(layout: BlockLayout, rows: BlockBits, power: np.ndarray, target: np.ndarray, weight: np.ndarray) -> None:
    from ..formats.layouts.decoding import block_scales, signed_values

    levels = np.ones(1) if layout.levels is None else layout.levels.astype(np.float64)
    d = block_scales(layout, rows) * power
    wanted = d * np.ones((1, rows.bits.shape[1], 1, 1)) if layout.scales is None else d * levels[rows.numbers(layout.scales)]
    values = signed_values(layout, rows).astype(np.float64) * layout.unit
    nearest = _nearest_code(layout, rows) if _has_table(layout) else None
    targets, weights = (_runs(a, wanted.shape[-1]) for a in (target, weight))

    def cost(scales: np.ndarray) -> np.ndarray:
        v = values if nearest is None else nearest(target, _per_weight(scales, layout.block))[0]
        return (weights * np.square(scales[..., None] * _runs(v, scales.shape[-1]) - targets)).sum(-1)

    d, codes = _best_scale(wanted, levels, cost, d < 0, by_row=layout.row_scale is not None)
    if layout.row_scale is not None:
        rows.metas = rows.metas.copy()
        rows.metas[:, :, :2] = d[:, 0].astype(np.float16).view(np.uint8)
    elif layout.d is not None:
        rows.put_float16s(layout.d, d)
    if layout.scales is not None:
        rows.put(layout.scales, codes)
    if nearest is not None:
        rows.put(layout.codes, nearest(target, _per_weight(d * levels[codes], layout.block))[1])


def _best_scale(
    wanted: np.ndarray, levels: np.ndarray, cost: Callable[[np.ndarray], np.ndarray], negative: np.ndarray, by_row: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The d and the codes of levels whose products, nearly the wanted ones, cost least.

    wanted float64 [groups, blocks, rows, n]; cost takes and gives such arrays. d float64 [groups, blocks, rows, 1], of the sign
    that `negative` says, one block if by_row; codes int64, shaped as wanted.
    """
    owner = (1, 3) if by_row else (3,)
    order = np.argsort(levels, kind="stable")
    magnitudes = np.abs(levels[levels != 0])
    finest = np.abs(wanted).max(owner, keepdims=True) / magnitudes.max()
    n_steps = int(np.ceil(_STEPS_PER_OCTAVE * (1 + np.log2(magnitudes.max() / magnitudes.min()))))
    least = cost(np.zeros(wanted.shape)).sum(owner, keepdims=True)  # of d = 0, where the smallest one is too large
    best_d, best_codes = np.zeros(finest.shape), np.zeros(wanted.shape, np.int64)
    for step in range(-1, n_steps):
        d = np.maximum(finest * 2.0 ** (step / _STEPS_PER_OCTAVE), _SMALLEST).astype(np.float16).astype(np.float64)
        d = np.where(negative, -d, d)
        above = np.searchsorted(levels[order], wanted / d).clip(0, len(levels) - 1)
        pair = [order[np.maximum(above - 1, 0)], order[above]]
        costs = [cost(d * levels[codes]) for codes in pair]
        codes = np.where(costs[0] < costs[1], *pair)
        total = np.minimum(*costs).sum(owner, keepdims=True)
        better = total < least
        least, best_d = np.where(better, total, least), np.where(better, d, best_d)
        best_codes = np.where(better, codes, best_codes)
    return best_d, best_codes


def _has_table(layout: BlockLayout) -> bool:
    """Whether each weight has a code of its own, which can be changed alone."""
    return layout.table is not None and layout.size == 1 and layout.digits is None and not layout.gray_words


def _nearest_code(layout: BlockLayout, rows: BlockBits) -> Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """The function (weights, scales) -> (values, codes) that are nearest; arrays [groups, blocks, rows, block]."""
    table = (layout.values[:, 0] if layout.decoded is None else layout.decoded).astype(np.float64) * layout.unit
    order = np.argsort(table, kind="stable")
    between = (table[order][1:] + table[order][:-1]) / 2
    shift, sign = np.zeros(1), np.ones(1)
    if layout.flags is not None:
        shift = _per_weight(np.array(layout.shifts)[rows.numbers(layout.flags)] * layout.unit, layout.block)
    if layout.signs is not None:
        sign = _per_weight(1.0 - 2 * rows.numbers(layout.signs), layout.block)

    def nearest(weights: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        wanted = np.divide(weights * sign, scales, out=np.zeros(weights.shape), where=scales != 0) - shift
        codes = order[np.searchsorted(between, wanted)]
        return (table[codes] + shift) * sign, codes

    return nearest


def _runs(a: np.ndarray, n: int) -> np.ndarray:
    """[..., block] -> [..., n, block / n]"""
    return a.reshape(*a.shape[:-1], n, -1)


def _per_weight(a: np.ndarray, block: int) -> np.ndarray:
    """[..., n] -> [..., block]"""
    return np.repeat(a, block // a.shape[-1], axis=-1)
