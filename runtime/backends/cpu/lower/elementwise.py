"""Ops that work on rows, or element by element: norms, rotary embedding, activations, sums, splits."""

from __future__ import annotations

import numpy as np

from ....graph.ops import (
    Activation,
    Add,
    Concat,
    Embedding,
    ExpertLinear,
    GatedActivation,
    GateHeads,
    HiddenInput,
    LatentAttention,
    Linear,
    Norm,
    Reshape,
    Rope,
    Scale,
    ScaleByPosition,
    SigmoidGate,
    SoftCap,
    Split,
)  # fmt: skip
from ....graph.values import segments
from ..kernels import row_parts
from ..kernels.elementwise import CLAMPED_SILU, CLAMPED_SWISH, GELU, GELU_ERF, IDENTITY, SIGMOID, SILU, SQUARED_RELU
from ..kernels.gemm.parts import SPAN
from ..memory import Partition, View
from ..passes import CELL, Pass, Step
from ..schedule import real

GATES = {"silu": SILU, "gelu": GELU, "gelu_erf": GELU_ERF, "sigmoid": SIGMOID, "identity": IDENTITY}
GATES |= {"clamped_silu": CLAMPED_SILU, "clamped_swish": CLAMPED_SWISH}
ACTIVATIONS = {"silu": SILU, "gelu": GELU, "gelu_erf": GELU_ERF, "squared_relu": SQUARED_RELU}
_HEADS = 16  # of a part, if the number of heads is a multiple of it


class EmbeddingStep(Step):
    def __init__(self, executable, op: Embedding):
        super().__init__(executable, op)
        self.op, self.table = op, executable.matrix(op.table)

    def emit(self, out: Pass) -> None:
        target, state, factor = out.new(self.op.out).matrix, out.run_state, np.float32(self.op.scale)
        by = self.op.by

        def look_up() -> None:
            rows = state.positions if by == "position" else state.tokens
            if by == "segment":
                rows = segments(state.tokens, state.positions, self.op.separator)
            target[:] = self.table.lookup(rows)
            if factor != 1:
                np.multiply(target, factor, out=target)

        out.call(look_up)


class HiddenInputStep(Step):
    def __init__(self, executable, op: HiddenInput):
        super().__init__(executable, op)
        self.op = op

    def emit(self, out: Pass) -> None:
        target, state = out.new(self.op.out).matrix, out.run_state

        def take() -> None:
            assert state.inputs is not None
            target[:] = state.inputs

        out.call(take)


class ConcatStep(Step):
    def __init__(self, executable, op: Concat):
        super().__init__(executable, op)
        self.op = op

    def emit(self, out: Pass) -> None:
        view, first = out.new(self.op.out), 0
        for value in (self.op.a, self.op.b):
            out.copy(out.view(value), view.columns(first, value.shape[0]))
            first += value.shape[0]


class SplitStep(Step):
    def __init__(self, executable, op: Split):
        super().__init__(executable, op)
        self.op = op

    def emit(self, out: Pass) -> None:
        view, first = out.view(self.op.x), 0
        if view.width != self.op.x.shape[-1]:  # rows of experts are of one expert each
            view = view.reshaped(*self.op.x.shape)
        for value, size in zip(self.op.outputs, self.op.sizes, strict=True):
            out.put(value, view.columns(first, size))
            first += size


class ReshapeStep(Step):
    def __init__(self, executable, op: Reshape):
        super().__init__(executable, op)
        self.op = op

    def emit(self, out: Pass) -> None:
        shape = self.op.out.shape
        stored = out.values[self.op.x.index]
        heads, width = shape if len(shape) == 2 else (1, shape[0])
        if stored.view.is_row:
            out.put(self.op.out, stored.view.reshaped(heads, width), stored.partition)
            return
        view = out.new(self.op.out, stored.view)
        out.copy(stored.view, view.reshaped(stored.view.heads, stored.view.width))


