"""What all lowerings have in common: a step is made when a graph is compiled, and written into every pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ....graph.ops import Op, Weight

if TYPE_CHECKING:
    from ..executable import Executable
    from ..passes import Pass


class Step:
    """One or several ops that are lowered together."""

    def __init__(self, executable: Executable, op: Op):
        self.executable = executable
        self.ops: tuple[Op, ...] = (op,)

    def emit(self, out: Pass) -> None:
        raise NotImplementedError

    def output(self, out: Pass, op: Op) -> np.ndarray | None:
        """Where an op's result lies, float32 [n, *op.out.shape]; None: nowhere, or the step tells the observer of it."""
        view = out.view(op.out)
        return view.reshaped(*op.out.shape).array if len(op.out.shape) == 2 else view.matrix

    def vector(self, weight: Weight | None) -> np.ndarray | None:
        """A norm's or bias's numbers, float32 of its shape in numpy's order."""
        return None if weight is None else self.executable.vector(weight)
