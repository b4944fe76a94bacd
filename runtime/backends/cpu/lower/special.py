"""Ops of single families of models (see ../kernels/special_parts.py)."""

from __future__ import annotations

from ....graph.special_ops import Clamp, SoftplusGate, Xielu
from ..kernels import special_parts
from ..passes import Pass, Step
from ..schedule import real
from .attention import with_heads


class ElementwiseStep(Step):
    """Ops from each number of a row to one number."""

    def __init__(self, executable, op: Clamp | Xielu):
        super().__init__(executable, op)
        self.op = op

    def emit(self, out: Pass) -> None:
        op, x = self.op, out.view(self.op.x)
        x = x if x.is_row else out.copied(x)
        partition = out.by_cells(x)
        to = out.result(op.out, op.x, partition, rows=True)
        words = (*partition.words(), x.address, x.row_bytes, to.address, to.row_bytes)
        if isinstance(op, Clamp):
            part, options = special_parts.clamp, (op.limit,)
        else:
            part, options = special_parts.xielu, (op.alpha_p, op.alpha_n, op.beta, op.epsilon)
        out.schedule.task(part.address, (*words, *map(real, options)), partition, (x,), (to,))


class SoftplusGateStep(Step):
    def __init__(self, executable, op: SoftplusGate):
        super().__init__(executable, op)
        self.op = op

    def emit(self, out: Pass) -> None:
        op = self.op
        gate, x = (view if view.is_row else out.copied(view) for view in (out.view(op.gate), out.view(op.x)))
        partition = out.by_rows(x)
        to = with_heads(out.result(op.out, op.x, partition, rows=True), *op.x.shape)
        words = (x.address, x.row_bytes, gate.address, gate.row_bytes, to.address, to.row_bytes, x.size // gate.size)
        out.schedule.task(special_parts.softplus_gate.address, (*partition.words(), *words), partition, (gate, x), (to,))


SPECIAL_STEPS = {Clamp: ElementwiseStep, SoftplusGate: SoftplusGateStep, Xielu: ElementwiseStep}
SPECIAL_SUPPORT = {
    Clamp: dict.fromkeys(("x", "limit")),
    SoftplusGate: dict.fromkeys(("gate", "x")),
    Xielu: dict.fromkeys(("x", "alpha_p", "alpha_n", "beta", "epsilon")),
}
