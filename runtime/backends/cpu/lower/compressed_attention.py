"""Attention to a window and to compressed entries, what makes the entries, and matrices of groups of heads.

The last tokens are recurrent states: rings, in which position p has row p modulo their length. Attention and entries are
computed by functions between the tasks, attention by blocks of queries that the threads share.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np

from ....graph.compressed_attention_ops import AverageRun, Compress, WindowAttention
from ....graph.hyper_connection_ops import MatchStreams
from ....graph.ops import GroupedLinear, NgramEmbedding
from ..attention import softmax_numerator
from ..compiled_graph import CompiledGraph
from ..kernels.gemm import gemm
from ..kv_cache import KVCache
from ..memory import with_heads
from ..pass_program import PassProgram
from ..weights import WeightMatrix
from .products import gemv_inputs, gemv_task
from .step import Step, lowers

QUERY_BLOCK = 32  # whose entries, all that one of them selects, are read together


def _ring(compiled: CompiledGraph, cache: KVCache, layer: int, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The rows [length, width] of a state, as they are and as the pass writes them, which begin as copies."""
    part = compiled.layers[layer].states[name]
    assert cache.state is not None
    read, written = cache.state.arrays(compiled.state_offsets[layer, name], part.padded_shape)
    written[:] = read
    return read[:, : part.shape[1]], written[:, : part.shape[1]]


def _append(ring: np.ndarray, past: int, rows: np.ndarray) -> None:
    """Writes the rows of positions from `past` on, those that stay."""
    last = min(len(rows), len(ring))
    positions = np.arange(past + len(rows) - last, past + len(rows))
    ring[positions % len(ring)] = rows[len(rows) - last :]


def _before(ring: np.ndarray, first: int, past: int) -> np.ndarray:
    """The rows of positions first ... past - 1."""
    return ring[np.arange(first, past) % len(ring)]


