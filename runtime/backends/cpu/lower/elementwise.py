"""Ops that work on rows, or element by element: tables, norms, rotary embedding, sums, splits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np

from ....graph import Value
from ....graph.activation_ops import Multiply
from ....graph.ops import (
    Add,
    Concat,
    Embedding,
    GateHeads,
    HiddenInput,
    LatentAttention,
    Norm,
    Reshape,
    Rope,
    Scale,
    ScaleByPosition,
    SigmoidGate,
    Split,
)  # fmt: skip
from ....graph.values import RotaryEmbedding, Temperature, segments
from ..kernels import row_kernels
from ..memory import Partition, View, with_heads
from ..pass_program import PassProgram
from .step import Step, lowers

_HEADS = 16  # of a part, if the number of heads is a multiple of it


@lowers(Embedding)
class EmbeddingStep(Step):
    def __init__(self, compiled, op: Embedding):
        super().__init__(compiled, op)
        self.table = compiled.matrix(op.table)

    def emit(self, out: PassProgram) -> None:
        target, state, factor = out.new(self.op.out).matrix, out.run_inputs, np.float32(self.op.scale)
        by = self.op.by

        def look_up() -> None:
            rows = state.positions if by == "position" else state.tokens
            if by == "segment":
                rows = segments(state.tokens, state.positions, self.op.separator)
            target[:] = self.table.lookup(rows)
            if factor != 1:
                np.multiply(target, factor, out=target)

        out.call(look_up)


@lowers(HiddenInput)
def hidden_input(program: PassProgram, out: Value) -> None:
    target, state = program.new(out).matrix, program.run_inputs

    def take() -> None:
        assert state.inputs is not None
        target[:] = state.inputs

    program.call(take)


@lowers(Concat)
def concat(program: PassProgram, a: Value, b: Value, out: Value) -> None:
    view, first = program.new(out), 0
    for value in (a, b):
        program.copy(program.view(value), view.columns(first, value.shape[0]))
        first += value.shape[0]


@lowers(Split)
def split(program: PassProgram, x: Value, sizes: tuple[int, ...], out: Value, more: tuple[Value, ...]) -> None:
    view, first = program.view(x), 0
    if view.width != x.shape[-1]:  # rows of experts are of one expert each
        view = view.reshaped(*x.shape)
    for value, size in zip((out, *more), sizes, strict=True):
        program.put(value, view.columns(first, size))
        first += size


@lowers(Reshape)
def reshape(program: PassProgram, x: Value, out: Value) -> None:
    stored = program.values[x.index]
    heads, width = out.shape if len(out.shape) == 2 else (1, out.shape[0])
    if stored.view.is_row:
        program.put(out, stored.view.reshaped(heads, width), stored.partition)
        return
    view = program.new(out, stored.view)
    program.copy(stored.view, view.reshaped(stored.view.heads, stored.view.width))


@lowers(Norm)
def norm(
    program: PassProgram,
    x: Value,
    weight: np.ndarray | None,
    epsilon: float,
    bias: np.ndarray | None,
    kind: Literal["rms", "layer"],
    over: Literal["last", "all"],
    out: Value,
) -> None:
    view = program.view(x)
    if over == "all":
        view = (view if view.is_row else program.copied(view)).reshaped(1, view.size)
    partition = program.by_rows(view)
    to = program.result(out, x, partition, rows=over == "all")
    if over == "all":
        to = to.reshaped(1, view.size)
    weight = np.ones(x.shape[-1], np.float32) if weight is None else weight
    head_weights = view.width if weight.size > view.width else 0
    options = {"head_weights": head_weights, "epsilon": epsilon, "bias": bias, "subtracts_mean": kind == "layer"}
    program.task(row_kernels.normalise, partition, x=view, out=to, weight=weight, **options)


@lowers(Rope)
def rope(program: PassProgram, x: Value, rope: RotaryEmbedding, start: int, out: Value) -> None:
    view = program.view(x)
    heads = x.shape[0] if len(x.shape) == 2 else 1
    if view.heads != heads:
        view = view.reshaped(heads, x.shape[-1])
    partition = heads_partition(program, view) if _for_latents(program, out) else program.by_rows(view)
    by_heads = partition.axis != "tokens"
    to = program.result(out, x, None if by_heads else partition)
    if to.address != view.address:
        program.copy(view, to)
    rotated = to.columns(start, rope.dims)
    rows = replace(rotated, row_bytes=rotated.head_bytes, heads=1, head_bytes=0) if by_heads else rotated
    options: dict[str, Any] = {
        "pairs": len(rope.frequencies),
        "interleaved": rope.interleaved,
        "token_rows": view.heads if by_heads else 1,
    }
    options |= {"reads": (rotated,), "writes": (rotated,), "rotations": program.rotations(rope)}
    program.task(row_kernels.rotate, partition, x=rows, **options)


def _for_latents(program: PassProgram, out: Value) -> bool:
    """Whether only latent attention reads a value, as queries: its tasks are divided by heads."""
    users = program.compiled.users.get(out.index, [])
    return program.gemv and len(users) == 1 and isinstance(users[0], LatentAttention) and users[0].q is out


def heads_partition(program: PassProgram, x: View) -> Partition:
    """Up to _HEADS heads per part; the rows are the heads of tokens."""
    step = _HEADS if x.heads % _HEADS == 0 else x.heads
    return Partition(f"{x.heads} heads", program.n * x.heads, step, x.width, x.width)


@lowers(Add)
def add(program: PassProgram, a: Value, b: Value, scale: float, out: Value) -> None:
    x, y = program.contiguous(a), program.contiguous(b)
    partition = program.by_rows(x)
    to = program.result(out, a, partition, rows=True)
    program.task(row_kernels.add, partition, a=x, b=y, out=to, factor=scale)


@lowers(Scale)
def scale(program: PassProgram, x: Value, factor: float, out: Value) -> None:
    view = program.contiguous(x)
    partition = program.by_rows(view)
    program.task(row_kernels.scale, partition, x=view, out=program.result(out, x, partition, rows=True), factor=factor)


@lowers(ScaleByPosition)
def scale_by_position(program: PassProgram, x: Value, temperature: Temperature, out: Value) -> None:
    view = program.contiguous(x)
    partition, factors = program.by_rows(view), program.temperatures(temperature)
    program.task(row_kernels.scale_tokens, partition, x=view, out=program.result(out, x, partition, rows=True), factors=factors)


@lowers(Multiply)
def multiply(program: PassProgram, x: Value, weight: np.ndarray, out: Value) -> None:
    view = program.contiguous(x)
    partition = program.by_rows(view)
    program.task(row_kernels.multiply, partition, x=view, out=program.result(out, x, partition, rows=True), weight=weight)


@lowers(GateHeads)
def gate_heads(program: PassProgram, x: Value, gate: Value, out: Value) -> None:
    view = program.contiguous(x)
    partition = program.by_rows(view)
    to = program.result(out, x, partition, rows=True)
    if to.address != view.address:
        program.copy(view, to)
    program.task(row_kernels.gate_heads, partition, x=with_heads(to, *x.shape), gate=program.view(gate))


@lowers(SigmoidGate)
def sigmoid_gate(program: PassProgram, x: Value, y: Value, gate: np.ndarray, out: Value) -> None:
    view, scaled = program.view(x), program.view(y)
    partition = program.by_rows(scaled)
    to = program.result(out, y, partition)
    if to.address != scaled.address:
        program.copy(scaled, to)
    program.task(row_kernels.sigmoid_gate, partition, x=view, gate=gate, size=gate.size, y=to)
