"""Parts for programs of a team (see simd/team.py) that a GEMM consists of: one that fills blocks of activations, and one for
each form of activations that multiplies them with a slice of a matrix's rows.

Blocks hold TOKENS_PER_BLOCK rows (TILE_TOKENS for bytes). Row r of the blocks is row PLACES[r] of x, or zeros where that is -1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from ......simd.compile import kernel
from ......simd.memory import CACHE_LINE, fill, keep_alive, line_address, prefetch_lines, view
from ......simd.team import TaskKernel, call_part
from ..activations import RUN, quantise_run
from .amx_products import COLUMN_TILE, multiply_expanded, multiply_tiles
from .byte_products import multiply_bytes, word_bytes, write_sums
from .byte_tiles import BLOCK, CODE_BIAS, CODE_COLUMNS, TILE_TOKENS
from .byte_tiles import COLUMN_TILE as BYTE_COLUMNS
from .float_panels import (
    AHEAD,
    AMX_TOKENS,
    CODES,
    COLUMN_BYTES,
    COLUMNS,
    FIRST_COLUMN,
    LEAST_CODE,
    MEMORY,
    MOST_CODE,
    PACKED,
    PANELS,
    ROOM,
    ROW_BYTES,
    ROWS,
    SCALES,
    STEP,
    TERMS,
    UNPACK_FIELDS,
    ZERO_CODE,
    place_row,
)
from .unpack_panels import PANEL, UNPACK_BYTES
from .vector_products import BLOCK_TOKENS, add_products

FLOAT32, BF16, BYTES = range(3)  # forms of activations: float32, sums of one or two bf16, 8-bit codes

# Words of the table of activations: address of x, of the places (0: the first X_ROWS), sizes, addresses of the results.
(X, PLACES, X_ROWS, X_COLUMNS, BLOCK_ROWS, BLOCKS, TOKEN_SCALES, OFFSETS, TOTALS) = range(9)
FIRST_PARAMETER, SECOND_PARAMETER = 9, 10
BF16_PARTS, TOKENS_PER_BLOCK = FIRST_PARAMETER, SECOND_PARAMETER  # of floats: numbers that are added up, tokens of a block
INPUTS = 11

# Words of the table of a product: addresses, bytes and numbers as in `gemv`; slices of STEP rows each.
(WEIGHTS, MATRIX_BYTES, WEIGHT_ROW_BYTES, WEIGHT_ROWS, WEIGHT_COLUMNS) = range(5)
# What `unpack_panels.PanelForm` says of what the part UNPACKER writes, and the part that rounds it (see round_panels), or 0.
(UNPACKER, ZERO, GROUP, HAS_TERMS, INTERLEAVED, LEAST, MOST, ROUNDER) = range(5, 13)
(STEP_ROWS, SLICES, OUT, STRIDE, JOBS, INPUT) = range(13, 19)
FIELDS = 19
MATRIX, FIRST, N_ROWS, TARGET = range(4)  # of a job

SPAN = 1024  # columns of a block of activations that one part takes: a multiple of all blocks
_SUMS = (8, 512)  # pairs of panels and tokens whose sums are in memory at a time: half a megabyte
FLOAT_COLUMNS = 512  # of float32, or twice as many of bf16, that are unpacked at a time for products on vector registers
FLOAT_ROWS = 2 * PANEL * _SUMS[0]  # most rows of a slice of these
_FLOAT_TOKENS = 2064  # most tokens of these whose sums are in memory at a time: with 16 panels two megabytes
BYTE_ROWS = 512  # most rows of a slice of bytes, of which a pair of panels is unpacked at a time
_BYTE_SUMS = 1056  # most pairs of panels times tokens of bytes: their sums take an eighth of a megabyte of the L2 cache
_BYTE_PAIRS, _BYTE_TOKENS = 4, 528  # most pairs, and most tokens
_FEW_TOKENS = 96  # so few are multiplied too fast for packed rows to arrive meanwhile
_PIECE_BYTES = 4 * BYTE_COLUMNS  # of a row of activations


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
def _group_sum(run_sums, group, g):
    """The sum of the codes of a group of columns."""
    if group == RUN:
        return np.int32(run_sums[g])
    if group == 2 * RUN:
        return np.int32(run_sums[2 * g]) + np.int32(run_sums[2 * g + 1])
    total = np.int32(0)
    for r in range(g * (group // RUN), (g + 1) * (group // RUN)):
        total += np.int32(run_sums[r])
    return total


@kernel
def _quantise_block(table, block, first, stop):
    """The columns first to stop - 1 of a block of bytes, all of a tile of columns."""
    columns, group, zero, rows = table[X_COLUMNS], table[SECOND_PARAMETER], table[FIRST_PARAMETER], table[BLOCK_ROWS]
    size, block_columns = stop - first, max(BLOCK, group)
    run_sums = np.empty(size // RUN, np.int16)
    end = (block + 1) * TILE_TOKENS
    for row in range(block * TILE_TOKENS, end):
        row_of_x, place = _source_row(table, row), first * rows + row * BYTE_COLUMNS
        # Rows lie in the last cache, and no prefetcher of the processor knows which piece comes next.
        following, at = (row + 1, first) if row + 1 < end else (block * TILE_TOKENS, stop)
        row_to_come = _source_row(table, following)
        if row_to_come >= 0:
            prefetch_lines(table[X] + 4 * (row_to_come * columns + at), _PIECE_BYTES)
        codes = view(table[BLOCKS] + place, size, np.uint8)
        scales = view(table[TOKEN_SCALES] + 4 * place // block_columns, size // block_columns, np.float32)
        if row_of_x < 0:
            fill(codes, 0)
            fill(scales, 0)
            fill(run_sums, 0)
        else:
            x = view(table[X] + 4 * (row_of_x * columns + first), size, np.float32)
            quantise_run(x, block_columns, codes, scales, run_sums)
        offsets = view(table[OFFSETS] + 4 * place // group, size // group, np.int32)
        totals = view(table[TOTALS] + 4 * place // group, size // group, np.float32)
        for g in range(size // group):
            total = _group_sum(run_sums, group, g)
            offsets[g] = np.int32((CODE_BIAS - zero) * total)
            totals[g] = np.float32(total) * scales[g >> 1 if group < block_columns else g]


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
    span = number % spans * SPAN
    for first in range(span, min(span + SPAN, table[X_COLUMNS]), BYTE_COLUMNS):
        _quantise_block(table, number // spans, first, min(first + BYTE_COLUMNS, table[X_COLUMNS]))


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
    """The tokens that are multiplied by bytes at a time, of n: evenly divided, so that none is a small rest."""
    even = -(-n // -(-n // _BYTE_TOKENS))
    return -(-even // TILE_TOKENS) * TILE_TOKENS


@kernel
def _unpack(table, words, job, start, rows, panels, first, columns, room, ahead, at):
    """Unpacks so many columns from `first` on of a slice to panels with room for `room`, at an address behind working memory;
    returns the addresses of codes, scales and terms. words: int64 [UNPACK_FIELDS]."""
    code_bytes, scale_bytes = panels * PANEL * room, 4 * panels * PANEL * room // table[GROUP]
    words[FIRST_COLUMN], words[ROOM], words[MEMORY], words[AHEAD] = first, room, at, ahead
    codes = at + UNPACK_BYTES
    scales = codes + code_bytes
    words[PACKED] = table[WEIGHTS] + job[0] * table[MATRIX_BYTES] + start * table[WEIGHT_ROW_BYTES]
    words[ROW_BYTES], words[ROWS], words[COLUMNS], words[PANELS] = table[WEIGHT_ROW_BYTES], rows, columns, panels
    words[CODES], words[SCALES], words[TERMS] = codes, scales, scales + scale_bytes
    call_part(table[UNPACKER], words.ctypes.data, 0)
    if table[ROUNDER]:
        words[ZERO_CODE], words[LEAST_CODE], words[MOST_CODE] = table[ZERO], table[LEAST], table[MOST]
        call_part(table[ROUNDER], words.ctypes.data, 0)
    keep_alive(words)
    return codes, scales, scales + scale_bytes


@kernel
def _memory(size, panels, tokens):
    """Memory for so many bytes and the sums of so many panels and tokens, and the first line's address in it."""
    sums = 4 * min(_SUMS[0], (panels + 1) // 2) * tokens * 2 * PANEL
    memory = np.empty(CACHE_LINE + size + sums, np.uint8)
    return memory, line_address(memory)


@kernel
def _byte_memory(table, panels, columns, tokens, more):
    """As _memory, for unpacking panels of bytes with their scales and terms, and so many bytes more."""
    numbers = panels * PANEL * columns
    return _memory(UNPACK_BYTES + numbers + 8 * numbers // table[GROUP] + more, panels, tokens)


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
    memory, at = _byte_memory(table, panels, table[WEIGHT_COLUMNS], token_tile, 4 * PANEL * COLUMN_TILE)
    buffer, sums = view(at, 2 * PANEL * COLUMN_TILE, np.uint16), _sums(at + 4 * PANEL * COLUMN_TILE, panels, token_tile)
    at += 4 * PANEL * COLUMN_TILE + 4 * sums.size
    columns, row_bytes, words = table[WEIGHT_COLUMNS], table[WEIGHT_ROW_BYTES], np.empty(UNPACK_FIELDS, np.int64)
    places = _unpack(table, words, job, start, rows, panels, 0, columns, columns, PANEL * row_bytes, at)
    codes = view(places[0], (panels, columns // CODE_COLUMNS, PANEL, CODE_COLUMNS), np.uint8)
    scales = view(places[1], (panels, columns // table[GROUP], PANEL), np.float32)
    terms = view(places[2], (panels if table[HAS_TERMS] else 0, columns // table[GROUP], PANEL), np.float32)
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
            write_sums(sums, out, block * BLOCK_TOKENS, n, start, table[WEIGHT_ROWS], 0)
        keep_alive(memory)

    return TaskKernel(product)


floats_product = _vector_product(None)  # panels of float32 times float32
dots_product = _vector_product(True)  # panels of bf16 times bf16 (ZERO: how many are added up), with dot products of AVX-512


@kernel
def _following(table, packed, row, column, group, end, pieces):
    """Where the packed rows lie that a pair of panels is unpacked from next, for `multiply_bytes`: after those from
    `row` on come the other rows of group ... end - 1, then the next columns of these, then the columns of the rows after them.

    packed: address of row 0."""
    columns, group_bytes = table[WEIGHT_COLUMNS], table[INTERLEAVED] * table[WEIGHT_ROW_BYTES]
    row += 2 * PANEL
    if row >= end:
        row, column = group, column + BYTE_COLUMNS
    if column >= columns:
        row, column = end, 0
    source = packed + row * table[WEIGHT_ROW_BYTES] + group_bytes * column // columns
    return source, group_bytes, group_bytes * min(BYTE_COLUMNS, columns - column) // columns, pieces


def _bytes_product(
    runs: tuple[bool, ...], token_runs: tuple[bool, ...], pairs: tuple[bool, ...] | None, zero: int | None
) -> Callable[[int, int], None]:
    """A few panels of BYTE_COLUMNS columns are unpacked at a time, which stay in the first caches until they are multiplied
    with all tokens, while the packed rows of the next ones are on their way."""

    def product(argument, number):
        table = view(argument, FIELDS, np.int64)
        inputs = view(table[INPUT], INPUTS, np.int64)
        job, start, rows = _job(table, number)
        if job[2] == 0:
            return
        columns, together, has_terms = table[WEIGHT_COLUMNS], table[INTERLEAVED], table[HAS_TERMS]
        n, tokens, strip = job[2], _byte_tokens(job[2]), 2 * PANEL
        few = n <= _FEW_TOKENS
        most = 1 if few else min(_BYTE_PAIRS, max(1, _BYTE_SUMS // tokens), -(-rows // strip))
        as_words = pairs is not None and len(pairs) == 0
        more = word_bytes(tokens) if as_words else 0
        memory, words = _byte_memory(table, 2, BYTE_COLUMNS, tokens * most, more)
        at = words + more
        sums, unpacked = view(at, (most, tokens, strip), np.float32), np.empty(UNPACK_FIELDS, np.int64)
        at += 4 * sums.size
        activations, out = (inputs[BLOCKS], inputs[TOKEN_SCALES], inputs[OFFSETS], inputs[TOTALS]), _out(table, job)
        row_bytes, zero_code = table[WEIGHT_ROW_BYTES], table[ZERO] if zero is None else zero
        packed, ahead = table[WEIGHTS] + job[0] * table[MATRIX_BYTES] + start * row_bytes, row_bytes * BYTE_COLUMNS // columns
        for token in range(0, n, tokens):
            part = activations, inputs[BLOCK_ROWS], job[1] + token, token, min(tokens, n - token)
            for group in range(0, rows, strip * most):
                end = min(group + strip * most, rows)
                for column in range(0, columns, BYTE_COLUMNS):
                    width = min(BYTE_COLUMNS, columns - column)
                    for row in range(group, end, strip):
                        count = min(strip, rows - row)
                        codes, scales, terms = _unpack(
                            table, unpacked, job, start + row, count, 2, column, width, BYTE_COLUMNS, ahead if few else 0, at
                        )
                        asked = _following(table, packed, row, column, group, end, 0 if few else strip // together)
                        of_rows = sums[(row - group) // strip]
                        where = column, width, column + width == columns, row > group, of_rows, words, out, start + row, asked
                        if zero is None and has_terms:
                            multiply_bytes(runs, token_runs, pairs, codes, zero_code, scales, terms, *part, *where)
                        else:
                            multiply_bytes(runs, token_runs, pairs, codes, zero_code, scales, None, *part, *where)
        keep_alive(memory)

    return product


@cache
def bytes_product(group: int, span: int, pairs: tuple[bool, ...] | None, zero: int | None = None) -> TaskKernel:
    """Panels of bytes times bytes. group, span: columns that share a scale, and one of the activations; pairs: see
    byte_products.pair_sums; zero: the code that stands for 0 where there are no terms, as panels are rounded, else None."""
    return TaskKernel(_bytes_product((True,) * (group // RUN), (True,) * (span // RUN), pairs, zero))
