"""Parts for programs of a team (see simd/team.py) that a GEMM consists of: one that fills blocks of activations, and one for
each form of activations that multiplies them with a slice of a matrix's rows.

Blocks hold TOKENS_PER_BLOCK rows (TILE_TOKENS for bytes). Row r of the blocks is row PLACES[r] of x, or zeros where that is -1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from ......simd.compile import kernel
from ......simd.memory import address, fill, keep_alive, view
from ......simd.team import TaskKernel, call_part
from ..activations import RUN, quantise_run
from .amx_products import COLUMN_TILE, multiply_expanded, multiply_tiles
from .byte_products import multiply_bytes, word_bytes, write_sums
from .byte_tiles import BLOCK, CODE_BIAS, CODE_COLUMNS, TILE_TOKENS
from .float_panels import (
    AMX_TOKENS,
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
    UNPACK_FIELDS,
    place_row,
)
from .unpack_panels import PANEL
from .vector_products import BLOCK_TOKENS, add_products

FLOAT32, BF16, BYTES = range(3)  # forms of activations: float32, sums of one or two bf16, 8-bit codes

# Words of the table of activations: address of x, of the places (0: the first X_ROWS), sizes, addresses of the results.
(X, PLACES, X_ROWS, X_COLUMNS, BLOCKS, TOKEN_SCALES, OFFSETS, TOTALS, FIRST_PARAMETER, SECOND_PARAMETER) = range(10)
BF16_PARTS, TOKENS_PER_BLOCK = FIRST_PARAMETER, SECOND_PARAMETER  # of floats: numbers that are added up, tokens of a block
INPUTS = 10

# Words of the table of a product: addresses, bytes and numbers as in `gemv`; slices of STEP rows each.
(WEIGHTS, MATRIX_BYTES, WEIGHT_ROW_BYTES, WEIGHT_ROWS, WEIGHT_COLUMNS) = range(5)
(UNPACKER, ZERO, GROUP, HAS_TERMS, STEP_ROWS, SLICES, OUT, STRIDE, JOBS, INPUT) = range(5, 15)
FIELDS = 15
MATRIX, FIRST, N_ROWS, TARGET = range(4)  # of a job

SPAN = 1024  # columns of a block of activations that one part takes: a multiple of all blocks
_SUMS = (8, 512)  # pairs of panels and tokens whose sums are in memory at a time: half a megabyte
FLOAT_COLUMNS = 512  # of float32, or twice as many of bf16, that are unpacked at a time for products on vector registers
FLOAT_ROWS = 2 * PANEL * _SUMS[0]  # most rows of a slice of these
_FLOAT_TOKENS = 2064  # most tokens of these whose sums are in memory at a time: with 16 panels two megabytes
_BYTE_TOKENS = 264  # most tokens of byte products: their processors may have second-level caches of a megabyte
_LINE = 64


# --- activations ----------------------------------------------------------------------------------------------------


@kernel
def _source_row(table, row):
    if table[PLACES]:
        return view(table[PLACES], row + 1, np.int64)[row]
    return row if row < table[X_ROWS] else -1


@kernel
def _fill_block(table, bf16, block, first, stop):
    """The columns first to stop - 1 of a block of floats: bf16 (a boolean) or float32 (None)."""
    columns, parts, tokens = table[X_COLUMNS], table[BF16_PARTS], table[TOKENS_PER_BLOCK]
    size = 4 if bf16 is None else 2
    part_bytes = -(-columns // STEP) * STEP * tokens * size
    last = np.empty(STEP, np.float32)
    fill(last, 0)
    for r in range(tokens):
        row_of_x = _source_row(table, block * tokens + r)
        source = table[X] + 4 * row_of_x * columns if row_of_x >= 0 else 0
        to = table[BLOCKS] + block * parts * part_bytes + r * size * STEP
        place_row(bf16, source, columns, first, stop, tokens, to, to + part_bytes if parts > 1 else 0, last)


@kernel
def _quantise_block(table, block, first, stop):
    columns, group, zero = table[X_COLUMNS], table[SECOND_PARAMETER], table[FIRST_PARAMETER]
    size, groups = stop - first, columns // group
    run_sums = np.empty(size // RUN, np.int16)
    for row in range(block * TILE_TOKENS, (block + 1) * TILE_TOKENS):
        row_of_x = _source_row(table, row)
        codes = view(table[BLOCKS] + row * columns + first, size, np.uint8)
        scales = view(table[TOKEN_SCALES] + 4 * (row * columns + first) // BLOCK, size // BLOCK, np.float32)
        if row_of_x < 0:
            fill(codes, 0)
            fill(scales, 0)
            fill(run_sums, 0)
        else:
            quantise_run(view(table[X] + 4 * (row_of_x * columns + first), size, np.float32), BLOCK, codes, scales, run_sums)
        at = 4 * (row * groups + first // group)
        offsets = view(table[OFFSETS] + at, size // group, np.int32)
        totals = view(table[TOTALS] + at, size // group, np.float32)
        for g in range(size // group):
            total = np.int32(run_sums[g]) if group == RUN else np.int32(run_sums[2 * g]) + np.int32(run_sums[2 * g + 1])
            offsets[g] = np.int32((CODE_BIAS - zero) * total)
            totals[g] = np.float32(total) * scales[g * group // BLOCK]


def _prepare(bf16: bool | None) -> TaskKernel:
    def prepare_floats(argument, number):
        table = view(argument, INPUTS, np.int64)
        spans = -(-table[X_COLUMNS] // SPAN)
        first = number % spans * SPAN
        _fill_block(table, bf16, number // spans, first, min(first + SPAN, table[X_COLUMNS]))

    return TaskKernel(prepare_floats)


@TaskKernel
def _prepare_bytes(argument, number):
    table = view(argument, INPUTS, np.int64)
    spans = -(-table[X_COLUMNS] // SPAN)
    first = number % spans * SPAN
    _quantise_block(table, number // spans, first, min(first + SPAN, table[X_COLUMNS]))


# Form of activations -> the part that fills blocks as a table of activations says; its numbers: blocks x spans of columns.
PREPARE_KERNELS = {FLOAT32: _prepare(None), BF16: _prepare(True), BYTES: _prepare_bytes}


# --- products -------------------------------------------------------------------------------------------------------


@kernel
def _job(table, number):
    """(matrix, first row of the inputs, their number, first row of the outputs), first row and number of rows of the matrix."""
    job = view(table[JOBS] + number // table[SLICES] * 32, 4, np.int64)
    start = number % table[SLICES] * table[STEP_ROWS]
    return (job[MATRIX], job[FIRST], job[N_ROWS], job[TARGET]), start, min(table[STEP_ROWS], table[WEIGHT_ROWS] - start)


@kernel
def _out(table, job):
    return view(table[OUT] + 4 * job[3] * table[STRIDE], (job[2], table[STRIDE]), np.float32)


@kernel
def _sums(at, panels, tokens):
    """Sums at an address, and how many bytes they take."""
    pairs = min(_SUMS[0], (panels + 1) // 2)
    return view(at, (pairs, tokens, 2 * PANEL), np.float32)


@kernel
def _byte_tokens(n):
    """The tokens whose sums are in memory at a time, of n tokens times bytes: evenly divided, so that none is a small rest."""
    even = -(-n // -(-n // _BYTE_TOKENS))
    return -(-even // TILE_TOKENS) * TILE_TOKENS


@kernel
def _unpack(table, job, start, rows, panels, at):
    """Panels of a slice at an address: codes, scales, terms (without numbers if there are none)."""
    columns, groups, words = table[WEIGHT_COLUMNS], table[WEIGHT_COLUMNS] // table[GROUP], np.empty(UNPACK_FIELDS, np.int64)
    code_bytes, scale_bytes = panels * PANEL * columns, 4 * panels * PANEL * groups
    words[PACKED] = table[WEIGHTS] + job[0] * table[MATRIX_BYTES] + start * table[WEIGHT_ROW_BYTES]
    words[ROW_BYTES], words[ROWS], words[COLUMNS], words[PANELS] = table[WEIGHT_ROW_BYTES], rows, columns, panels
    words[CODES], words[SCALES], words[TERMS] = at, at + code_bytes, at + code_bytes + scale_bytes
    call_part(table[UNPACKER], words.ctypes.data, 0)
    keep_alive(words)
    codes = view(at, (panels, columns // CODE_COLUMNS, PANEL, CODE_COLUMNS), np.uint8)
    scales = view(at + code_bytes, (panels, groups, PANEL), np.float32)
    count = panels if table[HAS_TERMS] else 0
    terms = view(words[TERMS], (count, groups, PANEL), np.float32)
    return codes, scales, terms


@kernel
def _memory(size, panels, tokens):
    """Memory for so many bytes and the sums of so many panels and tokens, and the first line's address in it."""
    sums = 4 * min(_SUMS[0], (panels + 1) // 2) * tokens * 2 * PANEL
    memory = np.empty(_LINE + size + sums, np.uint8)
    return memory, (address(memory) + _LINE - 1) // _LINE * _LINE


@kernel
def _byte_memory(table, panels, tokens, more):
    """As _memory, for panels of bytes with their scales and terms, and so many bytes more."""
    numbers = panels * PANEL * table[WEIGHT_COLUMNS]
    return _memory(numbers + 8 * numbers // table[GROUP] + more, panels, tokens)


@kernel
def _blocks(table, job, parts):
    """The tokens of a job as bf16 for the tile unit."""
    inputs, steps, count = view(table[INPUT], INPUTS, np.int64), -(-table[WEIGHT_COLUMNS] // STEP), -(-job[2] // AMX_TOKENS)
    size = parts * steps * AMX_TOKENS * STEP
    return view(inputs[BLOCKS] + job[1] // AMX_TOKENS * size * 2, (count, parts, steps, AMX_TOKENS, STEP), np.uint16)


@TaskKernel
def expanded_product(argument, number):
    """Packed weights, expanded to bf16 on the way, on the tile unit."""
    table = view(argument, FIELDS, np.int64)
    job, start, rows = _job(table, number)
    panels, tokens = -(-rows // (2 * PANEL)) * 2, _blocks(table, job, 1)
    token_tile = min(len(tokens) * AMX_TOKENS, _SUMS[1])
    memory, at = _byte_memory(table, panels, token_tile, 4 * PANEL * COLUMN_TILE)
    buffer, sums = view(at, 2 * PANEL * COLUMN_TILE, np.uint16), _sums(at + 4 * PANEL * COLUMN_TILE, panels, token_tile)
    codes, scales, terms = _unpack(table, job, start, rows, panels, at + 4 * PANEL * COLUMN_TILE + 4 * sums.size)
    multiply_expanded(codes, scales, terms, table[ZERO], table[GROUP], tokens, sums, buffer, _out(table, job), start)
    keep_alive(memory)


@kernel
def _fill(table, job, start, rows, panels, at, first, columns):
    """Writes float panels of a slice's columns from `first` on to an address, filled up to `columns`, unless there is no
    UNPACKER because the weights are panels already; returns their address."""
    weights = table[WEIGHTS] + job[0] * table[MATRIX_BYTES] + start * table[WEIGHT_ROW_BYTES]
    if not table[UNPACKER]:
        return weights
    words = np.empty(UNPACK_FIELDS, np.int64)
    fill(words, 0)
    words[PACKED], words[ROW_BYTES], words[ROWS] = weights + first * table[GROUP], table[WEIGHT_ROW_BYTES], rows
    words[COLUMNS], words[PANELS] = min(columns, table[WEIGHT_COLUMNS] - first), panels
    words[CODES], words[COLUMN_BYTES] = at, table[GROUP]
    call_part(table[UNPACKER], words.ctypes.data, 0)
    keep_alive(words)
    return at


@TaskKernel
def tiles_product(argument, number):
    """Panels of bf16 times bf16 (ZERO: how many are added up), on the tile unit."""
    table = view(argument, FIELDS, np.int64)
    job, start, rows = _job(table, number)
    width, panels, tokens = -(-table[WEIGHT_COLUMNS] // STEP) * STEP, -(-rows // PANEL), _blocks(table, job, table[ZERO])
    token_tile = min(len(tokens) * AMX_TOKENS, _SUMS[1])
    memory, at = _memory(2 * PANEL * panels * width + 4 * PANEL * COLUMN_TILE, panels, token_tile)
    buffer, sums = view(at, 2 * PANEL * COLUMN_TILE, np.uint16), _sums(at + 4 * PANEL * COLUMN_TILE, panels, token_tile)
    weights = _fill(table, job, start, rows, panels, at + 4 * PANEL * COLUMN_TILE + 4 * sums.size, 0, width)
    filled = view(weights, (panels, width // 2, PANEL, 2), np.uint16)
    multiply_tiles(filled, tokens, sums, buffer, _out(table, job), start, table[WEIGHT_ROWS])
    keep_alive(memory)


def _vector_product(bf16: bool | None) -> TaskKernel:
    kind, size = (np.float32, 4) if bf16 is None else (np.uint16, 2)

    def product(argument, number):
        table = view(argument, FIELDS, np.int64)
        inputs = view(table[INPUT], INPUTS, np.int64)
        job, start, rows = _job(table, number)
        width, panels = -(-table[WEIGHT_COLUMNS] // STEP) * STEP, -(-rows // PANEL)
        parts, count = max(1, table[ZERO]), -(-job[2] // BLOCK_TOKENS)
        run = FLOAT_COLUMNS * 4 // size if table[UNPACKER] else width
        token_tile = min(max(1, count), _FLOAT_TOKENS // BLOCK_TOKENS)
        memory, at = _memory(size * PANEL * panels * min(run, width), panels, token_tile * BLOCK_TOKENS)
        sums, out = _sums(at, panels, token_tile * BLOCK_TOKENS), _out(table, job)
        for block in range(0, count, token_tile):
            n = min(token_tile * BLOCK_TOKENS, job[2] - block * BLOCK_TOKENS)
            source = inputs[BLOCKS] + size * (job[1] + block * BLOCK_TOKENS) * parts * width
            tokens = view(source, (-(-n // BLOCK_TOKENS), parts, width // STEP, BLOCK_TOKENS, STEP), kind)
            for first in range(0, width, run):
                columns = min(run, width - first)
                weights = _fill(table, job, start, rows, panels, at + 4 * sums.size, first, columns)
                add_products(bf16, weights, size * PANEL * columns, panels, tokens, n, first // STEP, columns // STEP, sums)
            write_sums(sums, out, block * BLOCK_TOKENS, n, start, table[WEIGHT_ROWS])
        keep_alive(memory)

    return TaskKernel(product)


floats_product = _vector_product(None)  # panels of float32 times float32
dots_product = _vector_product(True)  # panels of bf16 times bf16 (ZERO: how many are added up), with dot products of AVX-512


def _bytes_product(half_groups: bool | None, pairs: tuple[bool, ...] | None) -> Callable[[int, int], None]:
    def product(argument, number):
        table = view(argument, FIELDS, np.int64)
        inputs = view(table[INPUT], INPUTS, np.int64)
        job, start, rows = _job(table, number)
        if job[2] == 0:
            return
        panels, columns, groups = -(-rows // (2 * PANEL)) * 2, table[WEIGHT_COLUMNS], table[WEIGHT_COLUMNS] // table[GROUP]
        n, first = -(-job[2] // TILE_TOKENS) * TILE_TOKENS, job[1]
        token_tile = _byte_tokens(n)
        as_words = pairs is not None and len(pairs) == 0
        more = word_bytes(token_tile) if as_words else 0
        memory, words = _byte_memory(table, panels, token_tile, more)
        at = words + more
        sums = _sums(at, panels, token_tile)
        codes, scales, terms = _unpack(table, job, start, rows, panels, at + 4 * sums.size)
        tokens = view(inputs[BLOCKS] + first * columns, (n, columns), np.int8)
        blocks = columns // BLOCK
        token_scales = view(inputs[TOKEN_SCALES] + 4 * first * blocks, (n, blocks), np.float32)
        offsets = view(inputs[OFFSETS] + 4 * first * groups, (n, groups), np.int32)
        totals = view(inputs[TOTALS] + 4 * first * groups, (n, groups), np.float32)
        out = _out(table, job)
        zero, inputs_of_tokens = table[ZERO], (tokens, token_scales, offsets, totals)
        if table[HAS_TERMS]:
            multiply_bytes(half_groups, pairs, codes, zero, scales, terms, *inputs_of_tokens, sums, words, out, start)
        else:
            multiply_bytes(half_groups, pairs, codes, zero, scales, None, *inputs_of_tokens, sums, words, out, start)
        keep_alive(memory)

    return product


@cache
def bytes_product(group: int, pairs: tuple[bool, ...] | None) -> TaskKernel:
    """Panels of bytes times bytes: group: columns that share a scale, 32 or 16; pairs: see byte_products.pair_sums."""
    return TaskKernel(_bytes_product(True if group == RUN else None, pairs))
