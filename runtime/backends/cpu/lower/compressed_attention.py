"""Attention to a window and to compressed entries, by flash attention over the rows that a query sees, and matrices of groups
of heads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ....graph.compressed_attention_ops import WindowAttention
from ....graph.ops import GroupedLinear
from ..attention import AttentionParams
from ..compiled_graph import CompiledGraph
from ..flash import Segment, attend
from ..kernels.attention.shared_values import KEYS
from ..memory import with_heads
from ..pass_cache import PassCache
from ..pass_program import PassProgram
from ..selected_rows import GatheredAttention, float_rows
from ..weights import WeightMatrix
from .products import gemv_inputs, gemv_task
from .step import Step, lowers


@lowers(WindowAttention)
class WindowAttentionStep(Step):
    def __init__(self, compiled: CompiledGraph, op: WindowAttention):
        super().__init__(compiled, op)
        sinks = compiled.vector(op.sinks)
        self.params = AttentionParams(op.scale, sinks=sinks)
        self.windowed = AttentionParams(op.scale, op.window, sinks=sinks)

    def emit(self, out: PassProgram) -> None:
        op, state, (heads, width) = self.op, out.run_inputs, self.op.q.shape
        queries, kv = with_heads(out.dense(op.q), heads, width).array, out.dense(op.kv).matrix
        if op.entries is not None:
            out.write_cache(op.layer, "entries", with_heads(out.view(op.entries), 1, width))
        selection = None if op.selection is None else out.dense(op.selection).matrix
        result = with_heads(out.new(op.out), heads, width).array
        by_window = op.entries is None and not out.gemv

        def attend_all() -> None:
            gathered = GatheredAttention(1, self.params, out.workers, out.gemv)
            for cache, at in state.batch:
                past, n = cache.length, at.stop - at.start
                first = max(0, past - op.window + 1)
                # Flash attention counts blocks from its first key: whole blocks are left out, as with all keys.
                first -= first % KEYS if by_window else 0
                recent = PassCache(self.compiled, cache).extend(op.layer, "window", kv[at], first)
                if by_window:
                    keys = float_rows([recent])
                    attend([Segment(queries[at], keys, keys, past - first, result[at])], 1, self.windowed, out.workers)
                    continue
                for row in range(n):
                    stop = past + row + 1
                    rows = [recent[max(0, stop - op.window) - first : stop - first]]
                    if op.entries is not None:
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
            gemv_task(out, matrix.gemv_plan, codes, by_group, jobs, n * groups)
            return
        source, target = x.array, with_heads(to, groups, matrix.rows).array

        def multiply() -> None:
            for group in range(groups):
                target[:, group] = matrix.multiply(np.ascontiguousarray(source[:, group]), group, use_gemv=out.gemv)

        out.call(multiply)
