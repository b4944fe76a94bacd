"""Activations and gates (see ../kernels/activation_kernels.py)."""

from __future__ import annotations

from typing import Literal

from ....graph import Value
from ....graph.activation_ops import Clamp, GaussianTopK, SoftplusGate, Xielu
from ....graph.ops import Activation, ExpertLinear, GatedActivation, Linear, Op, SoftCap
from ..kernels import activation_kernels as kernels
from ..kernels.elementwise import CLAMPED_SILU, CLAMPED_SWISH, GELU, GELU_ERF, IDENTITY, SIGMOID, SILU, SQUARED_RELU
from ..kernels.gemm.gemm import GemmPlan
from ..kernels.gemm.gemm_kernels import SPAN
from ..kernels.task_kernel import OperandKernel
from ..memory import Partition, with_heads
from ..pass_program import PassProgram
from .products import panels_of
from .step import lowers

_FUNCTIONS = {"silu": SILU, "gelu": GELU, "gelu_erf": GELU_ERF, "sigmoid": SIGMOID, "identity": IDENTITY}
_FUNCTIONS |= {"clamped_silu": CLAMPED_SILU, "clamped_swish": CLAMPED_SWISH, "squared_relu": SQUARED_RELU}


@lowers(Activation)
def activation(
    program: PassProgram, x: Value, function: Literal["silu", "gelu", "gelu_erf", "squared_relu"], out: Value
) -> None:
    _gate(program, x, None, function, 0.0, out)


@lowers(GatedActivation)
def gated_activation(
    program: PassProgram,
    gate: Value,
    up: Value,
    function: Literal["silu", "gelu", "gelu_erf", "sigmoid", "clamped_silu", "clamped_swish", "identity"],
    limit: float,
    out: Value,
) -> None:
    _gate(program, gate, up, function, limit, out)


def _gate(program: PassProgram, gate: Value, up: Value | None, function: str, limit: float, out: Value) -> None:
    x, y = program.contiguous(gate), None if up is None else program.contiguous(up)
    op = next(iter(program.compiled.users.get(out.index, [])), None)
    plan, partition = _gemm_plan(program, op), program.by_cells(x)
    if plan is not None:
        partition = Partition(x.axis, x.rows, plan.form.block_tokens, x.size, SPAN)
    # A product reads rows without gaps: where gate and up are parts of one value, those in the gate's place would be copied.
    apart = plan is not None and not x.is_dense
    to = program.new(out, x, partition) if apart else program.result(out, gate, partition, rows=True)
    program.task(kernels.gate, partition, x=x, up=y, out=to, function=_FUNCTIONS[function], limit=limit)
    if plan is not None and isinstance(op, Linear):
        # Now, since `up` is free after this op: in its memory they would have to wait until all gates are done.
        panels_of(program, out, plan.form)


def _gemm_plan(program: PassProgram, op: Op | None) -> GemmPlan | None:
    """Of an op that is a product by GEMM."""
    if not isinstance(op, Linear | ExpertLinear):
        return None
    by_gemv = program.experts_by_gemv if isinstance(op, ExpertLinear) else program.gemv
    return None if by_gemv else program.compiled.matrix(op.weight).gemm_plan


def _by_element(program: PassProgram, kernel: OperandKernel, x: Value, out: Value, **options: float) -> None:
    view = program.contiguous(x)
    partition = program.by_cells(view)
    program.task(kernel, partition, x=view, out=program.result(out, x, partition, rows=True), **options)


@lowers(Clamp)
def clamp(program: PassProgram, x: Value, limit: float, out: Value) -> None:
    _by_element(program, kernels.clamp, x, out, limit=limit)


@lowers(SoftCap)
def soft_cap(program: PassProgram, x: Value, cap: float, out: Value) -> None:
    _by_element(program, kernels.soft_cap, x, out, cap=cap)


@lowers(Xielu)
def xielu(program: PassProgram, x: Value, alpha_p: float, alpha_n: float, beta: float, epsilon: float, out: Value) -> None:
    _by_element(program, kernels.xielu, x, out, alpha_p=alpha_p, alpha_n=alpha_n, beta=beta, epsilon=epsilon)


@lowers(SoftplusGate)
def softplus_gate(program: PassProgram, gate: Value, x: Value, out: Value) -> None:
    factors, view = program.contiguous(gate), program.contiguous(x)
    partition = program.by_rows(view)
    to = with_heads(program.result(out, x, partition, rows=True), *x.shape)
    program.task(kernels.softplus_gate, partition, x=view, gate=factors, out=to, share=view.size // factors.size)


@lowers(GaussianTopK)
def gaussian_top_k(program: PassProgram, x: Value, factor: float, out: Value) -> None:
    view = program.contiguous(x)
    partition = program.by_rows(view)
    program.task(kernels.gaussian_top_k, partition, x=view, out=program.result(out, x, partition, rows=True), factor=factor)
