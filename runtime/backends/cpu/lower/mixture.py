"""The ops of a mixture of experts, as its step and its batches share them."""

from __future__ import annotations

import numpy as np

from ....graph.ops import CombineExperts, Route
from ..kernels.gemm.gemm_kernels import BYTES
from ..memory import View, view_of
from ..pass_program import PassProgram
from ..weights import WeightMatrix
from .expert_steps import Arranged, ExpertLinearStep, ScaleByRoutingStep
from .step import Step


class Mixture:
    """From Route to CombineExperts.

    inner     the steps between them
    matrices  of the experts' products
    experts   their number
    columns   of the widest result of an inner step
    """

    route: Route
    combine: CombineExperts
    inner: list[Step]
    matrices: list[WeightMatrix]
    experts: int
    columns: int

    @property
    def has_gemv(self) -> bool:
        """Whether all matrices have a GEMV."""
        return all(matrix.gemv_plan is not None for matrix in self.matrices)

    @property
    def gemm_tile(self) -> int | None:
        """Rows of a tile of a GEMM of any of the matrices, if tiles may begin with any row (those of bytes); None if not."""
        forms = [None if matrix.gemm_plan is None else matrix.gemm_plan.form for matrix in self.matrices]
        tiles = [form.block_tokens for form in forms if form is not None and form.kind == BYTES]
        return max(tiles) if len(tiles) == len(forms) else None

    def emit_inner(self, out: PassProgram, arranged: Arranged, by_gemv: bool) -> None:
        """The ops between routing and combination, their products by GEMV or by GEMM."""
        for step in self.inner:
            if isinstance(step, ExpertLinearStep):
                (step.emit_gemv if by_gemv else step.emit_gemm)(out, arranged)
            elif isinstance(step, ScaleByRoutingStep):
                step.emit_rows(out, arranged)
            else:
                step.emit(out)

    def combine_factors(self, out: PassProgram, factors: View) -> View:
        """What the experts' results are multiplied with: their weights, or ones."""
        if self.combine.weighted:
            return factors
        ones = np.ones(factors.array.size, np.float32)
        out.schedule.keep(ones)
        return view_of(ones)
