"""What the codes of a scalar type stand for: a table of values, and the factor and offset of every group of weights.

weight = factor * table[flag, code] + offset, in float32 with two roundings, which is what decoders compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import gcd

import numpy as np

from ...formats import TYPES
from .fields import BlockFields

_CELLS = 2  # of the index of nearest values, per unit: midpoints of whole numbers are borders of cells
_EXCLUDED = ("iq1_bn", "iq2_bn", "q8_KV")  # ternary weights; a sum of codes is stored beside the scale


@dataclass(frozen=True, eq=False)
class ValueTable:
    """The values of a type's codes in ascending order, one row for each flag.

    values     float32 [flags, entries]; midpoints: float32 [flags, entries], the last of each row infinite
    codes      uint8 [entries]: the code of each
    nearest    int16 [flags, cells]: the number of the entry that is nearest to the middle of each half-unit cell
    lowest     where the first cell begins
    by_code    float32 [flags, codes]: the value of each code, also of those that are not used
    group      weights that share factor, offset and flag
    """

    values: np.ndarray
    midpoints: np.ndarray
    codes: np.ndarray
    nearest: np.ndarray
    lowest: float
    by_code: np.ndarray
    group: int


@cache
def is_scalar(type_name: str) -> bool:
    """Whether a plain type's codes are those of single weights, each with values that do not depend on other codes."""
    t = TYPES[type_name]
    if t.base is not None or t.codec is None or t.rows > 1 or t.name in _EXCLUDED:
        return False
    layout = BlockFields.of(type_name).layout
    plain = layout.number is None and layout.digits is None and not layout.gray_words
    return plain and layout.size == 1 and layout.sign_codes is None


@cache
def value_table(type_name: str) -> ValueTable:
    layout = BlockFields.of(type_name).layout
    entries = (layout.values[:, 0] if layout.decoded is None else layout.decoded).astype(np.float32)
    shifts = np.array(layout.shifts if layout.flags is not None else (0,), np.float32)
    by_code = entries + shifts[:, None]
    order = np.argsort(entries, kind="stable")
    order = order[np.r_[True, np.diff(entries[order]) > 0]]
    order = order[entries[order] > -128]  # products of eight-bit types negate codes: -128 is left out
    values = np.ascontiguousarray(by_code[:, order])
    midpoints = np.full_like(values, np.inf)
    midpoints[:, :-1] = (values[:, 1:] + values[:, :-1]) / 2
    lowest = float(np.floor(values.min()))
    middles = lowest + (np.arange(int(values.max() - lowest + 1) * _CELLS) + 0.5) / _CELLS
    nearest = np.stack([np.searchsorted(row, middles) for row in midpoints]).astype(np.int16)
    counts = [bits.shape[-2] for name, bits in layout.bit_arrays().items() if name not in ("codes", "sums")]
    group = layout.block
    for count in counts:
        group = gcd(group, layout.block // count)
    return ValueTable(values, midpoints, order.astype(np.uint8), nearest, lowest, by_code, group)


@dataclass
class ScalarRows:
    """Encoded rows of a scalar type, taken apart; all arrays [rows, ...].

    codes    uint8 [rows, n]
    factor, offset  float32 [rows, n / group]; flag: uint8 [rows, n / group]
    """

    fields: BlockFields
    table: ValueTable
    codes: np.ndarray
    factor: np.ndarray
    offset: np.ndarray
    flag: np.ndarray

    @classmethod
    def of(cls, q: np.ndarray, type_name: str, n: int) -> ScalarRows:
        fields, table = BlockFields.of(type_name), value_table(type_name)
        factor, offset, flag = group_parameters(fields, q, n, table.group)
        return cls(fields, table, fields.read(q, "codes"), factor, offset, flag)

    def values(self) -> np.ndarray:
        """float32 [rows, n]: the weights that decoders compute."""
        repeats = self.table.group
        flag, factor, offset = (np.repeat(a, repeats, axis=1) for a in (self.flag, self.factor, self.offset))
        with np.errstate(over="ignore", invalid="ignore"):
            return self.table.by_code[flag, self.codes] * factor + offset

    def put_codes(self, q: np.ndarray) -> None:
        """Writes the codes into the rows' bytes."""
        self.fields.write(q, "codes", self.codes)


def group_parameters(fields: BlockFields, q: np.ndarray, n: int, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Factor, offset (float32) and flag (uint8) of every group, [rows, n / group] each, with the roundings of decoders."""
    layout, groups = fields.layout, n // group

    def per_group(values: np.ndarray) -> np.ndarray:
        return np.repeat(values, groups // values.shape[1], axis=1)

    with np.errstate(over="ignore", invalid="ignore"):
        factor = per_group(fields.read_scale(q) * np.float32(layout.unit))
        if layout.scales is not None and layout.levels is not None:
            factor = factor * per_group(layout.levels.astype(np.float32)[fields.read(q, "scales")])
        if layout.signs is not None:
            factor = np.where(per_group(fields.read(q, "signs")) > 0, -factor, factor)
        offset = np.zeros((len(q), groups), np.float32)
        if layout.dmin is not None and layout.minima is not None:
            dmin, minima = fields.read_half(q, "dmin"), fields.read(q, "minima")
            offset = -per_group(np.repeat(dmin, minima.shape[1] // dmin.shape[1], axis=1) * minima.astype(np.float32))
        if layout.offset is not None:
            offset = per_group(fields.read_half(q, "offset"))
    flag = np.zeros((len(q), groups), np.uint8) if layout.flags is None else per_group(fields.read(q, "flags"))
    return np.ascontiguousarray(factor, np.float32), np.ascontiguousarray(offset, np.float32), np.ascontiguousarray(flag)
