"""A mixture of experts for many tokens: programs that are written when it is known which tokens chose which experts."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ....graph import ExpertInputs
from ..kernels.experts import arrange
from ..kernels.gemv.gemv import FIRST, MATRIX, TARGET, TOKENS
from ..memory import View, view_of
from ..pass_program import PassProgram
from .expert_steps import Arranged, ExpertLinearStep, ScaleByRoutingStep, combine
from .mixture import Mixture

CHUNK_BYTES = 64 << 20  # of intermediate results: experts are computed in chunks that take no more


class ExpertBatches:
    """The experts of one layer and pass.

    chosen, weights   each token's experts and their weights, int64 and float32 [tokens, used]
    result            rows that the experts' results are added to; fresh: which have to be set to zero first
    """

    def __init__(self, step: Mixture, out: PassProgram, chosen: View, weights: View, result: View, fresh: bool):
        self._step, self._pass, self._result, self._fresh = step, out, result, fresh
        self._shape, self._place = (out.n, step.route.used), (out.position, out.ops)
        self._chosen, self._weights = (view.array.reshape(self._shape) for view in (chosen, weights))
        readers = [inner for inner in step.inner if isinstance(inner, ExpertLinearStep | ScaleByRoutingStep)]
        self._inputs = {inner.op.x.index: (inner.op.x, out.dense(inner.op.x)) for inner in readers if inner.of_tokens}
        units = (m.gemm_plan.form.block_tokens for m in step.matrices if m.gemm_plan is not None)
        self._unit = math.lcm(1, *units)
        observer = out.observer
        self._outputs_observed = observer is not None and any(observer.wants_output(inner.ops[0]) for inner in step.inner)

    def run(self) -> None:
        experts = self._step.experts
        max_rows = self._chosen.size + experts * self._unit
        starts, counts, places, matrices = (np.zeros(size, np.int64) for size in (experts, experts, max_rows, max_rows))
        rows, factors = np.empty(self._shape, np.int64), np.empty(self._shape, np.float32)
        choices = self._chosen, self._weights, experts, self._unit
        arrange(*choices, starts, counts, places, matrices, rows, factors)
        self._starts, self._counts, self._places, self._matrices = starts, counts, places, matrices
        self._rows, self._factors, self._zero = view_of(rows), view_of(factors), self._fresh
        for chunk in self._chunks(np.flatnonzero(counts)):
            self._run_gemm(chunk)
        if self._zero:
            self._result.matrix[:] = 0

    def _chunks(self, experts: np.ndarray) -> Iterator[np.ndarray]:
        """Cuts a list of experts into runs whose results fit into CHUNK_BYTES (one expert at least)."""
        max_rows = CHUNK_BYTES // (4 * self._step.columns) if not self._outputs_observed else 1 << 60
        while len(experts):
            ends = self._starts[experts] + self._counts[experts] - self._starts[experts[0]]
            stop = max(1, int(np.searchsorted(ends, max_rows, "right")))
            yield experts[:stop]
            experts = experts[stop:]

    def _jobs(self, experts: np.ndarray, low: int) -> np.ndarray:
        """int64 [experts, 4]: jobs of the rows of these experts, counted from row `low` on."""
        jobs = np.empty((len(experts), 4), np.int64)
        jobs[:, MATRIX], jobs[:, TOKENS] = experts, self._counts[experts]
        jobs[:, FIRST] = jobs[:, TARGET] = self._starts[experts] - low
        return jobs

    def _begin(self, rows: int) -> PassProgram:
        """A pass over rows that are sorted by expert."""
        out = self._pass.inner(rows, *self._place)
        for value, view in self._inputs.values():
            out.borrow(value, view.reshaped(1, view.size))
        return out

    def _end(self, out: PassProgram, low: int, high: int) -> None:
        step = self._step
        results = out.view(step.combine.x)
        combine(out, results, step.combine_factors(out, self._factors), self._rows, self._result, (low, high), self._zero)
        self._zero = False
        out.finish()
        out.run(np.empty(0, np.int64), [])
        for index in list(out.values):
            out.drop(index)
        out.release_temporary()
        out.forget()

    def _run_gemm(self, experts: np.ndarray) -> None:
        low = int(self._starts[experts[0]])
        rows = int(self._starts[experts[-1]] + self._counts[experts[-1]]) - low
        high = low + -(-rows // self._unit) * self._unit
        out, jobs = self._begin(high - low), self._jobs(experts, low)
        arranged = self._arranged(low, high, jobs)
        starts, counts = self._starts[experts], self._counts[experts]
        for inner in self._step.inner:
            if isinstance(inner, ExpertLinearStep):
                self._observe_input(out, inner, experts, low, starts, counts)
                inner.emit_gemm(out, arranged, jobs)
            elif isinstance(inner, ScaleByRoutingStep):
                inner.emit_rows(out, arranged)
            else:
                inner.emit(out)
            self._observe_output(out, inner)
        self._end(out, low, high)

    def _arranged(self, low: int, high: int, jobs: np.ndarray) -> Arranged:
        places, matrices = (view_of(array[low:high]) for array in (self._places, self._matrices))
        numbers, factors = self._rows, self._factors
        return Arranged(high - low, places, matrices, view_of(jobs), jobs.shape[-2], True, numbers, factors, low)

    def _observe_input(
        self, out: PassProgram, inner, experts: np.ndarray, low: int, starts: np.ndarray, counts: np.ndarray
    ) -> None:
        observer, op = self._pass.observer, inner.op
        if observer is None or not observer.wants_input(op):
            return
        if inner.of_tokens:
            x = self._inputs[op.x.index][1].matrix
            observer.on_expert_inputs(op, op.weight, ExpertInputs(x, experts, starts, counts, self._places))
        else:
            view = out.view(op.x)  # of memory that others use later: an array of it would keep it

            def report() -> None:
                observer.on_expert_inputs(op, op.weight, ExpertInputs(view.matrix, experts, starts - low, counts))

            out.call(report)

    def _observe_output(self, out: PassProgram, inner) -> None:
        """Reports an output, its rows in the order of tokens and their choices, to an observer that wants it."""
        observer, op = self._pass.observer, inner.op
        if observer is None or not observer.wants_output(op):
            return
        values = out.view(op.out).matrix
        sorted_choices = np.argsort(self._chosen, axis=1, kind="stable")
        dropped = (self._chosen < 0).sum(axis=1)

        def report() -> None:
            result = np.zeros((*self._shape, values.shape[1]), np.float32)
            rows = self._rows.array.reshape(self._shape)
            for t in range(self._shape[0]):
                count = self._shape[1] - dropped[t]
                result[t, sorted_choices[t, dropped[t] :]] = values[rows[t, :count]]
            observer.on_output(op, result.reshape(self._shape[0], *op.out.shape))

        out.call(report)
