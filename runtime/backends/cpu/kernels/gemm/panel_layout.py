"""What the unpacking of panels needs to know of a type's blocks, derived from the type's `BlockLayout`.

A weight is level * d * (number - zero) + term. A number is a code, or the entry of a table at that code plus `zero`, shifted by
a constant where the group's flag is set. All bit arrays have a first axis of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from ......formats.layouts import BlockLayout, interleaving_of, layout_of
from ......formats.layouts.description import SIGNED_BYTES
from ......formats.layouts.tables import HALF_UE4M3
from ......formats.types import TYPES


@dataclass(frozen=True, eq=False)
class PanelLayout:
    """codes    bits [rows, block, width]
    group       columns that share a scale: 16 or 32 (of a longer block the scale is repeated)
    zero        the number that stands for 0: a power of two or 0
    table       the numbers by code, less zero; None: the code itself is the number
    signed_bytes  the codes are signed bytes
    flags       bits [rows, groups, 1]; where one is set, `shift` is added to the group's numbers
    scales      bits [rows, groups, width] of scale codes; level = code * level_step + level_zero, negated where the bit of
                scale_signs is set (signed_levels: the code is a signed byte; ue4m3_levels: it is an unsigned E4M3 number, of
                which the level is half). None: all levels are 1
    d           byte offset [rows] of the float that levels are multiplied with, None: there is none; d_format: 'f16', 'f32' or
                'e8m0'
    row_scale   d comes once per row, in the bytes before the blocks
    minima      bits [rows, groups, width]: -code * m is the term of a group
    m           byte offset [rows] of the float16 for minima or, without them, of the term of all groups; None: no terms
    """

    codes: np.ndarray
    group: int
    zero: int
    table: tuple[int, ...] | None
    signed_bytes: bool
    flags: np.ndarray | None
    shift: int
    scales: np.ndarray | None
    level_step: int
    level_zero: int
    signed_levels: bool
    ue4m3_levels: bool
    scale_signs: np.ndarray | None
    d: np.ndarray | None
    d_format: str
    row_scale: bool
    minima: np.ndarray | None
    m: np.ndarray | None

    @property
    def most(self) -> int:
        """The largest code in a panel."""
        if self.signed_bytes:
            return 255
        largest = (1 << self.codes.shape[-1]) - 1 if self.table is None else max(self.table) + self.zero
        return largest + (max(self.shift, 0) if self.flags is not None else 0)


class PanelForm(NamedTuple):
    """What panels of bytes hold: weight = scale * (code - zero) + term.

    zero a power of two or 0; most: the largest code; group: columns that share a scale, 16 or 32; has_terms: whether terms are
    not all 0
    """

    zero: int
    most: int
    group: int
    has_terms: bool


_FORMAT_BYTES = {"f16": 2, "f32": 4, "e8m0": 1}


@cache
def panel_layout(type_name: str) -> PanelLayout | None:
    """The layout of a type, plain or interleaved; None for one that panels are not unpacked from (grids, trellises, floats)."""
    kind, layout = TYPES[type_name], layout_of(type_name)
    if not kind.has_codec or (kind.rows > 1 and kind.base is None) or layout.table is None or layout.size > 1:
        return None
    if layout.digits is not None or layout.gray_words or (kind.base and interleaving_of(type_name).flip):
        return None
    values = layout.values[:, 0]
    signed_bytes = np.array_equal(values, SIGNED_BYTES)
    lowest = -int(values.min())
    zero = 1 << (lowest - 1).bit_length() if lowest > 0 else 0
    is_code = signed_bytes or np.array_equal(values, np.arange(len(values)) - zero)
    ue4m3_levels = layout.levels is not None and np.array_equal(layout.levels, HALF_UE4M3)
    step, first, signed_levels = _levels(None if ue4m3_levels else layout.levels)
    m = layout.dmin if layout.dmin is not None else layout.offset
    return PanelLayout(
        codes=layout.codes,
        group=layout.group,
        zero=zero,
        table=None if is_code else tuple(values.tolist()),
        signed_bytes=signed_bytes,
        flags=layout.flags,
        shift=layout.shifts[1],
        scales=layout.scales,
        level_step=step,
        level_zero=first,
        signed_levels=signed_levels,
        ue4m3_levels=ue4m3_levels,
        scale_signs=layout.signs,
        d=_places_of_d(kind.rows, layout),
        d_format=layout.row_scale or layout.d_format,
        row_scale=layout.row_scale is not None,
        minima=layout.minima,
        m=None if m is None else m[:, 0, 0] // 8,
    )


def _places_of_d(rows: int, layout: BlockLayout) -> np.ndarray | None:
    """PanelLayout.d."""
    if layout.d is not None:
        return layout.d[:, 0, 0] // 8
    return None if layout.row_scale is None else np.arange(rows) * _FORMAT_BYTES[layout.row_scale]


def _levels(levels: np.ndarray | None) -> tuple[int, int, bool]:
    """(step, first, whether they are signed bytes) of what scale codes stand for."""
    if levels is None:
        return 1, 0, False
    if np.array_equal(levels, SIGNED_BYTES):
        return 1, 0, True
    step = int(levels[1] - levels[0])
    assert (np.diff(levels) == step).all(), "levels of a table"
    return step, int(levels[0]), False
