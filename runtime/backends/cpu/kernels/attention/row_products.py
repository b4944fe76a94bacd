"""Products of a few queries with cached rows of a float type as they lie in the cache: numbers become float32 in registers.

Scores are sums over the numbers of a key, in LANES lanes that are added up last, so that nothing has to be transposed; weighted
values are sums over the keys, in the order of `tiles`. Neither depends on the number of queries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from numba import types
from numba.core.cgutils import alloca_once

from ......formats import TYPES
from ......simd.compile import intrinsic, kernel
from ......simd.llvm import F32X16, I64, LANES, constant, fma, lane_sums, load, loop, shuffle, store
from ......simd.target import target
from ..gemm.float_panels import load_floats
from .cache_rows import ask
from .tiles import VECTORS, multiplication

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


class RowProducts(NamedTuple):
    """Kernels for rows of one type.

    score  (queries, step, rows, keys, key_step, count, width, scores, scores_step, ahead, values, value_step): writes the
           scores of float32 queries with `count` keys of `width` numbers, a multiple of LANES; what lies behind them up to a
           multiple of LANES is written to, too. Addresses, and bytes from row to row. Meanwhile the keys `ahead` bytes on are
           asked for, and the keys' values, of value_step bytes, which may be 0.
    add    see `tiles.multiplication`
    """

    score: Callable[..., None]
    add: Callable[..., None]
    type_name: str


def _row_products(type_name: str) -> RowProducts:
    most, half, quarter, one = (_key_tile(type_name, max(1, _QUERIES // part)) for part in (1, 2, 4, 8))

    @kernel
    def score(queries, step, rows, keys, key_step, count, width, scores, scores_step, ahead, values, value_step):
        chunks, row = width // LANES, 0
        while row < rows:
            q, s, left, taken = queries + row * step, scores + row * scores_step, rows - row, 1
            while 2 * taken <= min(left, _QUERIES):
                taken *= 2
            for key in range(0, count, _SUMS // taken):
                k, to, of = keys + key * key_step, s + 4 * key, count - key
                if row == 0:
                    ask(k + ahead, key_step * (_SUMS // taken))
                    ask(values + key * value_step, value_step * (_SUMS // taken))
                if taken == _QUERIES:
                    most(q, step, k, key_step, of, chunks, to, scores_step)
                elif taken == _QUERIES // 2:
                    half(q, step, k, key_step, of, chunks, to, scores_step)
                elif taken == _QUERIES // 4:
                    quarter(q, step, k, key_step, of, chunks, to, scores_step)
                else:
                    one(q, step, k, key_step, of, chunks, to, scores_step)
            row += taken

    return RowProducts(score, multiplication(type_name), type_name)


ROW_PRODUCTS = {name: _row_products(name) for name in ("f32", "f16", "bf16")}
