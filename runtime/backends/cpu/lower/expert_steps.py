"""The products of experts: rows of tokens sorted by expert, times the matrix of each."""

from __future__ import annotations

import numpy as np

from ....graph.ops import ExpertLinear
from ..kernels import experts as kernels
from ..kernels.gemm import gemm
from ..kernels.gemv.gemv import TOKENS
from ..memory import Partition, View
from ..pass_program import PassProgram
from .products import EXPERT_ROWS, gemm_inputs, gemm_task, gemv_inputs, gemv_task, input_partition, scale_and_add_bias
from .step import Step


class Arranged:
    """Choices of experts as rows, sorted by expert.

    places, matrices   int64 [rows], each row's token (-1: none) and expert
    jobs               int64 [2, n_jobs, 4] of the products (see kernels.experts.arrange_choices)
    spare              further places, of no token: a GEMM reads whole tiles of rows
    gather             whether rows of tokens are copied before a product
    numbers, factors   of each token's choices, int64 and float32 [tokens * used]: their rows, the first of which here is
                       `first`, and weights
    """

    def __init__(
        self,
        rows: int,
        places: View,
        matrices: View,
        jobs: View,
        n_jobs: int,
        gather: bool,
        numbers: View,
        factors: View,
        first: int = 0,
        spare: int = 0,
    ):
        self.spare = spare
        self.rows, self.places, self.matrices, self.jobs, self.n_jobs = rows, places, matrices, jobs, n_jobs
        self.gather, self.gathered = gather, dict[int, View]()
        self.numbers, self.factors, self.first = numbers, factors, first


def combine(
    out: PassProgram,
    results: View,
    factors: View,
    rows: View,
    result: View,
    row_range: tuple[int, int],
    fresh: bool,
) -> None:
    """Adds results, of the rows row_range[0] to row_range[1] - 1, times their factors to their tokens' rows of result. fresh:
    these are set to zero first."""
    partition = Partition(result.axis, result.rows, out.by_rows(result).row_step, result.size, result.size)
    operands = {"results": results, "factors": factors, "rows": rows, "out": result, "used": factors.width // result.rows}
    out.task(kernels.combine, partition, **operands, low=row_range[0], high=row_range[1], starts_at_zero=fresh)


class ScaleByRoutingStep(Step):
    """Rows of tokens, sorted by expert, times the weights of their experts."""

    of_tokens = True

    def emit_rows(self, out: PassProgram, arranged: Arranged) -> None:
        x, used = out.contiguous(self.op.x), self.op.out.shape[0]
        view = out.allocate(arranged.rows, 1, self.op.out.shape[-1], EXPERT_ROWS)
        out.put(self.op.out, view)
        choices = {"places": arranged.places, "rows": arranged.numbers, "factors": arranged.factors, "low": arranged.first}
        out.task(kernels.scale_by_routing, out.by_rows(view), x=x, out=view, used=used, **choices)


class ExpertLinearStep(Step):
    def __init__(self, compiled, op: ExpertLinear):
        super().__init__(compiled, op)
        self.matrix, self.bias = compiled.matrix(op.weight), compiled.optional_vector(op.bias)

    @property
    def of_tokens(self) -> bool:
        """Whether the op's input has one row per token, which all its experts multiply."""
        return len(self.op.x.shape) == 1

    def emit_gemv(self, out: PassProgram, arranged: Arranged) -> None:
        assert self.matrix.gemv_plan is not None
        stored, block = out.values[self.op.x.index], self.matrix.gemv_block
        x = stored.view if stored.view.is_row else out.copied(stored.view)
        gather = self.of_tokens and arranged.gather
        key = ("gathered", block) if gather else block
        if key not in stored.inputs:
            partition = input_partition(out, stored)
            if gather:
                x = self._gathered(out, x, arranged)
                partition = out.by_rows(x)

            def take(memory: View) -> View:
                return out.keep_with(self.op.x, memory)

            stored.inputs[key] = gemv_inputs(out, x, block, partition, take)
        view = out.allocate(arranged.rows, 1, self.op.out.shape[-1], EXPERT_ROWS)
        out.put(self.op.out, view)
        first = arranged.jobs.address + (0 if self.of_tokens else 32 * arranged.n_jobs)
        codes, jobs = stored.inputs[key], (arranged.jobs,)
        gemv_task(out, self.matrix.gemv_plan, codes, view, first, arranged.n_jobs, out.n > 1, jobs)
        scale_and_add_bias(out, view, out.by_cells(view), self.matrix.factors, self.bias, arranged.matrices)

    def emit_gemm(self, out: PassProgram, arranged: Arranged, jobs: np.ndarray | None = None) -> None:
        """jobs: int64 [jobs, 4], one per expert: its rows times its matrix; None: those that a task writes."""
        stored, plan = out.values[self.op.x.index], self.matrix.gemm_plan
        view = out.allocate(arranged.rows, 1, self.op.out.shape[-1], EXPERT_ROWS)
        out.put(self.op.out, view)
        if plan is None:
            assert jobs is not None
            x, target, places = out.dense(self.op.x).matrix, view.matrix, arranged.places.array[0, 0]
            out.call(lambda: self._multiply_decoded(out, x, target, places, jobs))
        else:
            gather = self.of_tokens and arranged.gather
            key = ("gathered", plan.form) if gather else plan.form
            if key not in stored.inputs:

                def take(memory: View) -> View:
                    return out.keep_with(self.op.x, memory)

                places, spare = arranged.places if gather else None, arranged.spare
                stored.inputs[key] = gemm_inputs(out, out.dense(self.op.x), plan.form, take, places, spare)
            if jobs is not None:
                out.schedule.keep(jobs)
                gemm_task(out, plan, stored.inputs[key], view, gemm.Jobs.of(jobs))
            else:
                first = arranged.jobs.address + (0 if self.of_tokens else 32 * arranged.n_jobs)
                jobs_of_tasks = gemm.Jobs(first, arranged.n_jobs, 1 / arranged.n_jobs)
                gemm_task(out, plan, stored.inputs[key], view, jobs_of_tasks, (arranged.jobs,))
        scale_and_add_bias(out, view, out.by_cells(view), self.matrix.factors, self.bias, arranged.matrices)

    def _multiply_decoded(
        self, out: PassProgram, x: np.ndarray, target: np.ndarray, places: np.ndarray, jobs: np.ndarray
    ) -> None:
        """The products of the experts' rows, expert by expert: for weights that have to be decoded."""

        def multiply(job: list[int]) -> None:
            matrix, first, count, to = job
            rows = places[first : first + count] if self.of_tokens else slice(first, first + count)
            target[to : to + count] = self.matrix.multiply(x[rows], matrix, use_gemv=False)

        out.workers.map(multiply, jobs.tolist(), int(jobs[:, TOKENS].sum()) * self.matrix.rows * self.matrix.columns)

    def _gathered(self, out: PassProgram, x: View, arranged: Arranged) -> View:
        if id(x.block) not in arranged.gathered:
            rows = out.temporary(arranged.rows, 1, x.size, EXPERT_ROWS)
            out.copy(x.reshaped(1, x.size), rows, index=arranged.places)
            arranged.gathered[id(x.block)] = rows
        return arranged.gathered[id(x.block)]
