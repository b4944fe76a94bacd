"""Ops that the reference backend's functions compute: those without a step, and one for which numpy is fast enough."""

from __future__ import annotations

from typing import Any

from ....graph import Observer, Value, Weight
from ....graph.ops import NgramEmbedding, Op, Split
from ...reference.fallback import note_fallback
from ...reference.functions import FUNCTIONS
from ...reference.reference_pass import ReferencePass
from ..compiled_graph import CompiledGraph
from ..memory import with_heads
from ..pass_cache import PassCache
from ..pass_program import PassProgram
from .step import Step

FAST_ENOUGH = (NgramEmbedding,)


class ReferenceStep(Step):
    def __init__(self, compiled: CompiledGraph, op: Op):
        super().__init__(compiled, op)
        if not isinstance(op, FAST_ENOUGH):
            note_fallback("cpu", type(op).__name__)
        self._function, names = FUNCTIONS[type(op)]
        self._fields = {name: self._field(name, getattr(op, name)) for name in names}

    def _field(self, name: str, field: Any) -> Any:
        """Of a table rows are looked up; other weights are decoded."""
        if not isinstance(field, Weight):
            return field
        return self.compiled.matrix(field) if name == "table" else self.compiled.vector(field)

    def emit(self, out: PassProgram) -> None:
        arguments: dict[str, Any] = dict(self._fields)
        for name, value in self._fields.items():
            if isinstance(value, Value) and name != "out":
                view = out.dense(value)
                arguments[name] = with_heads(view, *value.shape).array if len(value.shape) == 2 else view.matrix
        views = [out.new(value) for value in self.op.outputs]
        targets = [view.block.array[: 4 * view.rows * view.size].view("f4") for view in views]
        run, observer = out.run_inputs, out.observer or Observer()

        def compute() -> None:
            segments = [(PassCache(self.compiled, cache), at) for cache, at in run.batch]
            result = self._function(
                ReferencePass(run.tokens, run.positions, segments, observer, self.op, run.inputs), **arguments
            )
            for target, array in zip(targets, result if isinstance(self.op, Split) else [result], strict=True):
                target[:] = array.reshape(-1)

        out.call(compute)
