"""Packed weights to panels of bytes, for types whose codes are no plain bits: grids, trellises, codes of several weights.

Such codes are taken by the steps of the matrix-vector products (gemv/), which hold 64 of them in a vector. Rows of plain types
are unpacked one after the other, and a block of sixteen is transposed; interleaved rows go to their places at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba.core import types

from ......formats.types import TYPES
from ......simd.compile import intrinsic
from ......simd.llvm import F32X16, I8X64, I32X16, I64, LANES, constant, load, shuffle, store
from ......simd.memory import address, view
from ..gemv.block_steps import BlockStep
from ..gemv.emitter import Emitter
from ..gemv.gemv_layout import gemv_layout
from ..gemv.rows import row_scales, steps
from .byte_tiles import CODE_BIAS, CODE_COLUMNS, PANEL
from .float_panels import (
    CODES,
    COLUMNS,
    PACKED,
    PANELS,
    ROW_BYTES,
    ROWS,
    SCALES,
    TERMS,
    UNPACK_FIELDS,
    keep_alive,
    transposed,
)
from .panel_layout import PanelForm

_WORD = 4  # columns whose codes of a row lie side by side in a panel
_LINE = 4 * PANEL  # bytes of four columns of a panel, or of a group's scales


@cache
def step_form(type_name: str) -> PanelForm | None:
    """What panels of a type hold that are unpacked by steps; None if the products of no steps support it."""
    step = _step(type_name)
    if step is None:
        return None
    layout = step.layout
    assert layout.minima is None, "types with minima have a PanelLayout"
    assert layout.offset is None, "types with an offset have a PanelLayout"
    zero = 1 << (-step.lowest - 1).bit_length()
    most = step.highest + step.lowest + zero
    assert most <= 255, "codes are bytes"
    return PanelForm(zero, most, layout.group, layout.flags is not None)


def _step(type_name: str) -> BlockStep | None:
    """The step of one block of each row of a group."""
    return steps(type_name)[-1] if gemv_layout(type_name) is not None else None


def _store_lanes(builder: Any, value: Any, places: np.ndarray, base: Any) -> None:
    """Stores every lane of a vector of 32-bit numbers at address base + places[lane] (-1: nowhere), neighbours together."""
    order = np.argsort(places, kind="stable")
    order = order[places[order] >= 0]
    first = 0
    while first < len(order):
        count = 1
        while first + 2 * count <= len(order) and _are_neighbours(places[order[first : first + 2 * count]]):
            count *= 2
        store(builder, shuffle(builder, value, None, order[first : first + count]), base, int(places[order[first]]))
        first += count


def _are_neighbours(places: np.ndarray) -> bool:
    return bool((np.diff(places) == 4).all())


@intrinsic
def _unpack_step(typingctx, name, block, row_head, codes, scales, terms):
    """Writes the numbers of one block of a row, or of each row of an interleaved group.

    Addresses: block, and row_head of the bytes before the row's first block, of a row or a group; codes, scales and terms
    (used if the type has them) of the row's numbers one after the other, or of the group's places in a panel.
    """
    if not isinstance(name, types.StringLiteral):
        return None
    type_name = name.literal_value

    def generate(context, builder, signature, args):
        _, block, row_head, codes, scales, terms = args
        step, form, stored, emit = _step(type_name), step_form(type_name), TYPES[type_name], Emitter(builder)
        assert step is not None
        assert form is not None
        layout = step.layout

        def places(rows: np.ndarray, numbers: np.ndarray) -> np.ndarray:
            """Bytes from the first place to that of a scale of a row."""
            return np.where(numbers < 0, -1, 4 * numbers if stored.rows == 1 else _LINE * numbers + 4 * rows)

        def word_places(rows: np.ndarray, words: np.ndarray) -> np.ndarray:
            """Bytes from the first place to that of four codes of a row."""
            if stored.rows == 1:
                return places(rows, words)
            together = CODE_COLUMNS // _WORD
            line = together * _LINE * (words // together)
            return np.where(words < 0, -1, line + CODE_COLUMNS * rows + _WORD * (words % together))

        whole = row_scales(emit, layout, stored, row_head)
        for numbers in step.scale_vectors:
            rows, groups = step.rows_and_groups(numbers)
            scale, _ = step.scales(emit, block, numbers)
            if whole is not None:
                scale = builder.fmul(scale, emit.shuffle(whole, rows))
            at = places(rows, np.where(numbers < step.numbers, groups, -1))
            _store_lanes(builder, scale, at, scales)
            if layout.flags is not None:
                shift, none = (constant(F32X16, float(v)) for v in (layout.shift, 0))
                term = builder.fmul(scale, builder.select(step.flags_set(emit, block, numbers), shift, none))
                _store_lanes(builder, term, at, terms)
        loaded: dict = {}
        for vector in step.code_vectors:
            shift = constant(I8X64, step.lowest + form.zero - CODE_BIAS)
            numbers = builder.add(step.codes_less(step.lowest, emit, block, vector, loaded), shift)
            at = word_places(np.array(vector.lane_rows), vector.words)
            _store_lanes(builder, builder.bitcast(numbers, I32X16), at, codes)
        return context.get_dummy_value()

    i = types.int64
    return types.void(name, i, i, i, i, i), generate


@intrinsic
def _transpose_words(typingctx, source, step, count, together, out):
    """Writes words 0 to count - 1 (a literal, at most 16) of sixteen rows, `step` bytes apart, as `count` lines of sixteen.
    together: a literal, 1, or 2 for two neighbouring words of a row side by side."""
    if not isinstance(count, types.IntegerLiteral) or not isinstance(together, types.IntegerLiteral):
        return None
    lines, in_pairs = count.literal_value, together.literal_value == 2

    def generate(context, builder, signature, args):
        source, step, _, _, out = args
        rows = [load(builder, builder.add(source, builder.mul(step, I64(r))), I32X16) for r in range(LANES)]
        made = transposed(builder, rows)[:lines]
        if in_pairs:
            lanes = np.arange(2 * LANES).reshape(2, LANES).T.reshape(2, LANES)  # of two lines in turn
            made = [shuffle(builder, made[i & ~1], made[i | 1], lanes[i & 1]) for i in range(lines)]
        for i, line in enumerate(made):
            store(builder, line, out, _LINE * i)
        return context.get_dummy_value()

    i = types.int64
    return types.void(i, i, count, together, i), generate


def _plain_part(name: str, block: int, size: int, row_head: int, groups: int, has_terms: bool) -> Callable[[int, int], None]:
    """block: columns of one; size, row_head: bytes of a block and before a row's first; groups: of a block's columns."""
    columns_of_line, together = _WORD * LANES, CODE_COLUMNS // _WORD

    def unpack_rows(argument, number):
        table = view(argument, UNPACK_FIELDS, np.int64)
        base, row_bytes, columns, last = table[PACKED], table[ROW_BYTES], table[COLUMNS], table[ROWS] - 1
        memory = np.empty(PANEL * (block + 2 * _LINE), np.uint8)
        codes = address(memory)
        scales = codes + PANEL * block
        terms = scales + PANEL * _LINE
        for panel in range(table[PANELS]):
            for b in range(columns // block):
                for r in range(PANEL):
                    row = base + row_bytes * min(panel * PANEL + r, last)
                    at = row + row_head + b * size
                    _unpack_step(name, at, row, codes + r * block, scales + r * _LINE, terms + r * _LINE)
                number_of_block = panel * (columns // block) + b
                to = table[CODES] + number_of_block * block * PANEL
                for c in range(0, block, columns_of_line):
                    _transpose_words(codes + c, block, LANES, together, to + c * PANEL)
                offset = number_of_block * groups * _LINE
                _transpose_words(scales, _LINE, groups, 1, table[SCALES] + offset)
                if has_terms:
                    _transpose_words(terms, _LINE, groups, 1, table[TERMS] + offset)
        keep_alive(memory)

    return unpack_rows


def _interleaved_part(name: str, block: int, size: int, row_head: int, groups: int, rows: int) -> Callable[[int, int], None]:
    """As _plain_part, of groups of so many rows; size, row_head: bytes of all rows of a group."""

    def unpack_rows(argument, number):
        table = view(argument, UNPACK_FIELDS, np.int64)
        base, row_bytes, columns, last = table[PACKED], table[ROW_BYTES], table[COLUMNS], table[ROWS] - rows
        for first in range(0, PANEL * table[PANELS], rows):
            head, row = base + row_bytes * min(first, last), first % PANEL
            for b in range(columns // block):
                number_of_block = first // PANEL * (columns // block) + b
                offset = number_of_block * groups * _LINE + 4 * row
                at = head + row_head + b * size
                codes = table[CODES] + number_of_block * block * PANEL + CODE_COLUMNS * row
                _unpack_step(name, at, head, codes, table[SCALES] + offset, table[TERMS] + offset)

    return unpack_rows


def part_by_steps(name: str) -> Callable[[int, int], None]:
    """The part that unpacks rows of a type that has a `step_form`: table and panels as those of `unpack_panels.unpacker`."""
    stored, form = TYPES[name], step_form(name)
    assert form is not None
    groups, rows = stored.block // form.group, stored.rows
    if rows == 1:
        assert stored.block % (_WORD * LANES) == 0
        return _plain_part(stored.name, stored.block, stored.block_bytes, stored.row_meta, groups, form.has_terms)
    return _interleaved_part(stored.name, stored.block, rows * stored.block_bytes, rows * stored.row_meta, groups, rows)
