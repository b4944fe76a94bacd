"""Linear: the product of all tokens with one matrix."""

from __future__ import annotations

from ....graph.ops import Linear
from ....graph.values import Value
from ..kernels.gemm import gemm
from ..memory import View
from ..pass_program import PassProgram
from ..weights import WeightMatrix
from .products import gemm_task, gemv_inputs, gemv_task, input_partition, panels_of, scale_and_add_bias
from .step import Step, lowers


@lowers(Linear)
class LinearStep(Step):
    def __init__(self, compiled, op: Linear):
        super().__init__(compiled, op)
        self.matrix, self.bias = compiled.matrix(op.weight), compiled.optional_vector(op.bias)

    def emit(self, out: PassProgram) -> None:
        out.observe_inputs(self.op.x)
        view = out.new(self.op.out)
        multiply_matrix(out, self.op.x, self.matrix, view)
        if scale_and_add_bias(out, view, out.by_rows(view), self.matrix.factors, self.bias):
            out.values[self.op.out.index].partition = out.by_rows(view)


def multiply_matrix(out: PassProgram, x: Value, matrix: WeightMatrix, to: View) -> None:
    """to = x times the matrix."""
    if out.gemv and matrix.gemv_plan is not None:
        plan, block, stored = matrix.gemv_plan, matrix.gemv_block, out.values[x.index]
        if block not in stored.inputs:
            # Floats are read where they are, by every product with x: gemv_inputs copies them into memory that lives as long.
            view = stored.view if stored.view.is_row or not block else out.dense(x)

            def take(memory: View) -> View:
                return out.keep_with(x, memory)

            stored.inputs[block] = gemv_inputs(out, view, block, input_partition(out, stored), take)
        gemv_task(out, plan, stored.inputs[block], to, out.all_tokens, 1, several=out.n > 1)
    elif matrix.gemm_plan is not None:
        panels = panels_of(out, x, matrix.gemm_plan.form)
        gemm_task(out, matrix.gemm_plan, panels, to, gemm.Jobs(out.all_tokens, 1, 1.0))
    else:
        source, target = out.dense(x).matrix, to.matrix

        def product() -> None:
            if target.flags.c_contiguous:
                matrix.multiply(source, use_gemv=out.gemv, out=target)
            else:
                target[:] = matrix.multiply(source, use_gemv=out.gemv)

        out.call(product)
