"""Ops of several residual streams (see ../kernels/stream_parts.py)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ....graph.compressed_ops import CollapseStreams, RepeatStreams, StreamWeights
from ....graph.special_ops import AddToStreams, ExpandStreams, KeepLargest, MergeStreams, MixStreams, ScaleChannels
from ....graph.values import Value
from ..kernels import stream_parts
from ..memory import View, with_heads
from ..passes import Pass, Step
from ..schedule import real


def _row_view(out: Pass, value: Value) -> View:
    view = out.view(value)
    return view if view.is_row else out.copied(view)


class ExpandStreamsStep(Step):
    """ExpandStreams and MergeStreams, once in a pass each: by a Python function."""

    def __init__(self, executable, op: ExpandStreams | MergeStreams):
        super().__init__(executable, op)
        self.op, self.matrix = op, executable.matrix(op.weight)

    def emit(self, out: Pass) -> None:
        op, x, to = self.op, out.dense(self.op.x), out.new(self.op.out)
        expands, use_gemv = isinstance(op, ExpandStreams), out.gemv
        width, streams = op.weight.shape[0], op.weight.shape[2] + 1
        x_rows = x.array.reshape(out.n, -1, width)
        to_rows = to.array.reshape(out.n, -1, width)

        def run() -> None:
            first, total = np.ascontiguousarray(x_rows[:, 0]), x_rows[:, 0].copy()
            magnitude = np.sqrt(np.square(first).mean(axis=1, keepdims=True))
            for stream in range(1, streams):
                source = first if expands else np.ascontiguousarray(x_rows[:, stream])
                product = self.matrix.multiply(source, stream - 1, use_gemv)
                squares = np.maximum(np.square(product).mean(axis=1, keepdims=True), np.float32(op.epsilon))
                product *= magnitude / np.sqrt(squares)
                if expands:
                    to_rows[:, stream] = product
                else:
                    total += product
            to_rows[:, 0] = first if expands else total / np.float32(streams)

        out.call(run)


class MixStreamsStep(Step):
    def __init__(self, executable, op: MixStreams):
        super().__init__(executable, op)
        self.op = op

    def emit(self, out: Pass) -> None:
        op = self.op
        x, factors, to = _row_view(out, op.x), _row_view(out, op.coefficients), out.new(op.out)
        partition = out.by_rows(x)
        words = (x.address, x.row_bytes, factors.address, factors.row_bytes, to.address, to.row_bytes, *op.x.shape)
        table = (*partition.words(), *words, int(op.adds))
        out.schedule.task(stream_parts.mix_streams.address, table, partition, (x, factors), (to,))


class AddToStreamsStep(Step):
    def __init__(self, executable, op: AddToStreams):
        super().__init__(executable, op)
        self.op, self.constants = op, np.array(op.constants, np.float32)

    def emit(self, out: Pass) -> None:
        op, reads = self.op, [_row_view(out, self.op.x), _row_view(out, self.op.update)]
        if op.coefficients is not None:
            reads.append(_row_view(out, op.coefficients))
        partition, to = out.by_rows(reads[0]), out.new(op.out)
        words = [word for view in reads for word in (view.address, view.row_bytes)]
        words += ([] if op.coefficients is not None else [0, 0]) + [to.address, to.row_bytes]
        table = (*partition.words(), *words, out.constant(self.constants), *op.x.shape)
        out.schedule.task(stream_parts.add_to_streams.address, table, partition, tuple(reads), (to,))


class RowStep(Step):
    """ScaleChannels and KeepLargest."""

    def __init__(self, executable, op: ScaleChannels | KeepLargest):
        super().__init__(executable, op)
        self.op = op
        self.weight = self.vector(op.weight) if isinstance(op, ScaleChannels) else None

    def emit(self, out: Pass) -> None:
        op, x = self.op, _row_view(out, self.op.x)
        partition = out.by_rows(x)
        to = out.result(op.out, op.x, partition, rows=True)
        if isinstance(op, KeepLargest):
            part, last = stream_parts.keep_largest, real(op.factor)
        else:
            assert self.weight is not None
            part, last = stream_parts.scale_channels, out.constant(self.weight)
        table = (*partition.words(), x.address, x.row_bytes, to.address, to.row_bytes, last)
        out.schedule.task(part.address, table, partition, (x,), (to,))


class RepeatStreamsStep(Step):
    def __init__(self, executable, op: RepeatStreams):
        super().__init__(executable, op)
        self.op = op

    def emit(self, out: Pass) -> None:
        op = self.op
        to, x = with_heads(out.new(op.out), *op.out.shape), with_heads(out.view(op.x), 1, op.x.shape[0])
        out.copy(replace(x, heads=op.out.shape[0], head_bytes=0), to)


class StreamWeightsStep(Step):
    def __init__(self, executable, op: StreamWeights):
        super().__init__(executable, op)
        self.op, self.scale, self.base = op, self.vector(op.scale), self.vector(op.base)

    def emit(self, out: Pass) -> None:
        op, x, to = self.op, _row_view(out, self.op.x), out.new(self.op.out)
        assert self.scale is not None
        assert self.base is not None
        partition = out.by_rows(x)
        words = (x.address, x.row_bytes, to.address, to.row_bytes, out.constant(self.scale), out.constant(self.base))
        table = (*partition.words(), *words, op.streams, op.iterations, real(op.epsilon), self.scale.size)
        out.schedule.task(stream_parts.stream_weights.address, table, partition, (x,), (to,))


class CollapseStreamsStep(Step):
    def __init__(self, executable, op: CollapseStreams):
        super().__init__(executable, op)
        self.op = op

    def emit(self, out: Pass) -> None:
        op = self.op
        x, factors, to = _row_view(out, op.x), _row_view(out, op.factors), out.new(op.out)
        partition = out.by_rows(x)
        words = (x.address, x.row_bytes, factors.address, factors.row_bytes, to.address, to.row_bytes, *op.x.shape)
        out.schedule.task(stream_parts.collapse_streams.address, (*partition.words(), *words), partition, (x, factors), (to,))


STREAM_STEPS = {
    AddToStreams: AddToStreamsStep,
    CollapseStreams: CollapseStreamsStep,
    ExpandStreams: ExpandStreamsStep,
    KeepLargest: RowStep,
    MergeStreams: ExpandStreamsStep,
    MixStreams: MixStreamsStep,
    RepeatStreams: RepeatStreamsStep,
    ScaleChannels: RowStep,
    StreamWeights: StreamWeightsStep,
}
STREAM_SUPPORT = {
    AddToStreams: dict.fromkeys(("x", "update", "coefficients", "constants")),
    CollapseStreams: dict.fromkeys(("x", "factors")),
    ExpandStreams: dict.fromkeys(("x", "weight", "epsilon")),
    KeepLargest: dict.fromkeys(("x", "factor")),
    MergeStreams: dict.fromkeys(("x", "weight", "epsilon")),
    MixStreams: dict.fromkeys(("x", "coefficients", "adds")),
    RepeatStreams: dict.fromkeys(("x",)),
    ScaleChannels: dict.fromkeys(("x", "weight")),
    StreamWeights: dict.fromkeys(("x", "scale", "base", "streams", "iterations", "epsilon")),
}
