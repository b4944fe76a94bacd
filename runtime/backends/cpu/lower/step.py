"""What all lowerings have in common: a step is made when a graph is compiled, and written into every pass."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING

import numpy as np

from .....formats import PlanError
from ....graph.ops import Op, Value, Weight

if TYPE_CHECKING:
    from ..executable import Executable
    from ..passes import Pass


class Step:
    """One or several ops that are lowered together.

    options    fields of the op, beside its inputs, out and weights, that the step takes account of
    """

    options: frozenset[str] = frozenset()

    def __init__(self, executable: Executable, op: Op):
        self.executable = executable
        self.ops: tuple[Op, ...] = (op,)
        check_options(op, self.options)

    @property
    def reads(self) -> Iterable[Value]:
        return (value for op in self.ops for value in op.inputs)

    def emit(self, out: Pass) -> None:
        raise NotImplementedError

    def output(self, out: Pass, op: Op) -> np.ndarray:
        """What an op computes, float32 [n, *op.out.shape]."""
        array = out.view(op.out).array
        return array.reshape(out.n, *op.out.shape) if array.flags.c_contiguous else array

    def vector(self, weight: Weight | None) -> np.ndarray | None:
        """A norm's or bias's numbers, float32 of its shape in numpy's order."""
        return None if weight is None else self.executable.vector(weight)


def check_options(op: Op, known: frozenset[str]) -> None:
    """Raises PlanError for an option of an op that is set, and that the step for it does not know."""
    for field in fields(op):
        value = getattr(op, field.name)
        if field.name in known or field.name == "out" or isinstance(value, Value | Weight):
            continue
        if field.default is MISSING or value != field.default:
            raise PlanError(f"the cpu backend does not know the option {field.name} of {type(op).__name__}")


def refuse(op: Op, option: str) -> PlanError:
    """An error that names a value of an option that is not known."""
    return PlanError(f"the cpu backend does not know {option} {getattr(op, option)!r} of {type(op).__name__}")