@lowers(Compress)
class CompressStep(Step):
    def __init__(self, compiled: CompiledGraph, op: Compress):
        super().__init__(compiled, op)
        self.bias = compiled.vector(op.bias)

    def emit(self, out: PassProgram) -> None:
        op, state = self.op, out.run_inputs
        numbers, gates, to = out.dense(op.x).matrix, out.dense(op.gate).matrix, out.new(op.out).matrix

        def compress() -> None:
            to[:] = 0
            biased = gates + self.bias[state.positions % op.every]
            rows = np.concatenate([numbers, biased], axis=1)
            for cache, at in state.batch:
                read, written = _ring(self.compiled, cache, op.layer, op.state)
                past, total = cache.length, cache.length + at.stop - at.start
                _append(written, past, rows[at])
                run, end = past // op.every, total // op.every
                if run == end:
                    continue
                first = max(0, run - op.series + 1) * op.every
                needed = np.concatenate([_before(read, first, past), rows[at]])[: end * op.every - first]
                entries = self._entries(needed.reshape(-1, op.every, rows.shape[1]))[run - end :]
                to[at.start + (run + 1) * op.every - 1 - past : at.stop : op.every] = entries

        out.call(compress)

    def _entries(self, runs: np.ndarray) -> np.ndarray:
        """Numbers and gates [runs, every, 2 * series * width] -> the entry of each run, [runs, width]."""
        numbers, gates = np.split(runs, 2, axis=2)
        if self.op.series == 2:
            numbers, gates = (self._with_run_before(x, fill) for x, fill in ((numbers, 0.0), (gates, -np.inf)))
        weights = np.exp(gates - gates.max(axis=1, keepdims=True))
        return (numbers * weights).sum(axis=1) / weights.sum(axis=1)

    def _with_run_before(self, x: np.ndarray, fill: float) -> np.ndarray:
        """[runs, every, 2 * width] -> [runs, 2 * every, width]: the first halves of the run before, and the second ones."""
        own, following = x[..., x.shape[2] // 2 :], x[..., : x.shape[2] // 2]
        first = np.full_like(following[:1], fill)
        return np.concatenate([np.concatenate([first, following[:-1]]), own], axis=1)


@lowers(AverageRun)
class AverageRunStep(Step):
    def __init__(self, compiled: CompiledGraph, op: AverageRun):
        super().__init__(compiled, op)

    def emit(self, out: PassProgram) -> None:
        op, state = self.op, out.run_inputs
        x, to, every = out.dense(op.x).matrix, out.new(op.out).matrix, op.every

        def average() -> None:
            to[:] = 0
            for cache, at in state.batch:
                read, written = _ring(self.compiled, cache, op.layer, op.state)
                past, total = cache.length, cache.length + at.stop - at.start
                _append(written, past, x[at])
                run, end = past // every, total // every
                if run < end:
                    needed = np.concatenate([_before(read, run * every, past), x[at]])[: (end - run) * every]
                    means = needed.reshape(end - run, every, -1).mean(axis=1)
                    to[at.start + (run + 1) * every - 1 - past : at.stop : every] = means

        out.call(average)


@lowers(NgramEmbedding)
class NgramEmbeddingStep(Step):
    def __init__(self, compiled: CompiledGraph, op: NgramEmbedding):
        super().__init__(compiled, op)
        self.table = compiled.matrix(op.table)

    def emit(self, out: PassProgram) -> None:
        op, state, to = self.op, out.run_inputs, out.new(self.op.out).matrix
        n_past = op.ngrams.n_past

        def look_up() -> None:
            for cache, at in state.batch:
                read, written = _ring(self.compiled, cache, op.layer, "tokens")
                past, tokens = cache.length, state.tokens[at]
                _append(written, past, (tokens[:, None] + 1).astype(np.float32))
                rows = op.ngrams.rows(_before(read, past - n_past, past), tokens)
                to[at] = self.table.lookup(rows.reshape(-1)).reshape(len(tokens), -1)

        out.call(look_up)


@lowers(MatchStreams)
class MatchStreamsStep(Step):
    def __init__(self, compiled: CompiledGraph, op: MatchStreams):
        super().__init__(compiled, op)

    def emit(self, out: PassProgram) -> None:
        op = self.op
        x, y = (with_heads(out.dense(value), *value.shape).array for value in (op.x, op.y))
        to = out.new(op.out).matrix

        def match() -> None:
            products = np.einsum("nsw,nsw->ns", x, y) / np.float32(np.sqrt(x.shape[2]))
            to[:] = np.sign(products) * np.sqrt(np.maximum(np.abs(products), np.float32(1e-6)))

        out.call(match)


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
        block = 1 if out.gemv else QUERY_BLOCK
        step = -(-heads // out.threads) if out.gemv else heads

        def attend() -> None:
            for cache, at in state.batch:
                read, written = _ring(self.compiled, cache, op.layer, "window")
                past, n = cache.length, at.stop - at.start
                first = max(0, past - op.window + 1)
                keys = np.concatenate([_before(read, first, past), kv[at]])
                _append(written, past, kv[at])
                entries = keys[:0] if op.entries is None else cache.read(op.layer, "entries", n)[0]
                own = queries[at], result[at], None if selection is None else selection[at]

                def attend_block(place: tuple[int, int]) -> None:
                    self._attend(*own, place, block, step, past, first, keys, entries)  # noqa: B023

                places = product(range(0, n, block), range(0, heads, step))
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
        """The results of `block` queries and `step` heads from `place` on. keys: of positions from `first` on."""
        op, (start, head) = self.op, place
        stop, heads = min(start + block, len(q)), slice(head, head + step)
        positions = np.arange(past + start, past + stop)[:, None]
        low = max(first, past + start - op.window + 1)
        near = np.arange(low, past + stop)
        hidden = (near > positions) | (near <= positions - op.window)
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
        seen_keys = np.concatenate([keys[low - first : past + stop - first], entries[chosen]])[None]
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