class NormStep(Step):
    def __init__(self, executable, op: Norm):
        super().__init__(executable, op)
        self.op = op
        weight, self.bias = self.vector(op.weight), self.vector(op.bias)
        self.weight = np.ones(op.x.shape[-1], np.float32) if weight is None else weight

    def emit(self, out: Pass) -> None:
        op, x = self.op, out.view(self.op.x)
        if op.over == "all":
            x = (x if x.is_row else out.copied(x)).reshaped(1, x.size)
        partition = out.by_rows(x)
        to = out.result(op.out, op.x, partition, rows=op.over == "all")
        if op.over == "all":
            to = to.reshaped(1, x.size)
        words = (x.address, x.row_bytes, x.head_bytes, x.heads, x.width, out.constant(self.weight))
        words += (x.width if self.weight.size > x.width else 0, real(op.epsilon))
        words += (0 if self.bias is None else out.constant(self.bias), op.kind == "layer")
        words += (to.address, to.row_bytes, to.head_bytes)
        out.schedule.task(row_parts.normalise.address, (*partition.words(), *words), partition, (x,), (to,))


class RopeStep(Step):
    def __init__(self, executable, op: Rope):
        super().__init__(executable, op)
        self.op = op

    def emit(self, out: Pass) -> None:
        op = self.op
        x = out.view(op.x)
        heads = op.x.shape[0] if len(op.x.shape) == 2 else 1
        if x.heads != heads:
            x = x.reshaped(heads, op.x.shape[-1])
        partition = heads_partition(out, x) if self._for_latents(out) else out.by_rows(x)
        to = out.result(op.out, op.x, partition if partition.axis == "tokens" else None)
        if to.address != x.address:
            out.copy(x, to)
        rotated = to.columns(op.start, op.rope.dims)
        table = out.rotations(op.rope)
        by_heads = partition.axis != "tokens"
        steps = (rotated.head_bytes, 0, 1) if by_heads else (rotated.row_bytes, rotated.head_bytes, rotated.heads)
        words = (rotated.address, *steps, out.constant(table), len(op.rope.frequencies), op.rope.interleaved)
        table = (*partition.words(), *words, rotated.heads if by_heads else 1)
        out.schedule.task(row_parts.rotate.address, table, partition, (rotated,), (rotated,))

    def _for_latents(self, out: Pass) -> bool:
        """Whether only latent attention reads the result, whose tasks are divided by heads."""
        users = self.executable.users.get(self.op.out.index, [])
        return out.gemv and len(users) == 1 and isinstance(users[0], LatentAttention) and users[0].q is self.op.out


def heads_partition(out: Pass, x: View) -> Partition:
    """Up to _HEADS heads per part; the rows are the heads of tokens."""
    step = _HEADS if x.heads % _HEADS == 0 else x.heads
    return Partition(f"{x.heads} heads", out.n * x.heads, step, x.width, x.width)


class GateStep(Step):
    """GatedActivation and Activation."""

    def __init__(self, executable, op: GatedActivation | Activation):
        super().__init__(executable, op)
        functions = GATES if isinstance(op, GatedActivation) else ACTIVATIONS
        self.op, self.function = op, functions[op.function]

    def emit(self, out: Pass) -> None:
        op = self.op
        gate = op.gate if isinstance(op, GatedActivation) else op.x
        up = op.up if isinstance(op, GatedActivation) else None
        x, y = self._rows(out, gate), None if up is None else self._rows(out, up)
        partition = self._partition(out, x)
        to = out.result(op.out, gate, partition, rows=True)
        other = (0, 0) if y is None else (y.address, y.row_bytes)
        words = (x.address, x.row_bytes, *other, to.address, to.row_bytes, self.function, real(getattr(op, "limit", 0.0)))
        reads = (x,) if y is None else (x, y)
        out.schedule.task(row_parts.gate.address, (*partition.words(), *words), partition, reads, (to,))

    def _rows(self, out: Pass, value) -> View:
        view = out.view(value)
        return view if view.is_row else out.copied(view)

    def _partition(self, out: Pass, x: View) -> Partition:
        """The partition with which a following GEMM reads the result, else cells of single rows."""
        step, columns = 1, CELL
        users = self.executable.users.get(self.op.out.index, [])
        if not out.gemv and users and isinstance(users[0], Linear | ExpertLinear):
            plan = self.executable.matrix(users[0].weight).gemm_plan
            step, columns = (plan.form.block_tokens, SPAN) if plan is not None else (1, columns)
        return Partition(x.axis, x.rows, step, x.size, columns)


