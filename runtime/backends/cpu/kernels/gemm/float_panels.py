"""Floats in the order that matrix products read them: activations in blocks of tokens, weights in panels of 16 rows.

Activations, float32 or rounded to bf16, lie in blocks of tokens (16 for the tile unit, else `vector_products.BLOCK_TOKENS`)
and 32 columns. A float32 panel holds one column of all its rows together, [columns, 16]; a bf16 panel two columns, uint16 bits
[columns / 2, 16, 2]: that is how bf16_r16 lies in files, what the tile unit takes as its second factor, and what a dot-product
instruction multiplies with two columns of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types

from ......formats import TYPES
from ......simd.compile import intrinsic, kernel, native_entry
from ......simd.instructions.half_precision import half_to_float
from ......simd.instructions.x86 import cvtne2ps2bf16
from ......simd.llvm import F32X16, I32X16, I64, LANES, constant, load, loop, shuffle, store, transposed
from ......simd.memory import address, fill, keep_alive, prefetch_lines, view
from ......simd.target import target
from ......simd.team import TaskKernel
from .byte_tiles import PANEL

STEP, AMX_TOKENS = 32, 16  # columns of rows and panels are filled up to multiples; tokens of a block for the tile unit

# Words of the table of a part that unpacks: addresses of whole groups of rows and of where the numbers go, and sizes.
PACKED, ROW_BYTES, ROWS, COLUMNS, PANELS, CODES, SCALES, TERMS = range(8)
COLUMN_BYTES = SCALES  # of a matrix of float32 whose columns lie together: bytes from one to the next
# Of panels of bytes: the first of the columns, for how many columns a panel has room, the address of working memory, and how
# many bytes of a row further what lies there is asked for (0: nothing is). For rounding: the code of 0, the least, the largest.
FIRST_COLUMN, ROOM, MEMORY, AHEAD, ZERO_CODE, LEAST_CODE, MOST_CODE = range(8, 15)
UNPACK_FIELDS = 15


# --- rounding -------------------------------------------------------------------------------------------------------


def canonical_nan(b, value):
    """A vector of float32 whose NaN, if any, have the usual bits: `bf16_pair` would make zeros of others."""
    return b.select(b.fcmp_unordered("uno", value, value), ir.Constant(F32X16, [float("nan")] * LANES), value)


def bf16_pair(b, low, high):
    """Two vectors of float32 rounded to the nearest bf16, as the low and the high halves of words. (Ties go away from zero:
    one instruction instead of three.) NaN has to have the usual bits."""
    half = constant(I32X16, 0x8000)
    high = b.and_(b.add(b.bitcast(high, I32X16), half), constant(I32X16, -0x10000))
    return b.or_(high, b.lshr(b.add(b.bitcast(low, I32X16), half), constant(I32X16, 16)))


def nearest_bf16(b, value):
    """A vector of float32 as words, of which the upper halves are the nearest bf16, ties to even. NaN stay NaN: rounding could
    make zeros of them."""
    words = b.bitcast(value, I32X16)
    odd = b.and_(b.lshr(words, constant(I32X16, 16)), constant(I32X16, 1))
    near = b.add(words, b.add(odd, constant(I32X16, 0x7FFF)))
    return b.select(b.fcmp_unordered("uno", value, value), b.or_(words, constant(I32X16, 1 << 22)), near)


def nearest_bf16_pair(b, low, high):
    """As `bf16_pair`, with any NaN, and ties to even: numbers from a cache of f16 have many, and rounding them away from zero
    would make all results larger."""
    upper = b.and_(nearest_bf16(b, high), constant(I32X16, -0x10000))
    return b.or_(upper, b.lshr(nearest_bf16(b, low), constant(I32X16, 16)))


# --- activations ----------------------------------------------------------------------------------------------------


@intrinsic
def _round_step(typingctx, source, target, remainder):
    """32 float32 at an address, rounded to bf16 at another; what is left, if it is not nothing (remainder 0), at a third."""

    def generate(context, builder, signature, args):
        b = builder
        source, target, remainder = args
        shorts = ir.VectorType(ir.IntType(16), LANES)

        def rounded(value):
            return b.and_(nearest_bf16(b, value), constant(I32X16, -0x10000))

        for half in range(2):
            value = load(b, source, F32X16, 4 * LANES * half)
            words = rounded(value)
            store(b, b.trunc(b.lshr(words, constant(I32X16, 16)), shorts), target, 2 * LANES * half)
            with b.if_then(b.icmp_signed("!=", remainder, I64(0))):
                left = rounded(b.fsub(value, b.bitcast(words, F32X16)))
                store(b, b.trunc(b.lshr(left, constant(I32X16, 16)), shorts), remainder, 2 * LANES * half)
        return context.get_dummy_value()

    i = types.int64
    return types.void(i, i, i), generate


@intrinsic
def _copy_step(typingctx, source, target):
    """32 float32 from an address to another."""

    def generate(context, builder, signature, args):
        for half in range(2):
            store(builder, load(builder, args[0], F32X16, 4 * LANES * half), args[1], 4 * LANES * half)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@kernel
def place_row(bf16, source, columns, first, stop, block_tokens, target, remainder, last):
    """Writes the columns first (a multiple of 32) to stop - 1 of a row of float32, or zeros if its address is 0, to their
    places in a block of `block_tokens` tokens: rounded to bf16 (bf16: a boolean) or as they are (None).

    target: address of the row's column 0; remainder (if not 0): that of what rounding left. last: zeros
    [32], working memory.
    """
    for column in range(first, min(stop, columns), STEP):
        at = source + 4 * column
        if source == 0:
            at = address(last)
        elif column + STEP > columns:
            for i in range(columns - column):
                last[i] = view(at, columns - column, np.float32)[i]
            at = address(last)
        if bf16 is None:
            _copy_step(at, target + 4 * block_tokens * column)
        else:
            place = 2 * block_tokens * column
            _round_step(at, target + place, remainder + place if remainder else 0)
        if at == address(last):
            fill(last, 0)


@kernel
def _fill_blocks(bf16, x, out):
    n, columns = x.shape
    block_tokens, last = out.shape[3], np.zeros(STEP, np.float32)
    block_bytes, part_bytes, size = out.itemsize * out[0].size, out.itemsize * out[0, 0].size, out.itemsize
    for t in range(out.shape[0] * block_tokens):
        to = address(out) + t // block_tokens * block_bytes + t % block_tokens * size * STEP
        source = address(x) + 4 * t * columns if t < n else 0
        place_row(bf16, source, columns, 0, columns, block_tokens, to, to + part_bytes if out.shape[1] > 1 else 0, last)


# --- weights --------------------------------------------------------------------------------------------------------


def load_floats(b, of, type_name, at, first=0):
    """Sixteen numbers, f32, f16 or bf16, from the number `first` at an address on as a vector of float32."""
    if type_name == "f32":
        return load(b, at, F32X16, 4 * first)
    shorts = load(b, at, ir.VectorType(ir.IntType(16), LANES), 2 * first)
    if type_name == "f16":
        return half_to_float(b, shorts, of)
    return b.bitcast(b.shl(b.zext(shorts, I32X16), constant(I32X16, 16)), F32X16)


def write_transposed(b, of, type_name, wide, source, row_bytes, rows, out, out_step=4 * LANES):
    """LLVM code that writes 32 columns of a panel at address `out` from 16 rows at address `source`, `row_bytes` apart, of type
    f32, f16 or bf16. wide: to a panel of float32, else of bf16 (rounded to the nearest). The last of `rows` rows stands in for
    missing ones. out_step: bytes from one vector to the next."""
    last = b.sub(rows, I64(1))
    lines: list[list[Any]] = [[], []]
    for r in range(PANEL):
        row = b.select(b.icmp_signed("<", I64(r), last), I64(r), last)
        at = b.add(source, b.mul(row, row_bytes))
        if not wide and type_name == "bf16":
            lines[0].append(load(b, at, I32X16))
            continue
        first, second = (load_floats(b, of, type_name, at, half) for half in (0, LANES))
        if wide:
            lines[0].append(b.bitcast(first, I32X16))
            lines[1].append(b.bitcast(second, I32X16))
        elif type_name == "f16" and of.has_bf16_dots:  # no f16 is a subnormal float32
            lines[0].append(cvtne2ps2bf16(b, second, first))
        else:
            even, odd = (canonical_nan(b, shuffle(b, first, second, range(i, 2 * LANES, 2))) for i in range(2))
            lines[0].append(bf16_pair(b, even, odd))
    for i, line in enumerate(line for half in lines if half for line in transposed(b, half)):
        store(b, line, out, out_step * i)


@intrinsic
def _transpose_step(typingctx, type_name, bf16, source, row_bytes, rows, out):
    """`write_transposed` for this process. bf16: a boolean for a panel of bf16, None for one of float32."""
    if not isinstance(type_name, types.StringLiteral):
        return None
    name, wide = type_name.literal_value, isinstance(bf16, types.NoneType)

    def generate(context, builder, signature, args):
        # LLVM sees a number that comes from nowhere: of sixteen addresses that grow with the columns it would try all ways to
        # compute them, which takes as long as all other passes.
        source = builder.asm(ir.FunctionType(I64, [I64]), "", "=r,0", [args[2]], side_effect=False)
        write_transposed(builder, target(), name, wide, source, *args[3:])
        return context.get_dummy_value()

    i = types.int64
    return types.void(type_name, bf16, i, i, i, i), generate


@intrinsic
def _widen_pairs(typingctx, source, out, count):
    """Writes float32 panels from so many vectors of 16 pairs of bf16, of the same two columns of 16 rows each."""

    def generate(context, builder, signature, args):
        b = builder
        source, out, count = args

        def pair(i):
            words, to = load(b, source, I32X16, b.mul(i, I64(4 * LANES))), b.add(out, b.mul(i, I64(8 * LANES)))
            store(b, b.shl(words, constant(I32X16, 16)), to)
            store(b, b.and_(words, constant(I32X16, -0x10000)), to, 4 * LANES)

        loop(b, count, pair)
        return context.get_dummy_value()

    i = types.int64
    return types.void(i, i, i), generate


def _rows_part(type_name: str, size: int, bf16: bool | None) -> Callable[[int, int], None]:
    """size: bytes of a number in the rows."""
    column_bytes, step_bytes = PANEL * (4 if bf16 is None else 2), PANEL * STEP * size

    def write_panels(argument, number):
        table = view(argument, UNPACK_FIELDS, np.int64)
        columns, row_bytes, last = table[COLUMNS], table[ROW_BYTES], table[ROWS] - 1
        whole, width = columns // STEP * STEP, -(-columns // STEP) * STEP
        tail = np.empty(PANEL * STEP * size if whole < columns else 0, np.uint8)
        fill(tail, 0)
        for panel in range(table[PANELS]):
            first = min(panel * PANEL, last)
            rows, at = min(PANEL, last + 1 - first), table[PACKED] + first * row_bytes
            to, following = table[CODES] + panel * width * column_bytes, at + PANEL * row_bytes
            for c in range(0, whole, STEP):
                prefetch_lines(following + c * PANEL * size, step_bytes)
                _transpose_step(type_name, bf16, at + c * size, row_bytes, rows, to + c * column_bytes)
            if whole < columns:  # reading on would leave the row, and perhaps the file
                some = (columns - whole) * size
                for r in range(rows):
                    source = view(at + r * row_bytes + whole * size, some, np.uint8)
                    for i in range(some):
                        tail[r * STEP * size + i] = source[i]
                _transpose_step(type_name, bf16, address(tail), STEP * size, rows, to + whole * column_bytes)
        keep_alive(tail)

    return write_panels


def _pairs_part(argument, number):
    table = view(argument, UNPACK_FIELDS, np.int64)
    columns, width = table[COLUMNS], -(-table[COLUMNS] // STEP) * STEP
    for panel in range(table[PANELS]):
        source = table[PACKED] + min(panel * PANEL, table[ROWS] - PANEL) * table[ROW_BYTES]
        to = table[CODES] + panel * width * PANEL * 4
        _widen_pairs(source, to, columns // 2)
        fill(view(to + columns * PANEL * 4, (width - columns) * PANEL, np.float32), 0)


@intrinsic
def _write_columns(typingctx, bf16, source, column_bytes, lines, out):
    """16 float32 of each of so many columns, or pairs of columns that are rounded to bf16 (bf16: a boolean, not None), to lines
    of 64 bytes."""
    wide = isinstance(bf16, types.NoneType)

    def generate(context, builder, signature, args):
        b = builder
        _, source, column_bytes, lines, out = args

        def line(i):
            at = b.add(source, b.mul(b.mul(i, I64(1 if wide else 2)), column_bytes))
            words = load(b, at, F32X16)
            if not wide:
                words = bf16_pair(b, *(canonical_nan(b, x) for x in (words, load(b, at, F32X16, column_bytes))))
            store(b, words, out, b.mul(i, I64(4 * LANES)))

        loop(b, lines, line)
        return context.get_dummy_value()

    i = types.int64
    return types.void(bf16, i, i, i, i), generate


def _columns_part(bf16: bool | None) -> TaskKernel:
    together = 1 if bf16 is None else 2

    def write_panels(argument, number):
        table = view(argument, UNPACK_FIELDS, np.int64)
        columns, step, width = table[COLUMNS], table[COLUMN_BYTES], -(-table[COLUMNS] // STEP) * STEP
        lines, rest = -(-columns // together), np.empty(together * PANEL, np.float32)
        for panel in range(table[PANELS]):
            rows = min(PANEL, table[ROWS] - panel * PANEL)
            source, to = table[PACKED] + 4 * panel * PANEL, table[CODES] + panel * (width // together) * PANEL * 4
            whole = columns // together if rows == PANEL else 0
            _write_columns(bf16, source, step, whole, to)
            for line in range(whole, lines):
                fill(rest, 0)
                for c in range(line * together, min((line + 1) * together, columns)):
                    numbers = view(source + c * step, rows, np.float32)
                    for r in range(rows):
                        rest[(c - line * together) * PANEL + r] = numbers[r]
                _write_columns(bf16, address(rest), 4 * PANEL, 1, to + 4 * PANEL * line)
            fill(view(to + lines * PANEL * 4, (width // together - lines) * PANEL, np.float32), 0)
        keep_alive(rest)

    return TaskKernel(write_panels)


# As a `panel_part`, by its `bf16`, from a matrix of float32 whose columns lie together (see COLUMN_BYTES): its rows are 4 bytes
# apart.
COLUMNS_PARTS = {False: _columns_part(None), True: _columns_part(True)}


@cache
def panel_part(type_name: str, bf16: bool) -> Any:
    """The part (see `team`; its table is above, without SCALES and TERMS, the number of no account) that writes panels of
    float32, or of bf16, from rows of f32, f16 or bf16 or, to float32, from groups of bf16_r16: its `address`. Compiled or
    loaded at the first call. Columns are filled up with zeros to a multiple of 32, rows with any numbers."""
    signature = types.void(types.int64, types.int64)
    if type_name == "bf16_r16":
        assert not bf16
        return native_entry(signature, _pairs_part)
    return native_entry(signature, _rows_part(type_name, TYPES[type_name].block_bytes, True if bf16 else None))
