"""Packed weights to panels of bytes: the codes of 16 rows side by side, as multiply_bytes takes them.

Codes and scales are read by the readers of `formats/layouts/reader`, 64 codes at a time. Rows of plain types are unpacked one
after the other, and what a reader reads of sixteen is transposed; interleaved rows go to their places at
once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba.core import types

from ......formats import TYPES
from ......formats.layouts.reader.code_layout import CodeLayout, code_layout
from ......formats.layouts.reader.emitter import Emitter
from ......formats.layouts.reader.rows import readers, row_scales
from ......simd import team
from ......simd.compile import intrinsic, kernel, native_entry
from ......simd.llvm import F32X16, I8X64, I32X16, I64, LANES, constant, load, shuffle, store
from ......simd.memory import prefetch_lines, scratch, view
from ......simd.target import Target, target
from .byte_tiles import CODE_COLUMNS, PANEL, TILE_PANELS, TILES, code_bias
from .float_panels import (
    AHEAD,
    CODES,
    COLUMNS,
    FIRST_COLUMN,
    MEMORY,
    PACKED,
    PANELS,
    ROOM,
    ROW_BYTES,
    ROWS,
    SCALES,
    TERMS,
    UNPACK_FIELDS,
    transposed,
)

_WORD = 4  # columns whose codes of a row lie side by side in a panel
UNPACK_BYTES = 1 << 14  # of working memory
_LINE = 4 * PANEL  # bytes of four columns of a panel, or of a group's scales


class PanelForm(NamedTuple):
    """What panels of bytes hold: weight = scale * (code - zero) + term.

    zero a power of two or 0; least, most: the smallest and the largest code; group: columns that share a scale, 16, 32 or (once
    rounded) 256; has_terms: whether terms are not all 0
    """

    zero: int
    least: int
    most: int
    group: int
    has_terms: bool


@cache
def panel_form(type_name: str) -> PanelForm | None:
    """What panels of a type hold; None for floats, and for types that have to be decoded."""
    layout = code_layout(type_name)
    if layout is None or layout.digits is not None:
        return None
    lowest, highest = -min(layout.table), max(layout.table)
    zero = 1 << (lowest - 1).bit_length() if lowest > 0 else 0
    most = highest + zero + (max(layout.shift, 0) if _shifts_codes(layout) else 0)
    assert most <= 255, "codes are bytes"
    has_terms = layout.minima is not None or layout.offset is not None
    return PanelForm(
        zero, zero - lowest, most, layout.group, has_terms or (layout.flags is not None and not _shifts_codes(layout))
    )


def _shifts_codes(layout: CodeLayout) -> bool:
    """Whether the shift of a flag is added to the codes of a group; else it is the group's term."""
    return layout.flags is not None and layout.codes is not None and not layout.gray_words


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


