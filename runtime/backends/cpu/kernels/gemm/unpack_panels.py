"""Packed weights to panels of bytes: the codes of 16 rows side by side, as multiply_bytes takes them.

One program for all types that have a `PanelLayout`, from which LLVM code is written. It takes four rows at a time
(of a group, where rows are interleaved) and 16 columns, 64 codes in all: gathers the bytes that hold them, shifts and masks
each piece of a code into place, looks the numbers up in a table of bytes, and stores four columns (CODE_COLUMNS) of four rows
at a time. The other types (grids, trellises, codes of several weights) are unpacked by step_panels.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba.core import types

from ......formats import TYPES
from ......simd import team
from ......simd.compile import intrinsic, native_entry
from ......simd.instructions.half_precision import half_to_float
from ......simd.instructions.permute import lookup_bytes
from ......simd.instructions.ue4m3 import half_ue4m3_to_float
from ......simd.llvm import F32, F32X16, I8, I16, I32, I32X16, I64, concat, constant, load, shuffle, split, store
from ......simd.memory import scratch, view
from ......simd.target import target
from .byte_tiles import CODE_COLUMNS, PANEL, TILE_PANELS, TILES, code_bias
from .float_panels import CODES, COLUMNS, PACKED, PANELS, ROW_BYTES, ROWS, SCALES, TERMS, UNPACK_FIELDS
from .panel_layout import PanelForm, panel_layout
from .step_panels import part_by_steps, step_form

QUAD = 4  # rows taken together
WIDE = 64  # bytes taken together: four rows by 16 columns, or 16 groups by four rows
I8X64, I8X16 = ir.VectorType(I8, WIDE), ir.VectorType(I8, 16)
F32X4 = ir.VectorType(F32, QUAD)


class _BitGather:
    """Writes the code that gathers numbers from blocks. bases: the block of each row, or one for all; size: its bytes."""

    def __init__(self, builder, bases, size):
        self.builder, self.bases, self.size = builder, bases, size
        self.loaded = {}

    def _run(self, base, at):
        """Sixteen bytes from an offset on, read once. A block has at least 16; reads do not leave it."""
        if (base, at) not in self.loaded:
            self.loaded[base, at] = load(self.builder, self.bases[base], I8X16, at)
        return self.loaded[base, at]

    def _bytes(self, base, at):
        """The bytes at 16 offsets."""
        low, high = int(at.min()), int(at.max())
        starts = [min(start, self.size - 16) for start in range(low, high + 1, 16)]
        if len(starts) == 1 and np.array_equal(at, starts[0] + np.arange(16)):
            return self._run(base, starts[0])
        while len(starts) & len(starts) - 1:
            starts.append(starts[-1])
        which = np.minimum((at - low) // 16, len(starts) - 1)
        source = concat(self.builder, [self._run(base, start) for start in starts])
        return shuffle(self.builder, source, None, 16 * which + at - np.array(starts)[which])

    def numbers(self, lane_base, bits):
        """<64 x i8>: lane l is the number whose bits lie at bits[l], lowest first, in block lane_base[l]."""
        b, out, width, start = self.builder, None, bits.shape[1], 0
        while start < width:
            stop = start + 1
            while stop < width and np.all((bits[:, stop] == bits[:, stop - 1] + 1) & (bits[:, stop] % 8 > 0)):
                stop += 1
            at, right = bits[:, start] // 8, bits[:, start] % 8
            part = concat(b, [self._bytes(int(lane_base[i]), at[i : i + 16]) for i in range(0, WIDE, 16)])
            part = self._shifted(part, right)
            part = b.and_(part, constant(I8X64, (1 << (stop - start)) - 1))
            if start:
                words = b.bitcast(part, I32X16)
                part = b.bitcast(b.shl(words, constant(I32X16, start)), I8X64)
            out = part if out is None else b.or_(out, part)
            start = stop
        return out

    def _shifted(self, value, right):
        """Every byte shifted right; what comes in from above is to be masked off."""
        b = self.builder
        if not right.any():
            return value
        by_word = right.reshape(-1, 4)
        if np.all(by_word == by_word[:, :1]):
            words = b.lshr(b.bitcast(value, I32X16), ir.Constant(I32X16, [int(s) for s in by_word[:, 0]]))
            return b.bitcast(words, I8X64)
        return b.lshr(value, ir.Constant(I8X64, [int(s) for s in right]))


def _float_at(builder, number, place, of):
    """The number stored at an address, as a float."""
    if number == "f32":
        return load(builder, place, F32)
    if number == "f16":
        return half_to_float(builder, load(builder, place, I16), of)
    exponent = builder.zext(load(builder, place, I8), I32)
    normal = builder.shl(builder.sub(exponent, I32(1)), I32(23))
    subnormal = builder.lshr(I32(0x00400000), builder.sub(I32(1), exponent))
    return builder.bitcast(builder.select(builder.icmp_unsigned(">=", exponent, I32(2)), normal, subnormal), F32)


class _Quad:
    """Writes the code for one block of four rows, `first` the number of the first one in its group."""

    def __init__(self, builder, of, type_name, first, blocks, row_heads):
        layout = panel_layout(type_name)
        assert layout is not None
        self.builder, self.target, self.layout = builder, of, layout
        stored = TYPES[type_name]
        self.plain = stored.rows == 1
        self.rows = np.zeros(QUAD, int) if self.plain else first + np.arange(QUAD)
        self.bases = np.arange(QUAD) if self.plain else np.zeros(QUAD, int)
        self.block, self.groups = stored.block, stored.block // layout.group
        self.blocks, self.row_heads = blocks, row_heads
        self.bits = _BitGather(builder, blocks, stored.block_bytes * stored.rows)

    def _floats(self, number, offsets, row_head):
        b, bases = self.builder, self.row_heads if row_head else self.blocks
        four = ir.Constant(F32X4, ir.Undefined)
        for k in range(QUAD):
            place = b.add(bases[self.bases[k]], I64(int(offsets[self.rows[k]])))
            four = b.insert_element(four, _float_at(b, number, place, self.target), I32(k))
        return four

    def _per_group(self, bits):
        """Numbers of all groups, lane 4 * group + row; lanes beyond the groups mean nothing."""
        count = bits.shape[1]
        if self.plain:
            group = np.minimum(np.arange(16), count - 1)
            lanes = self.bits.numbers(np.repeat(np.arange(QUAD), 16), np.tile(bits[0, group], (QUAD, 1)))
            return shuffle(self.builder, lanes, None, 16 * (np.arange(WIDE) % 4) + np.arange(WIDE) // 4)
        group = np.minimum(np.arange(WIDE) // 4, count - 1)
        return self.bits.numbers(np.zeros(WIDE, int), bits[self.rows[np.arange(WIDE) % 4], group])

    def _ue4m3_levels(self, codes, at):
        """Writes half of the E4M3 number of every group to the 16 floats of each at address `at`."""
        b = self.builder
        for i in range(0, 4 * self.groups, 16):
            floats = half_ue4m3_to_float(b, b.zext(shuffle(b, codes, None, range(i, i + 16)), I32X16))
            for j in range(4):
                store(b, shuffle(b, floats, None, range(4 * j, 4 * j + 4)), at, (i // 4 + j) * 4 * PANEL)

    def _levels(self, codes, factor, at, signed=False, times=1, plus=0, negative=None):
        """Writes factor * (code * times + plus) of every group to the 16 floats of each at address `at`."""
        b = self.builder
        wide = shuffle(b, factor, None, list(range(QUAD)) * 4)
        for i in range(0, 4 * self.groups, 16):
            part = shuffle(b, codes, None, range(i, i + 16))
            words = (b.sext if signed else b.zext)(part, I32X16)
            if times != 1:
                words = b.mul(words, constant(I32X16, times))
            if plus:
                words = b.add(words, constant(I32X16, plus))
            if negative is not None:
                is_negative = b.icmp_unsigned("!=", shuffle(b, negative, None, range(i, i + 16)), constant(I8X16, 0))
                words = b.select(is_negative, b.neg(words), words)
            floats = b.fmul(b.sitofp(words, F32X16), wide)
            for j in range(4):
                store(b, shuffle(b, floats, None, range(4 * j, 4 * j + 4)), at, (i // 4 + j) * 4 * PANEL)

    def write_scales(self, scales, terms):
        b, layout = self.builder, self.layout
        if layout.ue4m3_levels:
            self._ue4m3_levels(self._per_group(layout.scales), scales)
            return
        d = self._floats(layout.d_format, layout.d, layout.row_scale)
        if layout.scales is None:
            for g in range(self.groups):
                store(b, d, scales, 4 * PANEL * g)
        else:
            signs = None if layout.scale_signs is None else self._per_group(layout.scale_signs)
            codes = self._per_group(layout.scales)
            self._levels(codes, d, scales, layout.signed_levels, layout.level_step, layout.level_zero, signs)
        if terms is None:
            return
        m = self._floats("f16", layout.m, False)
        if layout.minima is None:
            store(b, m, terms)
        else:
            self._levels(self._per_group(layout.minima), b.fneg(m), terms)

    def write_codes(self, out):
        b, layout = self.builder, self.layout
        shifts, bias = None, code_bias(self.target)
        if layout.flags is not None:
            flags = self._per_group(layout.flags)
            shifts = b.and_(b.sub(constant(I8X64, 0), flags), constant(I8X64, layout.shift))
        lane, columns = np.arange(WIDE), self.target.choose(TILES).columns
        for run in range(self.block // 16):
            if self.plain:
                column = 16 * run + lane % 16
                codes = self.bits.numbers(lane // 16, layout.codes[0, column])
                words = np.arange(16).reshape(QUAD, -1, columns // 4).transpose(1, 0, 2).reshape(-1)
                codes = b.bitcast(shuffle(b, b.bitcast(codes, I32X16), None, words), I8X64)
            else:
                column, row = 16 * run + columns * (lane // (4 * columns)) + lane % columns, lane // columns % 4
                codes = self.bits.numbers(np.zeros(WIDE, int), layout.codes[self.rows[row], column])
            if layout.table is not None:
                codes = lookup_bytes(b, [entry + layout.zero - bias & 255 for entry in layout.table], codes, self.target)
            elif layout.signed_bytes != bool(bias):
                codes = b.xor(codes, constant(I8X64, -128))
            if shifts is not None:
                group = 16 * run // layout.group
                codes = b.add(codes, shuffle(b, shifts, None, 4 * group + lane // columns % 4))
            for j, part in enumerate(split(b, codes, 16 // columns)):
                store(b, part, out, PANEL * (16 * run + columns * j))


def write_block(builder, of, type_name, blocks, row_heads, codes, scales, terms):
    """LLVM code that writes the numbers of one block of four rows, or of all rows of an interleaved group, into their places in
    a panel.

    blocks, row_heads: addresses of the rows' blocks and of the rows, four of each (the first counts if rows are interleaved);
    codes, scales, terms (used if the type has them): addresses of the panel's numbers of the block's first column and of the
    first row.
    """
    layout = panel_layout(type_name)
    assert layout is not None
    for first in range(0, max(QUAD, TYPES[type_name].rows), QUAD):
        quad = _Quad(builder, of, type_name, first, blocks, row_heads)
        row_bytes = of.choose(TILES).columns, 4, 4
        place = [builder.add(at, I64(size * first)) for at, size in zip((codes, scales, terms), row_bytes, strict=True)]
        quad.write_scales(place[1], None if layout.m is None else place[2])
        quad.write_codes(place[0])


@intrinsic
def _unpack_block(typingctx, name, blocks, row_heads, codes, scales, terms):
    """`write_block` for this process."""
    if not isinstance(name, types.StringLiteral):
        return None
    type_name = name.literal_value

    def generate(context, builder, signature, args):
        _, blocks, row_heads, codes, scales, terms = args
        blocks, row_heads = ([builder.extract_value(four, k) for k in range(QUAD)] for four in (blocks, row_heads))
        write_block(builder, target(), type_name, blocks, row_heads, codes, scales, terms)
        return context.get_dummy_value()

    i, four = types.int64, types.UniTuple(types.int64, QUAD)
    return types.void(name, four, four, i, i, i), generate


def _part_of(name: str, block: int, size: int, row_head: int, group: int, span: int) -> Callable[[int, int], None]:
    """A part whose table is that of float_panels. block: columns of one; size, row_head: bytes of a block and of a row's head;
    group: rows; span: columns of a scale's group.

    Fills whole panels; rows beyond the last repeat it.
    """

    def unpack_rows(argument, number):
        table = view(argument, UNPACK_FIELDS, np.int64)
        base, row_bytes, columns, last = table[PACKED], table[ROW_BYTES], table[COLUMNS], table[ROWS] - 1
        step = max(group, QUAD)
        for row in range(0, PANEL * table[PANELS], step):
            if group == 1:
                m0 = base + row_bytes * min(row, last)
                m1 = base + row_bytes * min(row + 1, last)
                m2 = base + row_bytes * min(row + 2, last)
                m3 = base + row_bytes * min(row + 3, last)
            else:
                m0 = base + row_bytes * min(row, last + 1 - group)
                m1 = m2 = m3 = m0
            head = group * row_head
            to = table[CODES] + row // PANEL * columns * PANEL + row % PANEL * CODE_COLUMNS
            scale_offset = row // PANEL * (columns // span) * 4 * PANEL + row % PANEL * 4
            for b in range(columns // block):
                offset = head + b * size * group
                group_offset = scale_offset + b * (block // span) * 4 * PANEL
                _unpack_block(
                    name,
                    (m0 + offset, m1 + offset, m2 + offset, m3 + offset),
                    (m0, m1, m2, m3),
                    to + b * block * PANEL,
                    table[SCALES] + group_offset,
                    table[TERMS] + group_offset,
                )

    return unpack_rows


@cache
def panel_form(type_name: str) -> PanelForm | None:
    """What panels of a type hold; None for floats, and for types that have to be decoded."""
    layout = panel_layout(type_name)
    if layout is None:
        return step_form(type_name)
    return PanelForm(layout.zero, layout.most, layout.group, layout.m is not None)


@cache
def unpacker(type_name: str) -> Any:
    """The part (see `team`; its table is in float_panels, the number of no account) that unpacks rows of a type that has
    a `panel_form`: its `address`. Compiled or loaded at the first call."""
    stored, layout = TYPES[type_name], panel_layout(type_name)
    if layout is None:
        return native_entry(types.void(types.int64, types.int64), part_by_steps(stored.name))
    sizes = stored.block, stored.block_bytes, stored.row_meta, stored.rows, layout.group
    return native_entry(types.void(types.int64, types.int64), _part_of(stored.name, *sizes))


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
    table = np.array([q.ctypes.data, row_bytes, rows, columns, panels, *to], np.int64)
    team.run(0, np.array([(0, unpacker(type_name).address, table.ctypes.data, 1)], np.int64))
    return Panels(codes, scales, terms, form.zero, form.group)
