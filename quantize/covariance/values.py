"""What the codes of a scalar type stand for: a table of values, and the factor and offset of every group of weights.

weight = factor * table[flag, code] + offset, in float32 with two roundings, which is what decoders compute.
"""

from __future__ import annotations

from functools import cache
from math import gcd
from typing import Any

import numpy as np

from ...data_classes import dataclass
from ...formats import TYPES
from ..codecs.fields import BlockFields

_CELLS = 2  # of the index of nearest values, per unit: midpoints of whole numbers are borders of cells
_GROUP_FIELDS = ("scales", "flags", "minima", "signs")
_HALVES = ("dmin", "offset")
_EXCLUDED = ("iq1_bn", "iq2_bn", "q8_KV")  # ternary weights; a sum of codes is stored next to the scale


@dataclass(frozen=True, eq=False)
class ValueTable:
    """The values of a type's codes in ascending order, one row for each flag.

    values     float32 [flags, entries]; midpoints: float32 [flags, entries], the last of each row infinite
    codes      uint8 [entries]: the code of each
    nearest    int16 [flags, cells]: the number of the entry that is nearest to the middle of each half-unit cell
    lowest     where the first cell begins
    by_code    float32 [flags, codes]: the value of each code, also of those that are not used
    entries    int16 [256]: the entry of each code (of those not used, the nearest)
    group      weights that share factor, offset and flag
    """

    values: np.ndarray
    midpoints: np.ndarray
    codes: np.ndarray
    nearest: np.ndarray
    lowest: float
    by_code: np.ndarray
    entries: np.ndarray
    group: int


@cache
def is_scalar(type_name: str) -> bool:
    """Whether a plain type's codes are those of single weights, each with values that do not depend on other codes. (Those of
    iq4_kss are, but the parity of every four has to be even.)"""
    t = TYPES[type_name]
    if t.base is not None or t.codec is None or t.rows > 1 or t.name in _EXCLUDED:
        return False
    layout = BlockFields.of(type_name).layout
    has_scale = layout.d is not None or layout.row_scale is not None
    return has_scale and layout.number is None and layout.digits is None and layout.size == 1 and layout.sign_codes is None


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
    numbers = np.zeros(256, np.int16)
    numbers[: len(entries)] = np.abs(entries[:, None] - entries[order]).argmin(axis=1)
    counts = [bits.shape[-2] for name, bits in layout.bit_arrays().items() if name not in ("codes", "sums")]
    group = layout.block
    for count in counts:
        group = gcd(group, layout.block // count)
    return ValueTable(values, midpoints, order.astype(np.uint8), nearest, lowest, by_code, numbers, group)


@dataclass
class GroupFields:
    """What makes the factors and offsets of the groups of encoded rows.

    groups   of a row
    d        float32 [rows, blocks], or [rows, 1] where a row has one scale
    scales, flags, minima, signs  uint8 [rows, numbers], or None where the type has none
    dmin     float32 [rows, blocks]: what minima are multiplied with and subtracted, or what is added (`offset`); or None
    """

    fields: BlockFields
    groups: int
    d: np.ndarray
    scales: np.ndarray | None
    flags: np.ndarray | None
    minima: np.ndarray | None
    signs: np.ndarray | None
    dmin: np.ndarray | None

    @staticmethod
    def read(fields: BlockFields, q: np.ndarray) -> dict[str, Any]:
        """The fields d to dmin of rows."""
        bits = fields.layout.bit_arrays()
        numbers = {name: fields.read(q, name) if name in bits else None for name in _GROUP_FIELDS}
        halves = next((fields.read_half(q, name) for name in _HALVES if name in bits), None)
        return {"d": fields.read_scale(q), **numbers, "dmin": halves}

    def write(self, q: np.ndarray) -> None:
        """Puts them back into the rows' bytes."""
        self.fields.write_scale(q, self.d)
        for name in _GROUP_FIELDS:
            if (numbers := getattr(self, name)) is not None:
                self.fields.write(q, name, numbers)
        if self.dmin is not None:
            self.fields.write_half(q, next(name for name in _HALVES if name in self.fields.layout.bit_arrays()), self.dmin)

    def per_group(self, values: np.ndarray) -> np.ndarray:
        """[rows, numbers] -> [rows, groups]."""
        return np.repeat(values, self.groups // values.shape[1], axis=1)

    def factors(self, d: np.ndarray, scales: np.ndarray | None) -> np.ndarray:
        """float32, the factors of groups, from arrays that numpy broadcasts over [rows, groups, candidates]: d in every group,
        scale codes. Rounded as decoders do."""
        layout = self.fields.layout
        with np.errstate(over="ignore", invalid="ignore"):
            factor = d * np.float32(layout.unit)
            if scales is not None and layout.levels is not None:
                factor = factor * layout.levels.astype(np.float32)[scales]
            if self.signs is not None:
                signs = self.per_group(self.signs)
                factor = np.where(signs.reshape(*signs.shape, *[1] * (factor.ndim - 2)) > 0, -factor, factor)
        return factor

    def offsets(self, dmin: np.ndarray, minima: np.ndarray | None) -> np.ndarray:
        """float32, the offsets of groups, likewise from dmin in every group and minimum codes."""
        with np.errstate(over="ignore", invalid="ignore"):
            return dmin if minima is None else -(dmin * minima.astype(np.float32))

    def parameters(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Factor, offset (float32) and flag (uint8) of every group, [rows, groups] each."""
        shape = len(self.d), self.groups
        scales, minima, flags = (None if a is None else self.per_group(a) for a in (self.scales, self.minima, self.flags))
        factor = self.factors(self.per_group(self.d), scales)
        offset = np.zeros(shape, np.float32) if self.dmin is None else self.offsets(self.per_group(self.dmin), minima)
        flag = np.zeros(shape, np.uint8) if flags is None else flags
        return tuple(map(np.ascontiguousarray, (factor, offset, flag)))  # type: ignore[return-value]


@dataclass
class ScalarRows(GroupFields):
    """Encoded rows of a scalar type, taken apart; codes: uint8 [rows, n]."""

    table: ValueTable
    codes: np.ndarray

    @classmethod
    def of(cls, q: np.ndarray, type_name: str) -> ScalarRows:
        fields, table = BlockFields.of(type_name), value_table(type_name)
        codes = fields.read(q, "codes")
        groups = codes.shape[1] // table.group
        return cls(fields, groups, **cls.read(fields, q), table=table, codes=codes)

    def write(self, q: np.ndarray) -> None:
        self.fields.write(q, "codes", self.codes)
        super().write(q)

    def values(self, groups: slice = slice(None)) -> np.ndarray:
        """float32 [rows, n]: the weights that decoders compute; groups: only those of these groups."""
        factor, offset, flag = (np.repeat(a[:, groups], self.table.group, axis=1) for a in self.parameters())
        codes = self.codes.reshape(len(self.codes), self.groups, -1)[:, groups].reshape(len(self.codes), -1)
        with np.errstate(over="ignore", invalid="ignore"):
            return self.table.by_code[flag, codes] * factor + offset
