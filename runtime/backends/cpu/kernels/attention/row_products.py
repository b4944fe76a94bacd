"""Products of a few queries with cached rows of a float type as they lie in the cache: numbers become float32 in registers.

Scores are sums over the numbers of a key, in LANES lanes that are added up last, so that nothing has to be transposed; weighted
values are sums over the keys, in the order of `tiles`. Neither depends on the number of queries.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import types
from numba.core.cgutils import alloca_once

from ......formats import TYPES
from ......simd.compile import intrinsic
from ......simd.llvm import F32X16, I64, LANES, constant, fma, lane_sums, load, loop, shuffle, store
from ......simd.target import target
from ......simd.team import TaskKernel
from ..gemm.float_panels import load_floats
from .cache_rows import TYPE_IDS, ask
from .tiles import ALL_KEYS, PANEL, VECTORS, multiplication

# Queries of the largest tile, and the vectors of sums of a tile, all in registers: tiles of fewer queries have more keys.
_QUERIES, _SUMS = (8, 16) if VECTORS > 1 else (4, 4)


def _key_tile(type_name: str, rows: int):
    """The operation (queries, step, keys, key_step, left, chunks, scores, scores_step): scores of `rows` float32 queries
    with the next _SUMS / rows keys. Of `left` keys the last stands in for those behind it. chunks: times LANES numbers
    of a key; other arguments are addresses, and bytes from row to row."""
    keys, size = _SUMS // rows, TYPES[type_name].row_bytes(LANES)

    @intrinsic
    def key_tile(typingctx, queries, step, keys_at, key_step, left, chunks, scores, scores_step):
        def generate(context, builder, signature, args):
            b = builder
            queries, step, keys_at, key_step, left, chunks, scores, scores_step = args
            end = b.sub(left, I64(1))
            numbers = [b.select(b.icmp_signed("<", I64(j), end), I64(j), end) for j in range(keys)]
            key_rows = [b.add(keys_at, b.mul(key_step, number)) for number in numbers]
            query_rows = [b.add(queries, b.mul(step, I64(row))) for row in range(rows)]
            sums = [alloca_once(b, F32X16) for _ in range(rows * keys)]
            for place in sums:
                b.store(constant(F32X16, 0.0), place)

            def chunk(i):
                from_, to = b.mul(i, I64(size)), b.mul(i, I64(4 * LANES))
                columns = [load_floats(b, target(), type_name, b.add(row, from_)) for row in key_rows]
                for row in range(rows):
                    query = load(b, query_rows[row], F32X16, to)
                    for column, place in zip(columns, sums[row * keys : (row + 1) * keys], strict=True):
                        b.store(fma(b, query, column, b.load(place)), place)

            loop(b, chunks, chunk)
            totals = lane_sums(b, [b.load(place) for place in sums])
            for row in range(rows):
                of_row = shuffle(b, totals, None, range(row * keys, (row + 1) * keys))
                store(b, of_row, scores, b.mul(scores_step, I64(row)))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), generate

    return key_tile


# Operands: scores of `rows` float32 queries with `count` keys of `width` numbers, a multiple of LANES, are written to `scores`;
# what lies behind them up to a multiple of LANES is written to, too. Meanwhile the keys `ahead` bytes on are asked for, and the
# keys' values, of value_step bytes, which may be 0. Addresses, and bytes from row to row. The last five are for keys that are
# unpacked (see bf16_products), to `panels`; first, last, seen, members: see `tiles.multiplication`.
SCORES = np.dtype(
    [
        (name, np.int64)
        for name in (
            *("queries", "step", "rows", "keys", "key_step", "count", "width", "scores", "scores_step"),
            *("ahead", "values", "value_step", "panels", "first", "last", "seen", "members"),
        )
    ]
)
# Operands: values of `count` keys, `panels` of PANEL numbers, weighted by float32 [rows, count], are written to `sums`. The
# others are for values that are unpacked, of `width` numbers, to `memory`, and added to the sums, unless `replaces` is 1.
VALUES = np.dtype(
    [
        (name, np.int64)
        for name in (
            *("weights", "step", "rows", "values", "value_step", "panels", "count", "sums", "sums_step"),
            *("width", "memory", "ahead", "first", "last", "seen", "members", "replaces"),
        )
    ]
)


class RowProducts(NamedTuple):
    """Parts of attention for rows of one type, with operands of SCORES and VALUES: called by their addresses, so that attention
    is not compiled for each type."""

    score: TaskKernel
    add: TaskKernel


def _row_products(type_name: str) -> RowProducts:
    most, half, quarter, one = (_key_tile(type_name, max(1, _QUERIES // part)) for part in (1, 2, 4, 8))
    multiply, panel_bytes = multiplication(type_name), TYPES[type_name].row_bytes(PANEL)

    def score(task, number):
        chunks, row = task.width // LANES, 0
        while row < task.rows:
            q, s, left, taken = task.queries + row * task.step, task.scores + row * task.scores_step, task.rows - row, 1
            while 2 * taken <= min(left, _QUERIES):
                taken *= 2
            for key in range(0, task.count, _SUMS // taken):
                k, to, of = task.keys + key * task.key_step, s + 4 * key, task.count - key
                if row == 0:
                    ask(k + task.ahead, task.key_step * (_SUMS // taken))
                    ask(task.values + key * task.value_step, task.value_step * (_SUMS // taken))
                if taken == _QUERIES:
                    most(q, task.step, k, task.key_step, of, chunks, to, task.scores_step)
                elif taken == _QUERIES // 2:
                    half(q, task.step, k, task.key_step, of, chunks, to, task.scores_step)
                elif taken == _QUERIES // 4:
                    quarter(q, task.step, k, task.key_step, of, chunks, to, task.scores_step)
                else:
                    one(q, task.step, k, task.key_step, of, chunks, to, task.scores_step)
            row += taken

    def add(task, number):
        values, every = task.values, np.bool_(True)
        multiply(
            *(task.weights, task.step, task.rows, values, task.value_step, panel_bytes, task.panels, task.count),
            *(task.sums, task.sums_step, every, values, values, ALL_KEYS),
        )

    score.__qualname__, add.__qualname__ = f"score_{type_name}", f"add_{type_name}"
    return RowProducts(TaskKernel(score, SCORES), TaskKernel(add, VALUES))


ROW_PRODUCTS = {TYPE_IDS[name]: _row_products(name) for name in ("f32", "f16", "bf16")}
