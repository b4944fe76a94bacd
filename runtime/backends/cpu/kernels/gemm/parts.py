"""The parts that products of many tokens are made of, for programs of a team (see `team`): activations brought into the form
that products want, the products of a slice of a matrix's rows, and the activation of a feed-forward block.

Activations are a table of INPUTS words. Rows come in blocks (of IN_UNIT tokens, or TILE_TOKENS for bytes); a row of the result
is row PLACES[row] of x, or zeros where that is -1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ......simd.compile import kernel
from ......simd.memory import address, view
from ......simd.team import Part, call_part, part
from ..activations import RUN, quantise_run
from .amx_products import COLUMN_TILE, multiply_expanded, multiply_tiles
from .byte_products import BLOCK, TILE_TOKENS, multiply_bytes
from .float_panels import (
    CODES,
    COLUMN_BYTES,
    COLUMNS,
    PACKED,
    PANELS,
    ROW_BYTES,
    ROWS,
    SCALES,
    STEP,
    TERMS,
    TOKENS,
    UNPACK_FIELDS,
    keep_alive,
    place_row,
)
from .unpack_panels import PANEL
from .vector_products import UNIT, multiply_panels

FLOAT32, BF16, BYTES = range(3)  # forms of activations: float32, sums of one or two bf16, 8-bit codes

# Words of the table of activations: x, rows to take (0: the first COUNT), columns, where the results go (see `gemm.Inputs`).
(X, PLACES, COUNT, WIDTH, FORM, BLOCKS, TOKEN_SCALES, OFFSETS, TOTALS, IN_ZERO, IN_GROUP) = range(11)
IN_PARTS, IN_UNIT = IN_ZERO, IN_GROUP  # of floats: numbers that are added up, tokens of a block
INPUTS = 11

# Words of the table of a product: addresses, bytes and numbers as in `gemv`; slices of STEP rows each.
(WEIGHTS, MATRIX_BYTES, LINE_BYTES, LINES, LENGTH, UNPACKER, ZERO, GROUP, HAS_TERMS, STEP_ROWS, SLICES) = range(11)
(OUT, STRIDE, JOBS, INPUT) = range(11, 15)
FIELDS = 15
MATRIX, FIRST, COUNTED, TARGET = range(4)  # of a job

SPAN = 1024  # columns of a unit of activations that one part takes: a multiple of all blocks
_SUMS = (8, 512)  # pairs of panels and tokens whose sums are kept until all columns are done: half a megabyte
_LINE = 64


# --- activations ----------------------------------------------------------------------------------------------------


@kernel
def _place(table, row):
    if table[PLACES]:
        return view(table[PLACES], row + 1, np.int64)[row]
    return row if row < table[COUNT] else -1


@kernel
def _place_unit(table, bf16, unit, first, stop):
    """The columns first to stop - 1 of a block of floats: bf16 (a boolean) or float32 (None)."""
    columns, parts, tokens = table[WIDTH], table[IN_PARTS], table[IN_UNIT]
    size = 4 if bf16 is None else 2
    part_bytes = -(-columns // STEP) * STEP * tokens * size
    last = np.zeros(STEP, np.float32)
    for r in range(tokens):
        place = _place(table, unit * tokens + r)
        source = table[X] + 4 * place * columns if place >= 0 else 0
        to = table[BLOCKS] + unit * parts * part_bytes + r * size * STEP
        place_row(bf16, source, columns, first, stop, tokens, to, to + part_bytes if parts > 1 else 0, last)


@kernel
def _quantise_unit(table, unit, first, stop):
    columns, group, zero = table[WIDTH], table[IN_GROUP], table[IN_ZERO]
    size, groups = stop - first, columns // group
    spare = np.empty(size // RUN, np.int16)
    for row in range(unit * TILE_TOKENS, (unit + 1) * TILE_TOKENS):
        place = _place(table, row)
        codes = view(table[BLOCKS] + row * columns + first, size, np.uint8)
        scales = view(table[TOKEN_SCALES] + 4 * (row * columns + first) // BLOCK, size // BLOCK, np.float32)
        if place < 0:
            codes[:], scales[:], spare[:] = 0, 0, 0
        else:
            quantise_run(view(table[X] + 4 * (place * columns + first), size, np.float32), BLOCK, codes, scales, spare)
        at = 4 * (row * groups + first // group)
        offsets = view(table[OFFSETS] + at, size // group, np.int32)
        totals = view(table[TOTALS] + at, size // group, np.float32)
        for g in range(size // group):
            total = np.int32(spare[g]) if group == RUN else np.int32(spare[2 * g]) + np.int32(spare[2 * g + 1])
            offsets[g] = np.int32(-zero * total)
            totals[g] = np.float32(total) * scales[g * group // BLOCK]


@kernel
def _prepare(table, unit, first, stop):
    if table[FORM] == BYTES:
        _quantise_unit(table, unit, first, stop)
    elif table[FORM] == BF16:
        _place_unit(table, True, unit, first, stop)
    else:
        _place_unit(table, None, unit, first, stop)


@part
def prepare_part(argument, number):
    """Activations as a table says; parts: units x spans of columns."""
    table = view(argument, INPUTS, np.int64)
    spans = -(-table[WIDTH] // SPAN)
    first = number % spans * SPAN
    _prepare(table, number // spans, first, min(first + SPAN, table[WIDTH]))


# --- products -------------------------------------------------------------------------------------------------------


@kernel
def _job(table, number):
    """(matrix, first row of the inputs, their number, first row of the outputs), first row and number of rows of the matrix."""
    job = view(table[JOBS] + number // table[SLICES] * 32, 4, np.int64)
    start = number % table[SLICES] * table[STEP_ROWS]
    return (job[MATRIX], job[FIRST], job[COUNTED], job[TARGET]), start, min(table[STEP_ROWS], table[LINES] - start)


@kernel
def _out(table, job):
    return view(table[OUT] + 4 * job[3] * table[STRIDE], job[2] * table[STRIDE], np.float32).reshape(job[2], table[STRIDE])


@kernel
def _sums(at, panels, tokens):
    """Sums at an address, and how many bytes they take."""
    pairs = min(_SUMS[0], (panels + 1) // 2)
    return view(at, pairs * tokens * 2 * PANEL, np.float32).reshape(pairs, tokens, 2 * PANEL)


@kernel
def _unpack(table, job, start, rows, panels, at):
    """Panels of a slice at an address: codes, scales, terms (without numbers if there are none)."""
    columns, groups, unpacking = table[LENGTH], table[LENGTH] // table[GROUP], np.empty(UNPACK_FIELDS, np.int64)
    code_bytes, scale_bytes = panels * PANEL * columns, 4 * panels * PANEL * groups
    unpacking[PACKED] = table[WEIGHTS] + job[0] * table[MATRIX_BYTES] + start * table[LINE_BYTES]
    unpacking[ROW_BYTES], unpacking[ROWS], unpacking[COLUMNS], unpacking[PANELS] = table[LINE_BYTES], rows, columns, panels
    unpacking[CODES], unpacking[SCALES], unpacking[TERMS] = at, at + code_bytes, at + code_bytes + scale_bytes
    call_part(table[UNPACKER], unpacking.ctypes.data, 0)
    keep_alive(unpacking)
    codes = view(at, code_bytes, np.uint8).reshape(panels, columns // 4, PANEL, 4)
    scales = view(at + code_bytes, scale_bytes // 4, np.float32).reshape(panels, groups, PANEL)
    count = panels if table[HAS_TERMS] else 0
    terms = view(unpacking[TERMS], count * groups * PANEL, np.float32).reshape(count, groups, PANEL)
    return codes, scales, terms


@kernel
def _memory(size, panels, tokens):
    """Memory for so many bytes and the sums of so many panels and tokens, and the first line's address in it."""
    sums = 4 * min(_SUMS[0], (panels + 1) // 2) * tokens * 2 * PANEL
    memory = np.empty(_LINE + size + sums, np.uint8)
    return memory, (address(memory) + _LINE - 1) // _LINE * _LINE


@kernel
def _room(table, panels, tokens):
    """As _memory, for panels of bytes with their scales and terms, and COLUMN_TILE columns of two of them as bf16."""
    numbers = panels * PANEL * table[LENGTH]
    return _memory(numbers + 8 * numbers // table[GROUP] + 4 * PANEL * COLUMN_TILE, panels, tokens)


@kernel
def _blocks(table, job, parts):
    """The tokens of a job as bf16 for the tile unit."""
    inputs, steps, count = view(table[INPUT], INPUTS, np.int64), -(-table[LENGTH] // STEP), -(-job[2] // TOKENS)
    size = parts * steps * TOKENS * STEP
    blocks = view(inputs[BLOCKS] + job[1] // TOKENS * size * 2, count * size, np.uint16)
    return blocks.reshape(count, parts, steps, TOKENS, STEP)


@part
def expanded_part(argument, number):
    """Packed weights, expanded to bf16 on the way, on the tile unit."""
    table = view(argument, FIELDS, np.int64)
    job, start, rows = _job(table, number)
    panels, tokens = -(-rows // (2 * PANEL)) * 2, _blocks(table, job, 1)
    together = min(len(tokens) * TOKENS, _SUMS[1])
    room, at = _room(table, panels, together)
    buffer, sums = view(at, 2 * PANEL * COLUMN_TILE, np.uint16), _sums(at + 4 * PANEL * COLUMN_TILE, panels, together)
    codes, scales, terms = _unpack(table, job, start, rows, panels, at + 4 * PANEL * COLUMN_TILE + 4 * sums.size)
    multiply_expanded(codes, scales, terms, table[ZERO], table[GROUP], tokens, sums, buffer, _out(table, job), start)
    keep_alive(room)


@kernel
def _fill(table, job, start, rows, panels, at):
    """Writes float panels of a slice to an address, unless there is no UNPACKER because the weights are panels already; returns
    their address."""
    weights = table[WEIGHTS] + job[0] * table[MATRIX_BYTES] + start * table[LINE_BYTES]
    if not table[UNPACKER]:
        return weights
    filling = np.zeros(UNPACK_FIELDS, np.int64)
    filling[PACKED], filling[ROW_BYTES], filling[ROWS] = weights, table[LINE_BYTES], rows
    filling[COLUMNS], filling[PANELS], filling[CODES], filling[COLUMN_BYTES] = table[LENGTH], panels, at, table[GROUP]
    call_part(table[UNPACKER], filling.ctypes.data, 0)
    keep_alive(filling)
    return at


@part
def tiles_part(argument, number):
    """Panels of bf16 times bf16 (ZERO: how many are added up), on the tile unit."""
    table = view(argument, FIELDS, np.int64)
    job, start, rows = _job(table, number)
    width, panels, tokens = -(-table[LENGTH] // STEP) * STEP, -(-rows // PANEL), _blocks(table, job, table[ZERO])
    together = min(len(tokens) * TOKENS, _SUMS[1])
    room, at = _memory(2 * PANEL * panels * width + 4 * PANEL * COLUMN_TILE, panels, together)
    buffer, sums = view(at, 2 * PANEL * COLUMN_TILE, np.uint16), _sums(at + 4 * PANEL * COLUMN_TILE, panels, together)
    weights = _fill(table, job, start, rows, panels, at + 4 * PANEL * COLUMN_TILE + 4 * sums.size)
    ready = view(weights, panels * PANEL * width, np.uint16).reshape(panels, width // 2, PANEL, 2)
    multiply_tiles(ready, tokens, sums, buffer, _out(table, job), start, table[LINES])
    keep_alive(room)


@part
def dots_part(argument, number):
    """Panels of bf16 times bf16 (ZERO: how many are added up), with dot products of AVX-512."""
    table = view(argument, FIELDS, np.int64)
    inputs = view(table[INPUT], INPUTS, np.int64)
    job, start, rows = _job(table, number)
    width, panels, parts, count = -(-table[LENGTH] // STEP) * STEP, -(-rows // PANEL), table[ZERO], -(-job[2] // UNIT)
    together = min(count, -(-_SUMS[1] // UNIT)) * UNIT
    room, at = _memory(2 * PANEL * panels * width, panels, together)
    sums = _sums(at, panels, together)
    weights = _fill(table, job, start, rows, panels, at + 4 * sums.size)
    ready = view(weights, panels * PANEL * width, np.uint16).reshape(panels, width // 2, PANEL, 2)
    blocks = view(inputs[BLOCKS] + 2 * job[1] * parts * width, count * UNIT * parts * width, np.uint16)
    tokens = blocks.reshape(count, parts, width // STEP, UNIT, STEP)
    multiply_panels(True, ready, tokens, sums, _out(table, job), start, table[LINES])
    keep_alive(room)


@part
def floats_part(argument, number):
    """Panels of float32 times float32."""
    table = view(argument, FIELDS, np.int64)
    inputs = view(table[INPUT], INPUTS, np.int64)
    job, start, rows = _job(table, number)
    width, panels, count = -(-table[LENGTH] // STEP) * STEP, -(-rows // PANEL), -(-job[2] // UNIT)
    together = min(count, -(-_SUMS[1] // UNIT)) * UNIT
    room, at = _memory(4 * PANEL * panels * width, panels, together)
    sums = _sums(at, panels, together)
    weights = _fill(table, job, start, rows, panels, at + 4 * sums.size)
    ready = view(weights, panels * PANEL * width, np.float32).reshape(panels, width, PANEL)
    blocks = view(inputs[BLOCKS] + 4 * job[1] * width, count * UNIT * width, np.float32)
    tokens = blocks.reshape(count, 1, width // STEP, UNIT, STEP)
    multiply_panels(None, ready, tokens, sums, _out(table, job), start, table[LINES])
    keep_alive(room)


def _bytes_part(halves: bool | None) -> Callable[[int, int], None]:
    def product(argument, number):
        table = view(argument, FIELDS, np.int64)
        inputs = view(table[INPUT], INPUTS, np.int64)
        job, start, rows = _job(table, number)
        panels, columns, groups = -(-rows // (2 * PANEL)) * 2, table[LENGTH], table[LENGTH] // table[GROUP]
        n, first = -(-job[2] // TILE_TOKENS) * TILE_TOKENS, job[1]
        room, at = _room(table, panels, min(n, _SUMS[1]))
        sums = _sums(at, panels, min(n, _SUMS[1]))
        codes, scales, terms = _unpack(table, job, start, rows, panels, at + 4 * sums.size)
        tokens = view(inputs[BLOCKS] + first * columns, n * columns, np.int8).reshape(n, columns)
        blocks = columns // BLOCK
        token_scales = view(inputs[TOKEN_SCALES] + 4 * first * blocks, n * blocks, np.float32).reshape(n, blocks)
        offsets = view(inputs[OFFSETS] + 4 * first * groups, n * groups, np.int32).reshape(n, groups)
        totals = view(inputs[TOTALS] + 4 * first * groups, n * groups, np.float32).reshape(n, groups)
        out = _out(table, job)
        if table[HAS_TERMS]:
            multiply_bytes(halves, codes, scales, terms, tokens, token_scales, offsets, totals, sums, out, start)
        else:
            multiply_bytes(halves, codes, scales, None, tokens, token_scales, offsets, totals, sums, out, start)
        keep_alive(room)

    return product


bytes_parts: dict[int, Any] = {BLOCK: Part(_bytes_part(None)), RUN: Part(_bytes_part(True))}  # by columns of a group
