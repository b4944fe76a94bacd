"""Attention to a window and to compressed entries, by blocks of queries that the threads share, and matrices of groups of
heads."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np

from ....graph.compressed_attention_ops import WindowAttention
from ....graph.ops import GroupedLinear
from ..attention import softmax_numerator
from ..compiled_graph import CompiledGraph
from ..kernels.gemm import gemm
from ..memory import with_heads
from ..pass_cache import PassCache
from ..pass_program import PassProgram
from ..weights import WeightMatrix
from .products import gemv_inputs, gemv_task
from .step import Step, lowers

# Queries that are computed together, counted from position 0: so the keys of a query lie in the same columns of a product, and
# its sums have the same order, whatever tokens a pass has.
QUERY_BLOCK = 32


@lowers(WindowAttention)
class WindowAttentionStep(Step):
    def __init__(self, compiled: CompiledGraph, op: WindowAttention):
        super().__init__(compiled, op)
        self.sinks = compiled.vector(op.sinks)

    def emit(self, out: PassProgram) -> None:
        op, state, (heads, width) = self.op, out.run_inputs, self.op.q.shape
        queries, kv = with_heads(out.dense(op.q), heads, width).array, out.dense(op.kv).matrix
        if op.entries is not None:
            out.write_cache(op.layer, "entries", with_heads(out.view(op.entries), 1, width))
        selection = None if op.selection is None else out.dense(op.selection).matrix
        result = with_heads(out.new(op.out), heads, width).array
        block = QUERY_BLOCK if op.selection is None and not out.gemv else 1  # each query selects other entries
        step = -(-heads // out.threads) if out.gemv else heads

        def attend() -> None:
            for cache, at in state.batch:
                past, n = cache.length, at.stop - at.start
                first = max(0, past - op.window + 1)
                keys = PassCache(self.compiled, cache).extend(op.layer, "window", kv[at], first)
                entries = keys[:0] if op.entries is None else cache.read(op.layer, "entries", n)[0]
                own = queries[at], result[at], None if selection is None else selection[at]

                def attend_block(place: tuple[int, int]) -> None:
                    self._attend(*own, place, block, step, past, first, keys, entries)  # noqa: B023

                places = product(range(past // block * block, past + n, block), range(0, heads, step))
                out.workers.map(attend_block, places, n * heads * width * (op.window + len(entries)))

        out.call(attend)

    def _attend(
        self,
        q: np.ndarray,
        out: np.ndarray,
        selection: np.ndarray | None,
        place: tuple[int, int],
        block: int,
        step: int,
        past: int,
        first: int,
        keys: np.ndarray,
        entries: np.ndarray,
    ) -> None:
        """The results of `step` heads and the queries of a block, from the head and the position on that `place` names; q and
        out: of positions from `past` on. keys: of positions from `first` on."""
        op, (position, head) = self.op, place
        start, stop, heads = max(position - past, 0), min(position + block - past, len(q)), slice(head, head + step)
        positions = np.arange(past + start, past + stop)[:, None]
        near = np.arange(max(0, position - op.window + 1), position + block)
        hidden = (near > positions) | (near <= positions - op.window)
        near_keys = np.zeros((len(near), keys.shape[1]), np.float32)
        known = (near >= first) & (near < past + stop)
        near_keys[known] = keys[near[known] - first]
        chosen = np.zeros(0, np.int64)
        if op.entries is not None:
            counts = (positions + 1) // op.every
            chosen = np.arange(int(counts[-1, 0]))
            unseen = chosen >= counts
            if selection is not None:
                rows = np.flatnonzero(selection[start:stop, 0] >= 0)
                unseen[rows] = True
                unseen[rows[:, None], selection[start:stop][rows].astype(np.int64)] = False
                seen = np.flatnonzero(~unseen.all(axis=0))
                chosen, unseen = chosen[seen], unseen[:, seen]
            hidden = np.concatenate([hidden, unseen], axis=1)
        seen_keys = np.concatenate([near_keys, entries[chosen]])[None]
        part = q[start:stop, heads]
        n, count, width = part.shape
        scores = gemm.matmul((part * np.float32(op.scale)).reshape(1, -1, width), seen_keys.transpose(0, 2, 1))
        scores.reshape(n, count, -1)[np.broadcast_to(hidden[:, None], (n, count, hidden.shape[1]))] = -np.inf
        total = softmax_numerator(scores, np.tile(self.sinks[heads], n).reshape(1, -1, 1))
        out[start:stop, heads] = (gemm.matmul(scores, seen_keys) / total).reshape(n, count, width)


@lowers(GroupedLinear)
class GroupedLinearStep(Step):
    def __init__(self, compiled: CompiledGraph, op: GroupedLinear):
        super().__init__(compiled, op)
        tensor, groups = compiled.store.tensor(op.weight.name, op.weight.shape), op.x.shape[0]
        shape = (op.weight.shape[0], op.weight.shape[1] // groups, groups)
        self.matrix = WeightMatrix(compiled.store, replace(tensor, shape=shape))

    def emit(self, out: PassProgram) -> None:
        op, matrix, (groups, columns) = self.op, self.matrix, self.op.x.shape
        x, to, n = with_heads(out.dense(op.x), groups, columns), out.new(op.out), out.n
        observer = out.observer
        if observer is not None and observer.wants_input(op):
            inputs = x.array
            out.call(lambda: observer.on_head_inputs(op, op.weight, inputs))
        if out.gemv and matrix.gemv_plan is not None:
            flat = replace(x, rows=n * groups, row_bytes=4 * columns, heads=1, head_bytes=0, axis="groups")
            codes = gemv_inputs(out, flat, matrix.gemv_block, out.by_rows(flat), out.take_temporary)
            jobs = out.schedule.numbers(
                word for group in range(groups) for t in range(n) for word in (group, t * groups + group, 1, t * groups + group)
            )
            by_group = replace(to, rows=n * groups, row_bytes=4 * matrix.rows, heads=1, head_bytes=0, width=matrix.rows)
            gemv_task(out, matrix.gemv_plan, codes, by_group, jobs, n * groups)
            return
        source, target = x.array, with_heads(to, groups, matrix.rows).array

        def multiply() -> None:
            for group in range(groups):
                target[:, group] = matrix.multiply(np.ascontiguousarray(source[:, group]), group, use_gemv=out.gemv)

        out.call(multiply)
