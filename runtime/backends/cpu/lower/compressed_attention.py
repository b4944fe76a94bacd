"""Attention to a window and to compressed entries, by flash attention over the rows that a query sees; how entries are made;
and matrices of groups of heads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ....graph import Value
from ....graph.compressed_attention_ops import AverageRun, Compress, WindowAttention
from ....graph.ops import GroupedLinear
from ..attention import AttentionParams
from ..compiled_graph import CompiledGraph
from ..flash import Segment, attend
from ..kernels import recurrent, runs
from ..kernels.attention.shared_values import KEYS
from ..memory import with_heads
from ..pass_cache import PassCache
from ..pass_program import PassProgram
from ..selected_rows import GatheredAttention, float_rows
from ..weights import WeightMatrix
from .products import gemv_inputs, gemv_task
from .recurrent import sequences
from .sparse_attention import attend_listed, can_list
from .step import Step, lowers


@lowers(Compress)
def compress(
    program: PassProgram, x: Value, gate: Value, bias: np.ndarray, layer: int, state: str, every: int, out: Value
) -> None:
    _compress(program, x, gate, bias, layer, state, every, out)


@lowers(AverageRun)
def average_run(program: PassProgram, x: Value, layer: int, state: str, every: int, out: Value) -> None:
    _compress(program, x, None, None, layer, state, every, out)


def _compress(
    program: PassProgram, x: Value, gate: Value | None, bias: np.ndarray | None, layer: int, state: str, every: int, out: Value
) -> None:
    width, (size, stride) = out.shape[0], program.compiled.layers[layer].states[state].padded_shape
    gates = None if gate is None else program.contiguous(gate)
    operands = {"x": program.contiguous(x), "gate": gates, "bias": bias, "out": program.new(out), "lengths": program.lengths}
    sizes = {"width": width, "series": x.shape[0] // width, "every": every, "size": size, "stride": stride}
    parts = len(program.counts) * -(-width // recurrent.CHANNELS)
    program.task(runs.compress, parts, **operands, **sizes, **sequences(program, layer, state))


@lowers(WindowAttention)
class WindowAttentionStep(Step):
    def __init__(self, compiled: CompiledGraph, op: WindowAttention):
        super().__init__(compiled, op)
        self.sinks = compiled.vector(op.sinks)
        self.params = AttentionParams(op.scale, sinks=self.sinks)
        self.windowed = AttentionParams(op.scale, op.window, sinks=self.sinks)

    def emit(self, out: PassProgram) -> None:
        op, width = self.op, self.op.q.shape[1]
        if op.entries is not None:
            out.write_cache(op.layer, "entries", with_heads(out.view(op.entries), 1, width))
        if op.entries is None and not out.gemv:
            self._attend_window(out)
        elif op.entries is None or can_list(out, op.layer, "entries"):
            q, kv, result = with_heads(out.dense(op.q), *op.q.shape), out.contiguous(op.kv), out.new(op.out)
            selection = None if op.selection is None else out.contiguous(op.selection)
            name = None if op.entries is None else "entries"
            attend_listed(out, op.layer, name, q, with_heads(result, *op.q.shape), self.params, selection, op.every, kv)
        else:
            self._attend_gathered(out)

    def _attend_window(self, out: PassProgram) -> None:
        """Of prompts in layers without entries: flash attention over the rows of all tokens."""
        op, state, (heads, width) = self.op, out.run_inputs, self.op.q.shape
        queries, kv = with_heads(out.dense(op.q), heads, width).array, out.dense(op.kv).matrix
        result = with_heads(out.new(op.out), heads, width).array

        def attend_all() -> None:
            for cache, at in state.batch:
                past = cache.length
                first = max(0, past - op.window + 1) // KEYS * KEYS  # it counts blocks from its first key
                keys = float_rows([PassCache(self.compiled, cache).extend(op.layer, "window", kv[at], first)])
                attend([Segment(queries[at], keys, keys, past - first, result[at])], 1, self.windowed, out.workers)

        out.call(attend_all)

    def _attend_gathered(self, out: PassProgram) -> None:
        """With entries that have to be decoded, or rotated, by functions of Python."""
        op, state, (heads, width) = self.op, out.run_inputs, self.op.q.shape
        queries, kv = with_heads(out.dense(op.q), heads, width).array, out.dense(op.kv).matrix
        selection = None if op.selection is None else out.dense(op.selection).matrix
        result = with_heads(out.new(op.out), heads, width).array

        def attend_all() -> None:
            gathered = GatheredAttention(1, self.params, out.workers, out.gemv)
            for cache, at in state.batch:
                past, n = cache.length, at.stop - at.start
                first = max(0, past - op.window + 1)
                recent = PassCache(self.compiled, cache).extend(op.layer, "window", kv[at], first)
                for row in range(n):
                    stop = past + row + 1
                    rows = [recent[max(0, stop - op.window) - first : stop - first]]
                    chosen: slice | np.ndarray = slice(stop // op.every)
                    if selection is not None and selection[at.start + row, 0] >= 0:
                        chosen = np.sort(selection[at.start + row].astype(np.int64))
                    rows.append(cache.read(op.layer, "entries", n, chosen)[0])
                    keys = float_rows(rows)
                    gathered.add(queries[at.start + row], keys, keys, result[at.start + row])
            gathered.run()

        out.call(attend_all)


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
            gemv_task(out, matrix.gemv_plan, codes, by_group, jobs, n * groups, several=False)
            return
        source, target = x.array, with_heads(to, groups, matrix.rows).array

        def multiply() -> None:
            for group in range(groups):
                target[:, group] = matrix.multiply(np.ascontiguousarray(source[:, group]), group, use_gemv=out.gemv)

        out.call(multiply)
