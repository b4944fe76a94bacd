"""The one interface through which a running graph is observed: importance matrices, comparisons, the search for NaN.

An observer names the ops whose inputs or outputs it wants when a pass begins; a backend then cuts its program at these ops and
calls it. Arrays may be overwritten after a call returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .ops import Op
from .values import Weight


class ExpertInputs(NamedTuple):
    """Activations of several matrices of a stack: matrices[i] multiplies counts[i] rows of x, float32 [any, columns], or of
    x[rows] if `rows` is given, from starts[i] on."""

    x: np.ndarray
    matrices: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    rows: np.ndarray | None = None

    @classmethod
    def of(cls, x: np.ndarray, experts: np.ndarray) -> ExpertInputs:
        """x: of each token [n, columns], or of each of its experts [n, used, columns]; experts: int [n, used], -1 for none."""
        rows = np.repeat(np.arange(len(x)), experts.shape[1]) if x.ndim == 2 else np.arange(experts.size)
        order = np.argsort(experts, axis=None, kind="stable")[np.count_nonzero(experts < 0) :]
        present, starts, counts = np.unique(experts.reshape(-1)[order], return_index=True, return_counts=True)
        return cls(x.reshape(-1, x.shape[-1]), present, starts, counts, rows[order])

    def run(self, i: int) -> tuple[int, np.ndarray]:
        """matrices[i], and the rows that it multiplies."""
        part = slice(self.starts[i], self.starts[i] + self.counts[i])
        return int(self.matrices[i]), self.x[part if self.rows is None else self.rows[part]]


class Observer:
    """Base of all observers: wants nothing. Override `wants_input` or `wants_output`, and what they lead to.

    Each method is called once per pass, op and weight, with the rows of all tokens (`on_input` of a stack: once per matrix;
    `on_head_squares`, and what stands for it where a sequence has none, once per sequence).

    wants_squares  sums of squares are enough of the inputs of a weight with a matrix per head: a backend that has these without
                   the inputs themselves calls `on_head_squares` instead of `on_head_inputs`
    """

    wants_squares: bool = False

    def wants_input(self, op: Op) -> bool:
        """Whether `on_input` (or one of its special forms) is to be called with what this op multiplies its weights with."""
        return False

    def wants_output(self, op: Op) -> bool:
        """Whether `on_output` is to be called with what this op computes."""
        return False

    def on_input(self, op: Op, weight: Weight, matrix: int, x: np.ndarray) -> None:
        """Activations float32 [n, columns] that one matrix of a weight is multiplied with. One thread at a time."""

    def on_expert_inputs(self, op: Op, weight: Weight, inputs: ExpertInputs) -> None:
        """Activations of several matrices of a stack. Calls `on_input` for each, unless overridden."""
        for i in range(len(inputs.matrices)):
            self.on_input(op, weight, *inputs.run(i))

    def on_head_inputs(self, op: Op, weight: Weight, x: np.ndarray) -> None:
        """Activations float32 [n, heads, columns] of a weight with a matrix per head (attn_k_b, attn_v_b of latent attention).

        A weight of one matrix for all heads (its shape has two axes) gets the rows of all heads. Calls `on_input`, unless
        overridden.
        """
        if len(weight.shape) == 2:
            self.on_input(op, weight, 0, np.ascontiguousarray(x.transpose(1, 0, 2)).reshape(-1, x.shape[2]))
            return
        for head in range(x.shape[1]):
            self.on_input(op, weight, head, np.ascontiguousarray(x[:, head]))

    def on_head_squares(self, op: Op, weight: Weight, squares: np.ndarray, n: int) -> None:
        """Sums over the n tokens of a sequence of the squares of what `on_head_inputs` would get: float64 [heads, columns]."""

    def on_output(self, op: Op, out: np.ndarray) -> None:
        """What an op computed: float32 [n, *op.out.shape]."""


class ObserverGroup(Observer):
    """Several observers as one."""

    def __init__(self, observers: Sequence[Observer]):
        self.observers = tuple(observers)
        self.wants_squares = all(each.wants_squares for each in self.observers)

    def wants_input(self, op: Op) -> bool:
        return any(each.wants_input(op) for each in self.observers)

    def wants_output(self, op: Op) -> bool:
        return any(each.wants_output(op) for each in self.observers)

    def on_input(self, op: Op, weight: Weight, matrix: int, x: np.ndarray) -> None:
        for each in self.observers:
            if each.wants_input(op):
                each.on_input(op, weight, matrix, x)

    def on_expert_inputs(self, op: Op, weight: Weight, inputs: ExpertInputs) -> None:
        for each in self.observers:
            if each.wants_input(op):
                each.on_expert_inputs(op, weight, inputs)

    def on_head_inputs(self, op: Op, weight: Weight, x: np.ndarray) -> None:
        for each in self.observers:
            if each.wants_input(op):
                each.on_head_inputs(op, weight, x)

    def on_head_squares(self, op: Op, weight: Weight, squares: np.ndarray, n: int) -> None:
        for each in self.observers:
            if each.wants_input(op):
                each.on_head_squares(op, weight, squares, n)

    def on_output(self, op: Op, out: np.ndarray) -> None:
        for each in self.observers:
            if each.wants_output(op):
                each.on_output(op, out)
