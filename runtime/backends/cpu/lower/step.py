"""What ops are lowered by: the table of steps, which `lowers` fills, and their base.

    @lowers(Scale)
    def scale(program, x, factor, out):
        ...

A function gets the pass that is written and the op's fields by name: weights as arrays (`np.ndarray`), everything else as it
is. A field that it does not take may only have its default value, or one that the function's annotation does not list
(`Literal`): such an op is computed by the reference backend's function, as is one without a step (see `steps_of`). A class gets
the graph and the op, and has to do all that the op can ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ....graph import Observer, Support, Weight
from ....graph.ops import Op
from ....graph.signatures import functions_of, support_of
from ..compiled_graph import CompiledGraph
from ..memory import with_heads
from ..pass_program import PassProgram

STEPS: dict[type[Op], Callable[[CompiledGraph, Any], Step]] = {}
FUNCTION_SUPPORT: dict[type[Op], Any] = {}  # see graph.check_support; of ops that functions lower


class Step:
    """One op, or several that are lowered as one: made when a graph is compiled, and emitted into every pass.

    last_read  indices of the values that no later step reads
    decoded    weights that prompts need all of a tensor decoded of
    made_bytes of rows that prompts make of weights, and keep
    """

    decoded: tuple[Weight, ...] = ()
    made_bytes = 0

    def __init__(self, compiled: CompiledGraph, op: Any):
        self.compiled, self.op = compiled, op
        self.ops: tuple[Op, ...] = (op,)
        self.last_read: tuple[int, ...] = ()

    def emit(self, out: PassProgram) -> None:
        """Adds the tasks of the ops to a pass."""
        raise NotImplementedError

    def inner_bytes(self, counts: Sequence[int], context: int, observer: Observer | None) -> int:
        """Bytes of memory, at the most, that it takes beside the blocks of a pass and its decoded weights while that runs,
        which an observer is given; counts, context: see `Executable.pass_bytes`."""
        return 0

    def output(self, out: PassProgram, op: Op) -> np.ndarray | None:
        """An op's result, float32 [n, *op.out.shape], for an observer; None: there is none, or the step reports it itself."""
        view = out.view(op.out)
        return with_heads(view, *op.out.shape).array if len(op.out.shape) == 2 else view.matrix


class FunctionStep(Step):
    """An op that a function lowers."""

    def __init__(self, compiled: CompiledGraph, op: Op, function: Callable[..., None], names: list[str]):
        super().__init__(compiled, op)
        self._function = function
        fields = {name: getattr(op, name) for name in names}
        self._fields = {name: compiled.vector(f) if isinstance(f, Weight) else f for name, f in fields.items()}

    def emit(self, out: PassProgram) -> None:
        self._function(out, **self._fields)


def lowers(*kinds: type[Op]) -> Callable:
    """Enters a class of steps, or a function, as what lowers ops of these kinds."""

    def enter(how: Any) -> Any:
        if isinstance(how, type):
            STEPS.update(dict.fromkeys(kinds, how))
            return how
        function: Callable[..., None] = how
        functions = functions_of(dict.fromkeys(kinds, function))
        for kind, (_, names) in functions.items():
            STEPS[kind] = lambda compiled, op, names=names: FunctionStep(compiled, op, function, names)
        FUNCTION_SUPPORT.update(support_of(functions))
        return how

    return enter


SUPPORT: Support = FUNCTION_SUPPORT
