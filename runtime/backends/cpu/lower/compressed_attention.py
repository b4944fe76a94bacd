"""Attention to a window and to compressed entries, by flash attention over the rows that a query sees; how entries are made;
and matrices of groups of heads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .....formats import TYPES
from ....cache_layout import CachePart
from ....graph import Value
from ....graph.compressed_attention_ops import AverageRun, Compress, WindowAttention
from ....graph.ops import GroupedLinear
from ..attention import AttentionParams
from ..compiled_graph import CompiledGraph
from ..flash import Segment, attend
from ..kernels import recurrent, runs
from ..kernels.attention import flash, listed_rows
from ..kernels.attention.cache_rows import TYPE_IDS
from ..kernels.attention.shared_values import KEYS
from ..memory import with_heads
from ..pass_cache import PassCache
from ..pass_program import PassProgram
from ..selected_rows import GatheredAttention, float_rows
from ..weights import WeightMatrix
from .products import gemv_inputs, gemv_task
from .recurrent import sequences
from .step import Step, lowers

_TASKS, _LEAST_HEADS = 3, 8  # of attention, for each thread; that a task has, as far as there are so many


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
        part = None if op.entries is None else out.compiled.part(op.layer, "entries")
        if op.entries is not None:
            out.write_cache(op.layer, "entries", with_heads(out.view(op.entries), 1, width))
        if part is None and not out.gemv:
            self._attend_window(out)
        elif part is None or (TYPES[part.type].is_float and not part.rotation):
            self._attend_listed(out, part)
        else:
            self._attend_gathered(out)

    def _attend_listed(self, out: PassProgram, part: CachePart | None) -> None:
        """A task for some heads of each token, which finds the rows that the token sees."""
        op, (heads, width) = self.op, self.op.q.shape
        q, kv, result = out.dense(op.q), out.contiguous(op.kv), out.new(op.out)
        size, stride = out.compiled.layers[op.layer].states["window"].padded_shape
        of_state = sequences(out, op.layer, "window") | {"lengths": out.lengths}
        type_id, entries, selection, reads = TYPE_IDS["f32"], None, None, ()
        if part is not None:
            type_id, entries = TYPE_IDS[part.type], out.row_addresses[:, op.layer, out.names.index("entries")]
            selection, reads = op.selection, (out.cache_view(op.layer, "entries"),)
        score_part, value_part = flash.parts_of(TYPE_IDS["f32"], TYPE_IDS["f32"], out.gemv, heads, width)
        # Some tasks for each thread; each brings its rows together by itself.
        parts = -(-_TASKS * out.threads // out.n) if out.threads > 1 else 1
        members = max(-(-heads // parts), min(heads, _LEAST_HEADS))
        numbers = {"heads": heads, "members": members, "width": width, "window": size, "stride": stride, "every": op.every}
        numbers |= {"top": 0 if selection is None else selection.shape[0], "type_id": type_id, "is_split": out.gemv}
        numbers |= {"attend": flash.attend_floats.address, "gather": listed_rows.gather.address, "scale": op.scale}
        numbers |= {"score_part": score_part, "value_part": value_part}
        out.task(
            listed_rows.attend_listed,
            out.n * -(-heads // members),
            **{"q": q, "kv": kv, "out": result, "selection": None if selection is None else out.contiguous(selection)},
            **{"sinks": self.sinks, "entries": entries, "entry_step": out.row_addresses.strides[0]},
            **numbers,
            **of_state,
            reads=reads,
        )
        last = {"x": kv, "width": width, "size": size, "stride": stride}
        out.task(runs.keep_last, len(out.counts) * -(-size // runs.ROW_STEP), **last, **of_state)

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
            gemv_task(out, matrix.gemv_plan, codes, by_group, jobs, n * groups)
            return
        source, target = x.array, with_heads(to, groups, matrix.rows).array

        def multiply() -> None:
            for group in range(groups):
                target[:, group] = matrix.multiply(np.ascontiguousarray(source[:, group]), group, use_gemv=out.gemv)

        out.call(multiply)