def write_numbers(
    builder: Any, of: Target, type_name: str, number: int, blocks: Any, row_head: Any, codes: Any, scales: Any, terms: Any
) -> None:
    """LLVM code that writes what a reader (of those of a type the one of this number) reads of a row, or of each row of an
    interleaved group.

    Addresses: blocks, and row_head of the bytes before the row's first block, of a row or a group; codes, scales and terms
    (used if the type has them) of the row's numbers one after the other, or of the group's places in a panel.
    """
    reader, form, stored, emit = readers(type_name)[number], panel_form(type_name), TYPES[type_name], Emitter(builder, of)
    assert form is not None
    layout, together = reader.layout, of.choose(TILES).columns // _WORD

    def places(rows: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Bytes from the first place to that of a scale of a row."""
        return np.where(numbers < 0, -1, 4 * numbers if stored.rows == 1 else _LINE * numbers + 4 * rows)

    def word_places(rows: np.ndarray, words: np.ndarray) -> np.ndarray:
        """Bytes from the first place to that of four codes of a row."""
        if stored.rows == 1:
            return places(rows, words)
        line = together * _LINE * (words // together)
        return np.where(words < 0, -1, line + _WORD * (together * rows + words % together))

    row_scale = row_scales(emit, layout, stored, row_head)
    shifts: list[Any] = []
    for numbers in reader.scale_vectors:
        rows, groups = reader.rows_and_groups(numbers)
        scale = reader.scale(emit, blocks, numbers)
        if row_scale is not None:
            scale = builder.fmul(scale, emit.shuffle(row_scale, rows))
        at = places(rows, np.where(numbers < reader.numbers, groups, -1))
        _store_lanes(builder, scale, at, scales)
        term = reader.term(emit, blocks, numbers)
        if layout.flags is not None:
            is_set = reader.flags_set(emit, blocks, numbers)
            if _shifts_codes(layout):
                shift = constant(I32X16, layout.shift * 0x01010101)
                shifts.append(builder.select(is_set, shift, constant(I32X16, 0)))
            else:
                shift, none = (constant(F32X16, float(v)) for v in (layout.shift, 0))
                term = builder.fmul(scale, builder.select(is_set, shift, none))
        if term is not None:
            _store_lanes(builder, term, at, terms)
    bias = code_bias(of)
    zero = bias - form.zero if layout.codes is not None and reader.table is not None else reader.lowest
    loaded: dict = {}
    for vector in reader.code_vectors:
        numbers = reader.codes_less(zero, emit, blocks, vector, loaded)
        if zero != bias - form.zero:
            numbers = builder.add(numbers, constant(I8X64, zero + form.zero - bias))
        words = builder.bitcast(numbers, I32X16)
        if shifts:
            number_of = np.array([group * reader.rows + row if group >= 0 else -1 for row, group in reader.keys(vector)])
            shift = emit.pick(shifts, number_of // LANES, np.where(number_of < 0, -1, number_of % LANES))
            words = builder.bitcast(builder.add(builder.bitcast(words, I8X64), builder.bitcast(shift, I8X64)), I32X16)
        _store_lanes(builder, words, word_places(np.array(vector.lane_rows), vector.words), codes)


@intrinsic
def _unpack_numbers(typingctx, name, number, blocks, row_head, codes, scales, terms):
    """`write_numbers` for this process."""
    if not isinstance(name, types.StringLiteral) or not isinstance(number, types.IntegerLiteral):
        return None

    def generate(context, builder, signature, args):
        write_numbers(builder, target(), name.literal_value, number.literal_value, *args[2:])
        return context.get_dummy_value()

    i = types.int64
    return types.void(name, number, i, i, i, i, i), generate


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


def _rows_writer(name: str, number: int) -> Callable[..., None]:
    """A kernel that writes the columns of a reader, from `column` on, of sixteen rows of a plain type to a panel."""
    reader, form, stored = readers(name)[number], panel_form(name), TYPES[name]
    assert form is not None
    width, row_head, has_terms, together = reader.columns, stored.row_meta, form.has_terms, CODE_COLUMNS // _WORD
    words, groups = min(width // _WORD, LANES), width // form.group
    block, size, group, step = stored.block, stored.block_bytes, form.group, reader.size

    @kernel
    def write(memory, base, row_bytes, ahead, first, last, start, column, room, codes, scales, terms):
        """memory: address of working memory; base: of row 0; the last three: those of the numbers of all rows, from column
        `start` on, of which panels have room for `room`."""
        own_scales = memory + PANEL * width
        own_terms = own_scales + PANEL * _LINE
        for r in range(PANEL):
            row = base + row_bytes * min(first + r, last)
            at = row + row_head + column // block * size
            if ahead:
                prefetch_lines(at + ahead, step)
            _unpack_numbers(name, number, at, row, memory + r * width, own_scales + r * _LINE, own_terms + r * _LINE)
        place = column - start
        to = codes + first * room + place * PANEL
        for c in range(0, width, _WORD * words):
            _transpose_words(memory + c, width, words, together, to + c * PANEL)
        offset = (first // PANEL * (room // group) + place // group) * _LINE
        _transpose_words(own_scales, _LINE, groups, 1, scales + offset)
        if has_terms:
            _transpose_words(own_terms, _LINE, groups, 1, terms + offset)

    return write


def _plain_part(name: str) -> Callable[[int, int], None]:
    """Rows beyond the last repeat it."""
    wide, narrow = (reader.columns for reader in (readers(name)[0], readers(name)[-1]))
    write = _rows_writer(name, 0)
    write_rest = write if wide == narrow else _rows_writer(name, 1)
    assert PANEL * (wide + 2 * _LINE) <= UNPACK_BYTES

    def unpack_rows(argument, number):
        table = view(argument, UNPACK_FIELDS, np.int64)
        base, row_bytes, columns, last = table[PACKED], table[ROW_BYTES], table[COLUMNS], table[ROWS] - 1
        codes, scales, terms = table[CODES], table[SCALES], table[TERMS]
        memory, start, room, ahead = table[MEMORY], table[FIRST_COLUMN], table[ROOM], table[AHEAD]
        whole = start + columns // wide * wide
        for first in range(0, PANEL * table[PANELS], PANEL):
            for c in range(start, whole, wide):
                write(memory, base, row_bytes, ahead, first, last, start, c, room, codes, scales, terms)
            for c in range(whole, start + columns, narrow):
                write_rest(memory, base, row_bytes, ahead, first, last, start, c, room, codes, scales, terms)

    return unpack_rows


def _interleaved_part(name: str) -> Callable[[int, int], None]:
    """As _plain_part, of groups of rows, a block at a time."""
    stored, form, number = TYPES[name], panel_form(name), len(readers(name)) - 1
    assert form is not None
    rows, block, groups = stored.rows, stored.block, stored.block // form.group
    size, row_head = rows * stored.block_bytes, rows * stored.row_meta

    def unpack_rows(argument, part):
        table = view(argument, UNPACK_FIELDS, np.int64)
        base, row_bytes, columns, last = table[PACKED], table[ROW_BYTES], table[COLUMNS], table[ROWS] - rows
        start, room, ahead = table[FIRST_COLUMN] // block, table[ROOM] // block, table[AHEAD] * rows
        for first in range(0, PANEL * table[PANELS], rows):
            head, row = base + row_bytes * min(first, last), first % PANEL
            for b in range(columns // block):
                number_of_block = first // PANEL * room + b
                offset = number_of_block * groups * _LINE + 4 * row
                at = head + row_head + (start + b) * size
                if ahead:
                    prefetch_lines(at + ahead, size)
                codes = table[CODES] + number_of_block * block * PANEL + CODE_COLUMNS * row
                _unpack_numbers(name, number, at, head, codes, table[SCALES] + offset, table[TERMS] + offset)

    return unpack_rows


@cache
def unpacker(type_name: str) -> Any:
    """The part (see `team`; its table is in float_panels, the number of no account) that unpacks rows of a type that has
    a `panel_form`: its `address`. Compiled or loaded at the first call."""
    stored = TYPES[type_name]
    part = _plain_part(stored.name) if stored.rows == 1 else _interleaved_part(stored.name)
    return native_entry(types.void(types.int64, types.int64), part)


class Panels(NamedTuple):
    """Rows of weights as scale * (code - zero) + term, in panels of 16 rows, the last ones filled up with any numbers.

    codes uint8 [panels, columns / CODE_COLUMNS, 16, CODE_COLUMNS], less CODE_BIAS; scales and terms (or None) float32 [panels,
    columns / group, 16]; zero a power of two or 0; group 16 or 32.
    """

    codes: np.ndarray
    scales: np.ndarray
    terms: np.ndarray | None
    zero: int
    group: int


def unpack(q: np.ndarray, type_name: str, columns: int) -> Panels:
    """uint8 [rows, row_bytes], whole groups, of a type with a `panel_form` -> panels of all rows, an even number of them,
    valid until this thread calls it again."""
    form = panel_form(type_name)
    assert form is not None
    rows, row_bytes = q.shape
    panels = -(-rows // (PANEL * TILE_PANELS)) * TILE_PANELS
    q = np.ascontiguousarray(q)
    codes = scratch("codes", (panels, columns // CODE_COLUMNS, PANEL, CODE_COLUMNS), np.uint8)
    scales = scratch("scales", (panels, columns // form.group, PANEL), np.float32)
    terms = scratch("terms", scales.shape, np.float32) if form.has_terms else None
    to = [array.ctypes.data for array in (codes, scales, codes if terms is None else terms)]
    memory = scratch("unpacked rows", (UNPACK_BYTES,), np.uint8)
    table = np.array(
        [q.ctypes.data, row_bytes, rows, columns, panels, *to, 0, columns, memory.ctypes.data, 0, 0, 0, 0], np.int64
    )
    team.run(0, np.array([(0, unpacker(type_name).address, table.ctypes.data, 1)], np.int64))
    return Panels(codes, scales, terms, form.zero, form.group)
