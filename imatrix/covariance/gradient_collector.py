"""`GradientCollector`: sums the second moments of gradients at the outputs of some of a model's matrices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ...runtime.graph.gradients import OutputGradient
from ...simd.workers import Workers
from .collector import CovarianceCollector
from .outputs import MatrixOutput


class _Run(NamedTuple):
    """What of a gradient goes into the sums of one part: of which tokens and matrices, which rows, and the part's number."""

    tokens: np.ndarray | slice
    matrix: np.ndarray | int
    rows: slice
    part: int


class GradientCollector(CovarianceCollector):
    """Sums g g^T over the gradients g at the outputs of matrices, block by block of their rows, as `CovarianceCollector` does
    over inputs: in the order in which they come, in blocks of tokens that do not depend on how many come at a time."""

    inputs: tuple[MatrixOutput, ...]

    def __init__(self, outputs: Sequence[MatrixOutput], workers: Workers):
        super().__init__(outputs, workers)
        self._outputs = {one.weight: one for one in outputs}

    @property
    def wanted(self) -> list[str]:
        """Names of the tensors whose gradients are summed."""
        return list(self._outputs)

    def on_gradient(self, gradient: OutputGradient) -> None:
        """Raises NotFiniteError for NaN and infinity."""
        one = self._outputs[gradient.weight.name]
        first = one.ops.index(gradient.op.out.index) * one.matrices
        sums, g = self.sums[one.name][first : first + one.matrices], gradient.g
        if gradient.matrices is None:  # heads are rows of one matrix, or matrices
            g = g.reshape(len(g), one.stack, one.blocks.rows)
        runs = list(_runs(one, gradient))
        alone = Workers(1) if len(runs) > 1 else self._workers

        def add(run: _Run) -> None:
            part = g[run.tokens, run.matrix, run.rows]
            if part.shape[1] < one.columns:
                part = np.pad(part, ((0, 0), (0, one.columns - part.shape[1])))
            sums[run.part].add(np.ascontiguousarray(part), self.weight, alone)

        self._workers.map(add, runs)


def _runs(one: MatrixOutput, gradient: OutputGradient) -> Iterator[_Run]:
    blocks = one.blocks
    if gradient.matrices is None:
        for matrix in range(one.stack):
            for block in range(blocks.count):
                yield _Run(slice(None), matrix, blocks.span(block), matrix * blocks.count + block)
        return
    order = np.argsort(gradient.matrices, axis=None, kind="stable")
    numbers = gradient.matrices.reshape(-1)[order]
    for matrix in np.unique(numbers[numbers >= 0]).tolist():
        start, stop = np.searchsorted(numbers, (matrix, matrix + 1))
        tokens, expert = np.divmod(order[start:stop], gradient.matrices.shape[1])
        for block in range(blocks.count):
            yield _Run(tokens, expert, blocks.span(block), matrix * blocks.count + block)
