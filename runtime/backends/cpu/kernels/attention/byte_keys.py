"""Scores of keys in blocks of bytes (BYTES), by products of bytes: queries are rounded to bytes, too, with a scale for each
block of 32. Such keys are made of latents in blocks; of cached ones those of q8_0, with `fast` (see
`job_parts`). With VNNI an instruction makes twice as many products as with the 16-bit queries of `block_products`; without
it scores take a fifth longer than those, and are the same.

What is rounded depends on one query alone. Sums of a block are exact integers.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numba.core.cgutils import alloca_once

from ......simd.compile import intrinsic, kernel
from ......simd.instructions.dot_products import ByteDots, byte_dots_bias
from ......simd.lanes import LANES
from ......simd.llvm import F32, F32X16, I32, I32X16, I64, constant, fma, loop, to_float
from ......simd.llvm import load as load_at
from ......simd.llvm import splat as splat_at
from ......simd.llvm import store as store_at
from ......simd.memory import view
from ......simd.team import TaskKernel
from ..activations import RUN, quantise_run
from .block_panels import BLOCK, byte_key_columns, read_scales, rows_of_codes
from .cache_rows import BYTES
from .tiles import KEY_COLUMNS, PANEL, ROWS, VECTORS, ask_in_turn, first_row

_UNSIGNED = byte_dots_bias() - 128  # what the codes of panels, made unsigned, have too much, negated
# Operands: `rows` float32 queries of `width` numbers at `queries` are rounded to `rounded`, of 2 * width bytes each: codes,
# float32 scales of blocks, and int32 that sums of blocks begin with. Of these, the scores of `count` keys, rows of BYTES, go to
# `scores`. panels, scales, scratch: memory of KEYS * width, KEYS * width / 8 and 2 * LANES * width bytes; ahead, first, last:
# see `decode_rows` and `tiles.multiplication`; seen, members: see `tiles.first_row`. Addresses, and bytes from row to row.
BYTE_SCORES = np.dtype(
    [
        (name, np.int64)
        for name in (
            *("queries", "rounded", "rows", "width", "keys", "key_step", "count", "scores", "scores_step"),
            *("panels", "scales", "scratch", "ahead", "first", "last", "seen", "members"),
        )
    ]
)


def _tile(rows: int):
    """The operation (queries, step, words, scales, scores, scores_step, blocks, ahead, last): scores of `rows` rounded queries
    with a panel of keys. Addresses, and bytes from row to row."""

    @intrinsic
    def byte_tile(typingctx, queries, step, words, scales, scores, scores_step, blocks, ahead, last):
        def generate(context, builder, signature, args):
            b = builder
            queries, step, words, scales, scores, scores_step, blocks, ahead, last = args
            dots, tile = ByteDots(b), [(row, v) for row in range(rows) for v in range(VECTORS)]
            sums = {place: alloca_once(b, I32X16) for place in tile}
            query_rows = [b.add(queries, b.mul(step, I64(row))) for row in range(rows)]
            score_rows = [b.add(scores, b.mul(scores_step, I64(row))) for row in range(rows)]
            scales_at = b.mul(blocks, I64(BLOCK))
            first_at = b.add(scales_at, b.mul(blocks, I64(4)))
            for row, v in tile:
                store_at(b, constant(F32X16, 0.0), score_rows[row], 64 * v)

            def block(i):
                of_block = b.mul(i, I64(4))
                for row in range(rows):
                    first = splat_at(b, load_at(b, query_rows[row], I32, b.add(first_at, of_block)))
                    for v in range(VECTORS):
                        b.store(first, sums[row, v])

                def four(j):
                    at = b.add(b.mul(i, I64(BLOCK // 4)), j)
                    ask_in_turn(b, ahead, at, last)
                    word_row = b.add(words, b.mul(at, I64(4 * PANEL)))
                    columns = [dots.unsigned(load_at(b, word_row, I32X16, 64 * v)) for v in range(VECTORS)]
                    for row in range(rows):
                        numbers = dots.signed_word(load_at(b, query_rows[row], I32, b.mul(at, I64(4))))
                        for v in range(VECTORS):
                            b.store(dots.add(b.load(sums[row, v]), columns[v], numbers), sums[row, v])

                loop(b, I64(BLOCK // 4), four)
                scale_row = b.add(scales, b.mul(i, I64(4 * PANEL)))
                factors = [load_at(b, scale_row, F32X16, 64 * v) for v in range(VECTORS)]
                for row in range(rows):
                    scale = splat_at(b, load_at(b, query_rows[row], F32, b.add(scales_at, of_block)))
                    for v in range(VECTORS):
                        total = load_at(b, score_rows[row], F32X16, 64 * v)
                        factor, numbers = b.fmul(factors[v], scale), to_float(b, b.load(sums[row, v]))
                        store_at(b, fma(b, numbers, factor, total), score_rows[row], 64 * v)

            loop(b, blocks, block)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), generate

    return byte_tile


_six, _four, _two, _one = (_tile(rows) for rows in (ROWS, 4, 2, 1))


@kernel
def _multiply(queries, step, rows, words, scales, panels, blocks, scores, scores_step, ahead, last, keys):
    for panel in range(panels):
        k, d = words + 4 * panel * blocks * (BLOCK // 4) * PANEL, scales + 4 * panel * blocks * PANEL
        c, row = scores + 4 * PANEL * panel, first_row(keys, panel)
        while row < rows:
            q, to, left = queries + row * step, c + row * scores_step, rows - row
            if left >= ROWS:
                _six(q, step, k, d, to, scores_step, blocks, ahead, last)
                row += ROWS
            elif left >= 4:
                _four(q, step, k, d, to, scores_step, blocks, ahead, last)
                row += 4
            elif left >= 2:
                _two(q, step, k, d, to, scores_step, blocks, ahead, last)
                row += 2
            else:
                _one(q, step, k, d, to, scores_step, blocks, ahead, last)
                row += 1
            ahead += 64 * blocks * (BLOCK // 4)


def _round(task, number):
    width, blocks, run_sums = task.width, task.width // BLOCK, np.empty(task.width // RUN, np.int16)
    for r in range(task.rows):
        row = task.rounded + 2 * width * r
        x = view(task.queries + 4 * width * r, width, np.float32)
        quantise_run(x, BLOCK, view(row, width, np.uint8), view(row + width, blocks, np.float32), run_sums)
        first = view(row + width + 4 * blocks, blocks, np.int32)
        for i in range(blocks):
            first[i] = np.int32(_UNSIGNED) * (np.int32(run_sums[2 * i]) + np.int32(run_sums[2 * i + 1]))


def _score(task, number):
    width, blocks, panels = task.width, task.width // BLOCK, (task.count + PANEL - 1) // PANEL
    for key in range(0, task.count, LANES):
        at, rows = task.keys + key * task.key_step, min(LANES, task.count - key)
        codes, row_step, block_step = rows_of_codes(BYTES, at, task.key_step, rows, width, task.scratch, task.ahead)
        to = task.panels + 4 * (key // PANEL * (width // 4) * PANEL + key % PANEL)
        for block in range(blocks):
            byte_key_columns(codes + block * block_step, row_step, to + 4 * block * (BLOCK // 4) * PANEL, 4 * PANEL)
    read_scales(BYTES, task.keys, task.key_step, task.count, width, task.scales, task.scratch)
    _multiply(
        *(task.rounded, 2 * width, task.rows, task.panels, task.scales, panels, blocks),
        *(task.scores, task.scores_step, task.first, task.last, (task.seen, task.members, KEY_COLUMNS)),
    )


round_byte_queries, score_bytes = TaskKernel(_round, BYTE_SCORES), TaskKernel(_score, BYTE_SCORES)
