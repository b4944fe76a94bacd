"""Which encoded rows the processor has to look at, found by two kernels on a GPU: sums of blocks, and what rows make of them.

The bounds take too many rows rather than too few: sums have another order here, and what rows decode to is not rounded as it is
elsewhere.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ...formats import TYPES
from ...formats.layouts import layout_of
from ...formats.layouts.byte_parts import byte_parts
from ...simd.compile import kernel
from ...simd.cuda.work_items import WorkItems
from ...simd.scalar import float_from_bits
from ..codecs.importance import MIN_MEAN_SQUARE, importance_rows
from ..plain_rows import PlainRows
from ..scale_range import plain_range

_NEARER = np.float32(-1e-3)  # of |x|^2: what |y - x|^2 - |x|^2 surely is below where sums in float32 say that it is
_MARGIN = 4  # times a limit: where sums in another order may be
_NO_PARTS = np.empty((0, 1, 4), np.uint8)
_HALF_BIAS = np.float32(2.0**112)  # between the exponents of float16 and float32


class FieldTables(NamedTuple):
    """What a kernel needs of a layout to decode a block.

    codes ... d  uint8 [numbers, parts, 4]: byte, shift, mask and place of each part of each number (`BytePart`); no numbers
                 where a type has no such field
    values       float32 [entries, size]; levels: float32 [entries]; shifts: as the layout has them
    run          weights that share their scale, minimum and shift
    """

    codes: np.ndarray
    scales: np.ndarray
    flags: np.ndarray
    minima: np.ndarray
    signs: np.ndarray
    sign_codes: np.ndarray
    d: np.ndarray
    dmin: np.ndarray
    offset: np.ndarray
    values: np.ndarray
    levels: np.ndarray
    shifts: tuple[np.float32, np.float32]
    unit: np.float32
    run: int


@cache
def field_tables(type_name: str) -> FieldTables:
    """Of a plain type with float16 scales of blocks, and bits that mean what they say."""
    layout = layout_of(type_name)
    assert layout.d_format == "f16"
    assert layout.d is not None
    assert layout.digits is None
    assert not any((layout.row_scale, layout.number, layout.gray_words, layout.scrambled))
    fields = {field: _parts(layout.bit_arrays().get(field)) for field in FieldTables._fields[:9]}
    values = layout.decoded_values.astype(np.float32)
    levels = np.zeros(1) if layout.levels is None else layout.levels
    run = layout.block // max(1, *(len(fields[name]) for name in ("scales", "flags", "minima")))
    shifts = np.float32(layout.shifts[0]), np.float32(layout.shifts[1])
    numbers: dict[str, Any] = {"shifts": shifts, "unit": np.float32(layout.unit), "run": run}
    return FieldTables(**fields, values=values, levels=levels.astype(np.float32), **numbers)


def _parts(addresses: np.ndarray | None) -> np.ndarray:
    if addresses is None:
        return _NO_PARTS
    parts = [(p.byte[0], p.shift[0], p.mask[0], np.full(p.byte.shape[1], p.up)) for p in byte_parts(addresses)]
    return np.stack([np.stack(part, axis=1) for part in parts], axis=1).astype(np.uint8)


@kernel
def _number(block, parts, i):
    number = np.int32(0)
    for p in range(parts.shape[1]):
        number |= (np.int32(block[parts[i, p, 0]]) >> parts[i, p, 1] & parts[i, p, 2]) << parts[i, p, 3]
    return number


@kernel
def _half(block, parts):
    """The float16 of a field, 0 where there is none."""
    if parts.shape[0] == 0:
        return np.float32(0)
    bits = _number(block, parts, 0)
    magnitude = float_from_bits(np.int32((bits & 0x7FFF) << 13)) * _HALF_BIAS
    return -magnitude if bits & 0x8000 else magnitude


@kernel(items=WorkItems(("x", "q"), ("sums",), shared_rows=("importance",), lanes=1))
def block_sums(x, q, importance, fields, guarded, limit, sums):
    """x float32 [blocks, weights], q uint8 [blocks, bytes] -> sums float32 [blocks, 3]: the largest magnitude, the sum of
    y (y - 2 x), y being what q decodes to, and that of x^2.

    importance, guarded: as `guard_importance` takes them. The magnitude is NaN where one of its sums may be limit or less.
    """
    size, per_row = x.shape[1], max(1, importance.shape[1] // x.shape[1])
    for b in range(q.shape[0]):
        xb, block = x[b], q[b]
        d, dmin, offset = _half(block, fields.d) * fields.unit, _half(block, fields.dmin), _half(block, fields.offset)
        largest = inner = squares = np.float32(0)
        eight = np.int32(0)
        width = fields.values.shape[1]
        for first in range(0, size, fields.run):
            scale, shift, minimum = d, np.float32(0), offset
            if fields.scales.shape[0]:
                scale *= fields.levels[_number(block, fields.scales, first * fields.scales.shape[0] // size)]
            if fields.flags.shape[0]:
                flag = _number(block, fields.flags, first * fields.flags.shape[0] // size)
                shift = fields.shifts[1] if flag else fields.shifts[0]
            if fields.minima.shape[0]:
                minimum -= dmin * np.float32(_number(block, fields.minima, first * fields.minima.shape[0] // size))
            for i in range(first, first + fields.run, width):
                code = _number(block, fields.codes, i // width)
                for k in range(width):
                    value = fields.values[code, k] + shift
                    if fields.signs.shape[0] and _number(block, fields.signs, (i + k) * fields.signs.shape[0] // size):
                        value = -value
                    if fields.sign_codes.shape[0]:
                        if (i + k) % 8 == 0:
                            eight = _number(block, fields.sign_codes, (i + k) // 8)
                            parity = eight ^ eight >> 4
                            parity ^= parity >> 2
                            eight |= (parity ^ parity >> 1) << 7
                        if eight >> (i + k) % 8 & 1:
                            value = -value
                    a, y = xb[i + k], value * scale + minimum
                    inner += y * (y - (a + a))
                    squares += a * a
                    largest = max(largest, abs(a))
        if guarded and importance.shape[0]:
            at = b % per_row * size
            for first in range(0, size, guarded):
                sum_ww = sum_xx = sum_wx = np.float32(0)
                for i in range(first, first + guarded):
                    a, w = xb[i], importance[0, at + i]
                    sum_ww, sum_xx, sum_wx = sum_ww + w * w, sum_xx + a * a, sum_wx + w * abs(a)
                if not (sum_ww > limit and sum_xx > limit and sum_wx > limit):
                    largest = np.float32(np.nan)
        sums[b, 0], sums[b, 1], sums[b, 2] = largest, inner, squares


@kernel(items=WorkItems(("sums",), ("doubtful",), whole=("limits",), lanes=1))
def doubtful_rows(sums, limits, nearer, doubtful):
    """sums float32 [rows, blocks * 3], of `block_sums` -> doubtful uint8 [rows, 1]: 1 where the processor has to look at a row.

    limits: `row_limits`
    """
    for r in range(doubtful.shape[0]):
        largest = inner = squares = np.float32(0)
        fits = True
        for at in range(0, sums.shape[1], 3):
            magnitude = sums[r, at]
            fits = fits and magnitude >= limits[2] and magnitude < limits[3]  # not where it is NaN
            largest = max(largest, magnitude)
            inner += sums[r, at + 1]
            squares += sums[r, at + 2]
        fits = fits and largest >= limits[0] and largest <= limits[1] and inner < nearer * squares
        doubtful[r, 0] = not fits


@cache
def row_limits(name: str, scaled: tuple[int, tuple[int, int]] | None) -> np.ndarray:
    """float32 [4]: what the largest magnitude of a row is within, from the first to the second, and that of each block, from
    the third to below the fourth. scaled: of the `ItemEncoder`."""
    assert scaled is None or scaled[0] == layout_of(name).block
    of_rows = plain_range(name) or (0.0, float(np.finfo(np.float32).max))
    of_blocks = (0.0, np.inf) if scaled is None else (2.0**exponent for exponent in scaled[1])
    return np.array([*of_rows, *of_blocks], np.float32)


def check_rows(x: np.ndarray, q: np.ndarray, importance: np.ndarray | None, plain: PlainRows) -> np.ndarray:
    """Calls the kernels for rows x, float32 [rows, n], that were encoded as q; importance float32 [n]. -> uint8 [rows, 1]"""
    items, name = plain.codec.items, plain.type.name
    assert items is not None
    block = layout_of(name).block
    sums, doubtful = np.empty((x.size // block, 3), np.float32), np.empty((len(x), 1), np.uint8)
    guarded = plain.guarded if importance is not None else 0
    limit = np.float32(_MARGIN * guarded * float(MIN_MEAN_SQUARE))
    blocks = x.reshape(-1, block), q.reshape(-1, TYPES[name].block_bytes)
    block_sums(*blocks, importance_rows(importance if guarded else None), field_tables(name), guarded, limit, sums)
    doubtful_rows(sums.reshape(len(x), -1), row_limits(name, items.scaled), _NEARER, doubtful)
    return doubtful
