"""`CovarianceCollector`: an observer of the graph's ops that sums the covariances of some of a model's inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ...quantize.covariance.matrix.triangles import DTYPES, FoldedCovariance
from ...runtime.graph import ExpertInputs, Observer, Op, Weight
from ...runtime.graph.ops import Linear
from ...simd.workers import ALONE, Workers
from .inputs import Input
from .sums import Sums


class InputObserver(Observer):
    """Wants what ops multiply some of a model's matrices with, and keeps nothing of it: for saying what a pass takes."""

    def __init__(self, inputs: Sequence[Input]):
        self.inputs = tuple(inputs)
        # Of linear ops: the input's name, and the first of the op's sums.
        self._places = {op: (one.name, i * one.matrices) for one in inputs for i, op in enumerate(one.ops)}

    def wants_input(self, op: Op) -> bool:
        """Whether a covariance of the op's input is collected."""
        return op.out.index in self._places


class CovarianceCollector(InputObserver):
    """Sums x x^T over the inputs x of some of a model's matrices.

    inputs  those that are summed
    weight  how many times the tokens of the next pass count
    sums    name of an input -> the sums of each of its matrices, for each of its ops: so tokens come in one order whatever the
            size of micro-batches is
    """

    def __init__(self, inputs: Sequence[Input], workers: Workers):
        super().__init__(inputs)
        self._workers, self.weight = workers, 1
        self.sums = {
            one.name: [Sums(one.name, one.columns, one.block) for _ in one.ops for _ in range(one.matrices)] for one in inputs
        }

    def on_input(self, op: Op, weight: Weight, matrix: int, x: np.ndarray) -> None:
        """Raises NotFiniteError for NaN and infinity, as the other methods do."""
        name, first = self._places[op.out.index] if isinstance(op, Linear) else (weight.name, 0)
        if name in self.sums:
            self.sums[name][first + matrix].add(x, self.weight, self._workers)

    def on_expert_inputs(self, op: Op, weight: Weight, inputs: ExpertInputs) -> None:
        sums = self.sums.get(weight.name)
        if sums is None:
            return

        def add(run: int) -> None:
            matrix, x = inputs.run(run)
            sums[matrix].add(x, self.weight, ALONE)

        self._workers.map(add, range(len(inputs.matrices)))

    def on_head_inputs(self, op: Op, weight: Weight, x: np.ndarray) -> None:
        sums = self.sums.get(weight.name)
        if sums is None:
            return
        if len(sums) == 1:  # one matrix for all heads; token after token, so that passes may be of any size
            sums[0].add(np.ascontiguousarray(x).reshape(-1, x.shape[2]), self.weight, self._workers)
        else:
            self._workers.map(lambda head: sums[head].add(x[:, head], self.weight, ALONE), range(len(sums)))

    def each_part(self, write: Callable[[str, int, FoldedCovariance], None], dtype: np.dtype = DTYPES["f32"]) -> None:
        """Calls write(name, matrix, covariance) for each part in order, and frees its sums. Raises MillError for sums that
        float32 cannot hold."""
        for one in self.inputs:
            for matrix in range(one.matrices):
                write(one.name, matrix, self.take(one.name, matrix, dtype))

    def take(self, name: str, matrix: int, dtype: np.dtype) -> FoldedCovariance:
        """The covariance of a part, whose sums are freed. Raises MillError for sums that float32 cannot hold."""
        every = next(one.matrices for one in self.inputs if one.name == name)
        first, *others = self.sums[name][matrix::every]
        for other in others:
            first.merge(other, self._workers)
        covariance = first.folded(dtype, self._workers)
        self.sums[name][matrix::every] = [Sums(name, 0) for _ in (first, *others)]
        return covariance
