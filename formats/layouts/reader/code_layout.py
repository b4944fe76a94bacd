"""What LLVM code that reads blocks needs to know of a type, derived from its `BlockLayout`.

    weight = d * (level_step * code + level_zero) * (table[code] + shift * flag) - dmin * minimum + offset

Codes become bytes, so tables hold integers, and weights are multiples of a `unit`. All bit arrays have a first axis of rows.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from ....data_classes import dataclass
from ...types import TYPES
from ..description import SIGNED_BYTES, BlockLayout
from ..table import layout_of
from ..tables import HALF_UE4M3, Trellis


@dataclass(frozen=True, eq=False)
class CodeLayout:
    """block       weights per block; group: weights per scale (16 or 32; 32 where the block has no scales but d)
    table        int [entries]: what a code stands for; of grids and trellises only the least and the largest weight
    codes        bits [rows, block, width], one for each weight; None for a grid or trellis
    digits       int [block]: codes are base-3 digits of bytes, as in `BlockLayout`
    polynomial   coefficients of what decoders use for the table, as in `BlockLayout`; decoded: float32 [entries], its values
    code_offset  int [block] or None: added to the code (above its own bits), known from the weight's place alone
    signed_bytes the codes are the weights as signed bytes; `table` is what they stand for once their top bit is flipped
    grid         uint8 [points, size]: magnitudes where weights have signs, else what exceeds the least of the grid
    trellis      the generator whose start states the indices are
    indices      bits [rows, block / size, width]: numbers of points of the grid, or start states
    magnitudes   the signs of the trellis' values are not used: weight_signs are
    weight_signs bits [rows, block, 1] that negate weights
    sign_codes   bits [rows, block / 8, 7]: seven signs, with the eighth the number of minus signs is even; scrambled:
                 u ^ (u << 1) is the code with its eighth bit
    point_flags  bits [rows, block / 8, 1]; where one is not set, `point_shift` is added to the eight weights of a point
    d            bits [rows, 1, width] of the block's scale (None: none, or the row's), a d_format: 'f16' or 'e8m0'
    row_scale    'f16' or 'f32' when the row begins with its scale, row_meta bytes before the first block
    scales       bits [rows, block / group, width] of scale codes; a code stands for level_step * code + level_zero (the code
                 a signed byte if signed_levels), for its entry of level_table, or for half of an unsigned E4M3 number
                 (ue4m3_levels); scale_signs: bits [.., 1] that negate it
    flags        bits [rows, block / group, 1] that add `shift` to the table's values
    dmin         bits of the scale of minima; minima: bits [rows, block / group, width]
    offset       bits of the float16 that is added to every weight
    gray_words   16-bit words hold x with x ^ (x >> 1) == codes, above a bit of the scale (iq4_kss)
    unit         a power of two that all weights are to be multiplied by
    """

    block: int
    group: int
    table: tuple[int, ...]
    codes: np.ndarray | None = None
    digits: np.ndarray | None = None
    polynomial: tuple[float, ...] | None = None
    decoded: np.ndarray | None = None
    code_offset: np.ndarray | None = None
    signed_bytes: bool = False
    grid: np.ndarray | None = None
    trellis: Trellis | None = None
    indices: np.ndarray | None = None
    magnitudes: bool = False
    weight_signs: np.ndarray | None = None
    sign_codes: np.ndarray | None = None
    scrambled: bool = False
    point_flags: np.ndarray | None = None
    point_shift: int = 0
    d: np.ndarray | None = None
    d_format: str = "f16"
    row_scale: str | None = None
    scales: np.ndarray | None = None
    signed_levels: bool = False
    ue4m3_levels: bool = False
    level_step: int = 1
    level_zero: int = 0
    level_table: tuple[int, ...] | None = None
    scale_signs: np.ndarray | None = None
    flags: np.ndarray | None = None
    shift: int = 0
    dmin: np.ndarray | None = None
    minima: np.ndarray | None = None
    offset: np.ndarray | None = None
    gray_words: bool = False
    unit: float = 1.0


_SHARED = (
    *("d", "d_format", "row_scale", "scales", "dmin", "minima", "offset", "sign_codes", "scrambled", "magnitudes"),
    *("gray_words", "unit", "digits", "polynomial", "decoded"),
)


@cache
def code_layout(type_name: str) -> CodeLayout | None:
    """The layout of a type, plain or interleaved; None for numbers, which have no codes, and for types without a codec."""
    layout = layout_of(type_name)
    if not TYPES[type_name].has_codec or layout.number is not None:
        return None
    fields: dict[str, Any] = {
        "block": layout.block,
        "group": layout.group,
        **{name: getattr(layout, name) for name in _SHARED},
    }
    fields |= _levels(layout) | _signs(layout)
    fields |= _trellis(layout) if layout.trellis else _grid(layout) if layout.codebook else _table(layout)
    return CodeLayout(**fields)


def _levels(layout: BlockLayout) -> dict[str, Any]:
    """Fields that say how scale codes become levels."""
    if layout.levels is None:
        return {}
    if np.array_equal(layout.levels, SIGNED_BYTES):
        return {"signed_levels": True}
    if np.array_equal(layout.levels, HALF_UE4M3):
        return {"ue4m3_levels": True}
    steps = np.diff(layout.levels)
    if (steps == steps[0]).all():
        return {"level_step": int(steps[0]), "level_zero": int(layout.levels[0])}
    return {"level_table": tuple(layout.levels.tolist())}


def _signs(layout: BlockLayout) -> dict[str, Any]:
    if layout.signs is None:
        return {}
    return {"weight_signs" if layout.signs.shape[1] == layout.block else "scale_signs": layout.signs}


def _flags(layout: BlockLayout) -> dict[str, Any]:
    """Flags of groups, where they come with the scales."""
    return {"flags": layout.flags, "shift": layout.shifts[1] - layout.shifts[0]} if layout.flags is not None else {}


def _trellis(layout: BlockLayout) -> dict[str, Any]:
    assert layout.trellis is not None
    return {"trellis": layout.trellis, "indices": layout.codes, "table": (-layout.trellis.mean, layout.trellis.mean)}


def _grid(layout: BlockLayout) -> dict[str, Any]:
    values = layout.values
    lowest, highest = int(values.min()), int(values.max())
    if layout.signs is not None or layout.sign_codes is not None:
        return {"grid": values.astype(np.uint8), "indices": layout.codes, "table": (-highest, highest)}
    grid: dict[str, Any] = {"grid": (values - lowest).astype(np.uint8), "indices": layout.codes}
    if layout.flags is None or layout.flags.shape[1] == layout.block // layout.group:
        return {**grid, **_flags(layout), "table": (lowest + layout.shifts[0], highest + layout.shifts[0])}
    set_last = layout.shifts[0] - layout.shifts[1]
    table = (lowest + layout.shifts[1], highest + layout.shifts[0])
    return {**grid, "point_flags": layout.flags, "point_shift": set_last, "table": table}


def _table(layout: BlockLayout) -> dict[str, Any]:
    entries, size = layout.values.shape
    if size == 1 and np.array_equal(layout.values[:, 0], SIGNED_BYTES):
        return {"codes": layout.codes, "signed_bytes": True, "table": tuple(range(-128, 128))}
    # Codes of several weights: a table for each of the weights, one after the other.
    table = tuple((layout.values.T.reshape(-1) + layout.shifts[0]).tolist())
    offset = np.arange(layout.block) % size * entries if size > 1 else None
    codes = np.repeat(layout.codes, size, axis=1)
    return {"codes": codes, "code_offset": offset, "table": table, **_flags(layout)}