class AddStep(Step):
    def __init__(self, executable, op: Add):
        super().__init__(executable, op)
        self.op = op

    def emit(self, out: Pass) -> None:
        op = self.op
        a, b = (view if view.is_row else out.copied(view) for view in (out.view(op.a), out.view(op.b)))
        partition = out.by_rows(a)
        to = out.result(op.out, op.a, partition, rows=True)
        words = (a.address, a.row_bytes, b.address, b.row_bytes, to.address, to.row_bytes, real(op.scale))
        out.schedule.task(row_parts.add.address, (*partition.words(), *words), partition, (a, b), (to,))


class ScaleStep(Step):
    def __init__(self, executable, op: Scale):
        super().__init__(executable, op)
        self.op = op

    def emit(self, out: Pass) -> None:
        op, x = self.op, out.view(self.op.x)
        x = x if x.is_row else out.copied(x)
        partition = out.by_rows(x)
        to = out.result(op.out, op.x, partition, rows=True)
        words = (x.address, x.row_bytes, to.address, to.row_bytes, real(op.factor))
        out.schedule.task(row_parts.scale.address, (*partition.words(), *words), partition, (x,), (to,))


class ScaleByPositionStep(Step):
    def __init__(self, executable, op: ScaleByPosition):
        super().__init__(executable, op)
        self.op = op

    def emit(self, out: Pass) -> None:
        x, state = out.view(self.op.x), out.run_state
        to = out.result(self.op.out, self.op.x, None)
        source, target, temperature = x.array, to.array, self.op.temperature

        def scale_tokens() -> None:
            np.multiply(source, temperature.factors(state.positions)[:, None, None], out=target)

        out.call(scale_tokens)


class SoftCapStep(Step):
    def __init__(self, executable, op: SoftCap):
        super().__init__(executable, op)
        self.op = op

    def emit(self, out: Pass) -> None:
        cap = np.float32(self.op.cap)
        x = out.view(self.op.x)
        to = out.result(self.op.out, self.op.x, None)
        source, target = x.array, to.array

        def soft_cap() -> None:
            np.divide(source, cap, out=target)
            np.tanh(target, out=target)
            np.multiply(target, cap, out=target)

        out.call(soft_cap)


class GateHeadsStep(Step):
    def __init__(self, executable, op: GateHeads):
        super().__init__(executable, op)
        self.op = op

    def emit(self, out: Pass) -> None:
        heads, width = self.op.x.shape
        x = out.view(self.op.x)
        x = x if x.heads == heads else x.reshaped(heads, width)
        to = out.result(self.op.out, self.op.x, None)
        to = to if to.heads == heads else to.reshaped(heads, width)
        source, gate, target = x.array, out.dense(self.op.gate).matrix, to.array

        def multiply() -> None:
            with np.errstate(over="ignore"):
                np.multiply(source, (1 / (1 + np.exp(-gate)))[:, :, None], out=target)

        out.call(multiply)


class SigmoidGateStep(Step):
    def __init__(self, executable, op: SigmoidGate):
        super().__init__(executable, op)
        self.op, self.gate = op, self.vector(op.gate)

    def emit(self, out: Pass) -> None:
        op, x, y = self.op, out.view(self.op.x), out.view(self.op.y)
        assert self.gate is not None
        partition = out.by_rows(y)
        to = out.result(op.out, op.y, partition)
        if to.address != y.address:
            out.copy(y, to)
        words = (x.address, x.row_bytes, out.constant(self.gate), self.gate.size, to.address, to.row_bytes)
        out.schedule.task(row_parts.sigmoid_gate.address, (*partition.words(), *words), partition, (x, to), (to,))
