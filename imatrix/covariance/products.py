"""Kernels: a block of activations is rounded to 8-bit integers, and the products of its columns are added to a covariance.

A block is at most BLOCK tokens. Each of its columns has a scale, its largest magnitude divided by 127, so that x = scale * q up
to half a scale, with |q| <= 127. The sum of q_i q_j over a block is below 2**23: dot products of bytes give it exactly, in any
order, and float32 holds it exactly. It is multiplied by both scales and added to float32 totals, block after block.

Totals are the upper triangle, in tiles of 64 by 64 columns: row of tiles after row of tiles, each from the diagonal on.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.core.cgutils import alloca_once

from ...simd.compile import intrinsic, kernel
from ...simd.instructions.dot_products import ByteDots
from ...simd.llvm import F32, F32X16, I32, I32X16, I64, LANES, constant, load, loop, splat, store
from ...simd.memory import address, view
from ...simd.target import target

BLOCK = 512  # tokens: 512 * 127**2 is the largest sum, and 512 * 255 * 127 the largest on the way, both below 2**24
TILE = 64  # columns
LEVELS = 127
PANELS = TILE // LANES
_GROUP = 4  # tokens whose bytes are one word, which an instruction multiplies and adds up

# Vectors and rows whose sums are in registers at a time.
_VECTORS, _ROWS = (4, 4) if target().lane_registers == 32 else (1, 4)
_ROUND = 12582912.0  # 1.5 * 2**23: a small number that is added to it is rounded to an integer, in the low bits of the sum
_ROUND_BITS = 0x4B400000
_INFINITY_BITS = 0x7F800000
_SMALLEST = 1e-30  # columns below it count as zero: their squares would not be float32 numbers


def tile_count(columns: int) -> int:
    """Tiles of the upper triangle."""
    tiles = -(-columns // TILE)
    return tiles * (tiles + 1) // 2


def panel_shape(columns: int, rows: int) -> tuple[int, int, int]:
    """Shape of the words that `round_panels` writes: panels of 16 columns, groups of four tokens, columns."""
    return -(-columns // TILE) * PANELS, -(-rows // _GROUP), LANES


@intrinsic
def _largest_bits(typingctx, source, step, rows, out):
    """Writes the bits of the largest magnitude in each of 16 columns to `out`; those of NaN are above those of infinity.

    source: address of float32; step: bytes from one row to the next.
    """

    def generate(context, builder, signature, args):
        b = builder
        source, step, rows, out = args
        largest = alloca_once(b, I32X16)
        b.store(constant(I32X16, 0), largest)

        def row(r):
            bits = b.and_(load(b, source, I32X16, b.mul(r, step)), constant(I32X16, 0x7FFFFFFF))
            before = b.load(largest)
            b.store(b.select(b.icmp_unsigned(">", bits, before), bits, before), largest)

        loop(b, rows, row)
        store(b, b.load(largest), out)
        return context.get_dummy_value()

    i = types.int64
    return types.void(i, i, i, i), generate


@intrinsic
def _round_group(typingctx, rows, inverses, signed, unsigned, sums):
    """Rounds 16 columns of four rows, multiplied by `inverses`, to bytes: a word per column, signed and with 128 added. Adds
    the integers to `sums`. All are addresses; rows: four of them."""

    def generate(context, builder, signature, args):
        b = builder
        rows, inverses, signed, unsigned, sums = args
        factors, total = load(b, inverses, F32X16), load(b, sums, I32X16)
        word = constant(I32X16, 0)
        for i in range(_GROUP):
            product = b.fmul(load(b, b.extract_value(rows, i), F32X16), factors)
            bits = b.bitcast(b.fadd(product, ir.Constant(F32X16, [_ROUND] * LANES)), I32X16)
            total = b.add(total, b.sub(bits, constant(I32X16, _ROUND_BITS)))
            word = b.or_(word, b.shl(b.and_(bits, constant(I32X16, 255)), constant(I32X16, 8 * i)))
        store(b, word, signed)
        store(b, b.xor(word, constant(I32X16, -0x7F7F7F80)), unsigned)  # 0x80808080
        store(b, total, sums)
        return context.get_dummy_value()

    i = types.int64
    return types.void(types.UniTuple(i, _GROUP), i, i, i, i), generate


@kernel
def round_panels(source, step, rows, columns, first, stop, signed, unsigned, scales, sums):
    """Rounds the panels `first` to `stop` - 1 of a block. Returns whether all of their numbers were finite.

    source: address of float32 [rows, columns], whose rows are `step` bytes apart. Written are signed and unsigned, int32 words
    of `panel_shape`; scales float32 [panels, 16]; sums int32 [panels, 16]: of the integers of each column.
    """
    groups, panel_bytes = signed.shape[1], signed.shape[1] * 4 * LANES
    zeros, inverses, largest = np.zeros(LANES, np.float32), np.empty(LANES, np.float32), np.empty(LANES, np.uint32)
    copy = np.zeros((rows if columns % LANES else 0, LANES), np.float32)
    for panel in range(first, stop):
        at, step_here, width = source + 4 * LANES * panel, step, min(LANES, columns - LANES * panel)
        sums[panel] = 0
        if width <= 0:
            signed[panel], unsigned[panel], scales[panel] = 0, 0, 0
            continue
        if width < LANES:  # a vector would reach beyond the row
            for r in range(rows):
                copy[r, :width] = view(at + r * step, width, np.float32)
            at, step_here = address(copy), 4 * LANES
        _largest_bits(at, step_here, rows, address(largest))
        magnitudes = largest.view(np.float32)
        for i in range(LANES):
            if largest[i] >= _INFINITY_BITS:
                return False
            is_zero = magnitudes[i] < np.float32(_SMALLEST)
            scales[panel, i] = np.float32(0) if is_zero else magnitudes[i] / np.float32(LEVELS)
            inverses[i] = np.float32(0) if is_zero else np.float32(LEVELS) / magnitudes[i]
        to, to_unsigned = address(signed) + panel * panel_bytes, address(unsigned) + panel * panel_bytes
        for group in range(groups):
            r = _GROUP * group
            a = at + r * step_here
            b = a + step_here if r + 1 < rows else address(zeros)
            c = a + 2 * step_here if r + 2 < rows else address(zeros)
            d = a + 3 * step_here if r + 3 < rows else address(zeros)
            place = 4 * LANES * group
            _round_group((a, b, c, d), address(inverses), to + place, to_unsigned + place, address(sums[panel]))
    return True


@intrinsic
def _add_products(typingctx, unsigned, panel_bytes, signed, groups, sums, row_scales, factor, column_scales, totals):
    """Adds the products of _ROWS columns with _VECTORS panels of columns to `totals`, whose rows are TILE numbers apart.

    unsigned, column_scales: of the panels; signed, sums, row_scales: of the columns that are the rows of the result; factor:
    a float32 that they are multiplied by. All others are addresses or counts.
    """

    def generate(context, builder, signature, args):
        b, dots = builder, ByteDots(builder)
        unsigned, panel_bytes, signed, groups, sums, row_scales, factor, column_scales, totals = args
        places = [(r, v) for r in range(_ROWS) for v in range(_VECTORS)]
        exact = {place: alloca_once(b, I32X16) for place in places}
        for r in range(_ROWS):  # what 128, added to each number of the other factor, adds to the products
            start = b.mul(load(b, sums, I32, 4 * r), I32(dots.bias - 128))
            for v in range(_VECTORS):
                b.store(splat(b, start), exact[r, v])
        panels = [unsigned]
        for _ in range(_VECTORS - 1):
            panels.append(b.add(panels[-1], panel_bytes))

        def group(i):
            at = b.mul(i, I64(4 * LANES))
            vectors = [dots.unsigned(load(b, panel, I32X16, at)) for panel in panels]
            row_at = b.add(signed, at)
            for r in range(_ROWS):
                word = dots.signed_word(load(b, row_at, I32, 4 * r))
                for v in range(_VECTORS):
                    b.store(dots.add(b.load(exact[r, v]), vectors[v], word), exact[r, v])

        loop(b, groups, group)
        for r, v in places:
            scale = splat(b, b.fmul(load(b, row_scales, F32, 4 * r), factor))
            product = b.fmul(b.sitofp(b.load(exact[r, v]), F32X16), scale)
            product = b.fmul(product, load(b, column_scales, F32X16, 4 * LANES * v))
            at = 4 * (TILE * r + LANES * v)
            store(b, b.fadd(load(b, totals, F32X16, at), product), totals, at)
        return context.get_dummy_value()

    i = types.int64
    return types.void(i, i, i, i, i, i, types.float32, i, i), generate


@kernel
def add_tiles(signed, unsigned, scales, sums, factor, first, stop, totals):
    """Adds factor * x_i * x_j, summed over the tokens of a block, to the tiles `first` to `stop` - 1 of the totals.

    signed, unsigned, scales, sums: what `round_panels` wrote; totals: float32 [tiles, TILE, TILE].
    """
    groups, tiles = signed.shape[1], signed.shape[0] // PANELS
    panel_bytes = groups * 4 * LANES
    i, j = 0, first
    while j >= tiles - i:  # the tile's row, and its number within that
        j -= tiles - i
        i += 1
    for tile in range(first, stop):
        column = PANELS * (i + j)
        for panel in range(0, PANELS, _VECTORS):
            to, to_scales = address(unsigned) + (column + panel) * panel_bytes, address(scales[column + panel])
            for r in range(0, TILE, _ROWS):
                at, within = PANELS * i + r // LANES, r % LANES
                rows = address(signed) + at * panel_bytes + 4 * within
                out = address(totals[tile]) + 4 * (TILE * r + LANES * panel)
                _add_products(
                    to, panel_bytes, rows, groups, address(sums[at]) + 4 * within, address(scales[at]) + 4 * within,
                    factor, to_scales, out,
                )  # fmt: skip
        j += 1
        if j == tiles - i:
            i, j = i + 1, 0


@kernel
def tile_diagonal(totals, divisor, out):
    """The diagonal of totals / divisor: float32 [columns]."""
    columns, tile = len(out), 0
    tiles = -(-columns // TILE)
    for i in range(tiles):
        for r in range(min(TILE, columns - TILE * i)):
            out[TILE * i + r] = totals[tile, r, r] / divisor
        tile += tiles - i


@kernel
def tile_rows(totals, divisor, columns, first, stop, out):
    """The rows first ... stop - 1 of the upper triangle of totals / divisor, one after the other: float32, flat."""
    tiles, at = -(-columns // TILE), 0
    for row in range(first, stop):
        i, r = row // TILE, row % TILE
        tile = i * tiles - i * (i - 1) // 2
        for j in range(i, tiles):
            for c in range(r if i == j else 0, min(TILE, columns - TILE * j)):
                out[at] = totals[tile + j - i, r, c] / divisor
                at += 1
