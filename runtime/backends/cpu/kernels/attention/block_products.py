"""Products with keys and values that are cached in blocks, as integers: codes are never made floating-point numbers.

Queries, and weights times the scales of values, are rounded to 16 bits; their products with codes are added up as 32-bit
integers, exactly, over a block of a key, or over all keys of a block of values. What is rounded depends on one query, and on
the keys that it sees, alone: a query has the same results whatever queries are beside it.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numba.core.cgutils import alloca_once

from ......simd.compile import intrinsic, kernel
from ......simd.instructions.dot_products import add_word_pairs
from ......simd.lanes import LANES, load, max_lanes, reduce_max, reduce_sum, splat
from ......simd.llvm import F32, F32X16, I16X32, I32, I32X16, I64, constant, fma, loop, to_float
from ......simd.llvm import load as load_at
from ......simd.llvm import splat as splat_at
from ......simd.llvm import store as store_at
from ......simd.memory import fill, view
from .block_panels import BLOCK, store_query, store_rounded
from .cache_rows import ROW_WORDS, WORDS
from .tiles import PANEL, ROWS, VECTORS, ask_in_turn, first_row, tile_depth

_LARGEST = 32766.0  # of a rounded number: one below what 16 bits hold
_LARGEST_OF_WORDS = 8191.0  # of weights whose products with WORDS are added up over KEYS
_LEAST = 1e-20  # weights below are as good as none
_PANEL_BLOCKS = (PANEL + BLOCK - 1) // BLOCK


# --- rounding ---------------------------------------------------------------------------------------------------------


@kernel
def round_queries(queries, rows, width, type_id, words_at, factors):
    """Writes float32 rows of queries as words of 16-bit numbers to an address; factors[r] times these are the row's numbers. Of
    a row with NaN or infinity the factor is NaN."""
    words = view(words_at, rows * width, np.uint16)
    for r in range(rows):
        largest, marks = splat(0), splat(0)
        for j in range(r * width, (r + 1) * width, LANES):
            numbers = load(queries, j)
            largest, marks = max_lanes(abs(numbers), largest), marks + numbers * 0
        highest = reduce_max(largest)
        inverse = np.float32(_LARGEST) / highest if highest > _LEAST else np.float32(0)
        for j in range(r * width, (r + 1) * width, LANES):
            if type_id == WORDS:
                store_rounded(words, j, load(queries, j) * inverse)
            else:
                store_query(words, j, load(queries, j) * inverse)
        factors[r] = highest / np.float32(_LARGEST) + reduce_sum(marks)


@kernel
def _round_weights(weights, rows, keys, count, scales, blocks, block, limit, words_at, factors):
    """Writes weights, rows of `keys` of which `count` are used, times the scales of the values' block as words of 16-bit
    numbers to an address, in rows of as many; factors[r] times these are the products."""
    words, step = view(words_at, rows * keys, np.uint16), blocks * PANEL
    for r in range(rows):
        largest = splat(0)
        for j in range(0, count, LANES):
            scale = load(scales, j // PANEL * step + block * PANEL + j % PANEL)  # negative ones too
            largest = max_lanes(abs(load(weights, r * keys + j) * scale), largest)
        highest = reduce_max(largest)
        inverse = limit / highest if highest > _LEAST else np.float32(0)
        for j in range(0, count, LANES):
            scale = load(scales, j // PANEL * step + block * PANEL + j % PANEL)
            store_rounded(words, r * keys + j, load(weights, r * keys + j) * scale * inverse)
        factors[r] = highest / limit


# --- products ---------------------------------------------------------------------------------------------------------


def _pair_in_all(builder, address, offset):
    """A word of two numbers in every lane."""
    return builder.bitcast(splat_at(builder, load_at(builder, address, I32, offset)), I16X32)


def _key_tile(rows: int):
    """The operation (queries, step, factors, words, scales, scores, scores_step, blocks, ahead, last): scores of `rows`
    queries with a panel of keys. Addresses, and bytes from row to row."""

    @intrinsic
    def key_tile(typingctx, queries, step, factors, words, scales, scores, scores_step, blocks, ahead, last):
        def generate(context, builder, signature, args):
            b = builder
            queries, step, factors, words, scales, scores, scores_step, blocks, ahead, last = args
            tile = [(row, v) for row in range(rows) for v in range(VECTORS)]
            sums = {place: alloca_once(b, I32X16) for place in tile}
            query_rows = [b.add(queries, b.mul(step, I64(row))) for row in range(rows)]
            score_rows = [b.add(scores, b.mul(scores_step, I64(row))) for row in range(rows)]
            for row, v in tile:
                store_at(b, constant(F32X16, 0.0), score_rows[row], 64 * v)

            def block(i):
                for place in tile:
                    b.store(constant(I32X16, 0), sums[place])

                def pair(j):
                    at = b.add(b.mul(i, I64(BLOCK // 2)), j)
                    ask_in_turn(b, ahead, at, last)
                    word_row = b.add(words, b.mul(at, I64(4 * PANEL)))
                    columns = [b.bitcast(load_at(b, word_row, I32X16, 64 * v), I16X32) for v in range(VECTORS)]
                    for row in range(rows):
                        numbers = _pair_in_all(b, query_rows[row], b.mul(at, I64(4)))
                        for v in range(VECTORS):
                            b.store(add_word_pairs(b, b.load(sums[row, v]), columns[v], numbers), sums[row, v])

                loop(b, I64(BLOCK // 2), pair)
                scale_row = b.add(scales, b.mul(i, I64(4 * PANEL)))
                factor = [load_at(b, scale_row, F32X16, 64 * v) for v in range(VECTORS)]
                for row, v in tile:
                    total = load_at(b, score_rows[row], F32X16, 64 * v)
                    store_at(b, fma(b, to_float(b, b.load(sums[row, v])), factor[v], total), score_rows[row], 64 * v)

            loop(b, blocks, block)
            for row in range(rows):
                factor = splat_at(b, load_at(b, factors, F32, 4 * row))
                for v in range(VECTORS):
                    store_at(b, b.fmul(load_at(b, score_rows[row], F32X16, 64 * v), factor), score_rows[row], 64 * v)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 10), generate

    return key_tile


def _value_tile(rows: int):
    """The operation (weights, step, block_step, factors, factor_step, words, out, out_step, pairs, overwrite, ahead, last): out
    = or += the products of `rows` rows of weights with a panel of values. Addresses, bytes from row to row, and from one block
    of the values to the next."""

    @intrinsic
    def value_tile(
        typingctx, weights, step, block_step, factors, factor_step, words, out, out_step, pairs, overwrite, ahead, last
    ):
        def generate(context, builder, signature, args):
            b = builder
            weights, step, block_step, factors, factor_step, words, out, out_step, pairs, overwrite, ahead, last = args
            tile = [(row, v) for row in range(rows) for v in range(VECTORS)]
            places = [(row, k) for row in range(rows) for k in range(_PANEL_BLOCKS)]
            sums = {place: alloca_once(b, I32X16) for place in tile}
            for place in tile:
                b.store(constant(I32X16, 0), sums[place])
            at = {(row, k): b.add(weights, b.add(b.mul(step, I64(row)), b.mul(block_step, I64(k)))) for row, k in places}

            def pair(i):
                ask_in_turn(b, ahead, i, last)
                word_row, offset = b.add(words, b.mul(i, I64(4 * PANEL))), b.mul(i, I64(4))
                columns = [b.bitcast(load_at(b, word_row, I32X16, 64 * v), I16X32) for v in range(VECTORS)]
                for row in range(rows):
                    numbers = [_pair_in_all(b, at[row, k], offset) for k in range(_PANEL_BLOCKS)]
                    for v in range(VECTORS):
                        total = add_word_pairs(b, b.load(sums[row, v]), columns[v], numbers[v * LANES // BLOCK])
                        b.store(total, sums[row, v])

            def write(is_first):
                for row, v in tile:
                    out_row = b.add(out, b.mul(out_step, I64(row)))
                    factor = b.add(factors, b.add(b.mul(factor_step, I64(v * LANES // BLOCK)), I64(4 * row)))
                    numbers, factor = to_float(b, b.load(sums[row, v])), splat_at(b, load_at(b, factor, F32))
                    total = constant(F32X16, 0.0) if is_first else load_at(b, out_row, F32X16, 64 * v)
                    store_at(b, fma(b, numbers, factor, total), out_row, 64 * v)

            loop(b, pairs, pair)
            with b.if_else(overwrite) as (then, otherwise):
                with then:
                    write(True)
                with otherwise:
                    write(False)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9, types.boolean, types.int64, types.int64), generate

    return value_tile


_six_keys, _four_keys, _two_keys, _one_key = (_key_tile(rows) for rows in (ROWS, 4, 2, 1))
_six_values, _four_values, _two_values, _one_value = (_value_tile(rows) for rows in (ROWS, 4, 2, 1))


@kernel
def multiply_keys(queries, step, factors, rows, words, scales, panels, blocks, scores, scores_step, ahead, last, keys):
    """Writes the scores of rows of queries (see `round_queries`) with panels of keys. Arguments are addresses, steps bytes from
    row to row; blocks: of a key; ahead, last, keys: see `tiles.multiplication`."""
    for panel in range(panels):
        k = words + 4 * panel * blocks * (BLOCK // 2) * PANEL
        d, c, row = scales + 4 * panel * blocks * PANEL, scores + 4 * PANEL * panel, first_row(keys, panel)
        while row < rows:
            q, f, to, left = queries + row * step, factors + 4 * row, c + row * scores_step, rows - row
            if left >= ROWS:
                _six_keys(q, step, f, k, d, to, scores_step, blocks, ahead, last)
                row += ROWS
            elif left >= 4:
                _four_keys(q, step, f, k, d, to, scores_step, blocks, ahead, last)
                row += 4
            elif left >= 2:
                _two_keys(q, step, f, k, d, to, scores_step, blocks, ahead, last)
                row += 2
            else:
                _one_key(q, step, f, k, d, to, scores_step, blocks, ahead, last)
                row += 1
            ahead += 64 * blocks * (BLOCK // 2)


@kernel
def add_values(
    type_id,
    weights,
    rows,
    keys,
    count,
    words,
    scales,
    mark,
    width,
    row_blocks,
    panels,
    scratch,
    out,
    out_step,
    overwrite,
    ahead,
    last,
    seen,
):
    """out = or += the products of weights, rows of `keys` of which `count` are used, with panels of values (see `value_words`).

    weights, scales: float32 rows; mark: what `read_scales` gave; width: of a value; row_blocks: of a row of the scales;
    scratch: address of 4 * rows * (keys + 2) bytes; words, out: addresses; out_step: bytes from row to row; ahead, last, and as
    `seen` the keys: see `tiles.multiplication`.
    """
    step, block_step, pairs, blocks = 2 * keys, 2 * keys * rows, (count + 1) // 2, width // BLOCK
    factors_at = scratch + _PANEL_BLOCKS * block_step
    limit, factor_step = np.float32(_LARGEST_OF_WORDS if type_id in (WORDS, ROW_WORDS) else _LARGEST), 4 * rows
    parts = _PANEL_BLOCKS
    if type_id == ROW_WORDS:  # weights are rounded once for all blocks
        block_step, factor_step, parts = 0 * step, 0 * step, 1
    for panel in range(panels):
        first = panel * PANEL // BLOCK
        if panel * PANEL % BLOCK == 0 and (type_id != ROW_WORDS or panel == 0):
            for k in range(parts):
                factors = view(factors_at + 4 * rows * k, rows, np.float32)
                if first + k < blocks:
                    words_at = scratch + k * block_step
                    _round_weights(weights, rows, keys, count, scales, row_blocks, first + k, limit, words_at, factors)
                    for r in range(rows):
                        factors[r] += mark
                else:
                    fill(view(scratch + k * block_step, rows * keys // 2, np.int32), 0)
                    fill(factors, 0)
        v, to, row = words + 4 * panel * pairs * PANEL, out + 4 * PANEL * panel, 0
        while row < rows:
            w, f, c, left = scratch + row * step, factors_at + 4 * row, to + row * out_step, rows - row
            steps = (tile_depth(seen, row, rows, count) + 1) // 2
            if left >= ROWS:
                _six_values(w, step, block_step, f, factor_step, v, c, out_step, steps, overwrite, ahead, last)
                row += ROWS
            elif left >= 4:
                _four_values(w, step, block_step, f, factor_step, v, c, out_step, steps, overwrite, ahead, last)
                row += 4
            elif left >= 2:
                _two_values(w, step, block_step, f, factor_step, v, c, out_step, steps, overwrite, ahead, last)
                row += 2
            else:
                _one_value(w, step, block_step, f, factor_step, v, c, out_step, steps, overwrite, ahead, last)
                row += 1
            ahead += 64 * pairs
