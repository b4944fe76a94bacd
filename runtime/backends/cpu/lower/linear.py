"""Linear: the product of all tokens with one matrix."""

from __future__ import annotations

from ....graph.ops import Linear
from ....graph.values import Value
from ..kernels.gemm import gemm
from ..memory import View
from ..passes import Pass, Step
from ..weights import WeightMatrix
from .products import gemm_inputs, gemm_task, gemv_inputs, gemv_task, input_partition


class LinearStep(Step):
    def __init__(self, executable, op: Linear):
        super().__init__(executable, op)
        self.op = op
        self.matrix = executable.matrix(op.weight)
        self.bias = self.vector(op.bias)

    def emit(self, out: Pass) -> None:
        out.observe_inputs(self.op.x)
        view = out.new(self.op.out)
        multiply(out, self.op.x, self.matrix, view)
        if self.matrix.factors is not None:
            partition = out.by_rows(view)
            out.scale_rows(view, self.matrix.factors, partition)
            out.values[self.op.out.index].partition = partition
        if self.bias is not None:
            partition = out.by_rows(view)
            out.add_bias(view, self.bias, partition)
            out.values[self.op.out.index].partition = partition


def multiply(out: Pass, x: Value, matrix: WeightMatrix, to: View) -> None:
    """to = x times the matrix."""
    stored = out.values[x.index]
    view = stored.view if stored.view.is_row else out.dense(x)

    def take(memory: View) -> View:
        return out.keep_with(x, memory)

    if out.gemv and matrix.gemv_plan is not None:
        plan = matrix.gemv_plan
        block = matrix.gemv_block
        if block not in stored.inputs:
            stored.inputs[block] = gemv_inputs(out, view, block, input_partition(out, stored), take)
        jobs = out.schedule.table([0, 0, out.n, 0])
        gemv_task(out, plan, stored.inputs[block], to, jobs, 1)
    elif matrix.gemm_plan is not None:
        form = matrix.gemm_plan.form
        if form not in stored.inputs:
            stored.inputs[form] = gemm_inputs(out, view if view.is_dense else out.copied(view), form, take)
        gemm_task(out, matrix.gemm_plan, stored.inputs[form], to, gemm.one_job(out.n))
    else:
        source, target = out.dense(x).matrix, to.matrix

        def product() -> None:
            if target.flags.c_contiguous:
                matrix.multiply(source, use_gemv=out.gemv, out=target)
            else:
                target[:] = matrix.multiply(source, use_gemv=out.gemv)

        out.call(product)
