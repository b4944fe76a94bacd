"""Ops of several residual streams (see ../kernels/hyper_connections.py)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ....graph import Value
from ....graph.hyper_connection_ops import (
    CollapseStreams,
    ExpandStreams,
    HyperConnectionAdd,
    HyperConnectionMix,
    HyperConnectionWeights,
    MatchStreams,
    MergeStreams,
    RepeatStreams,
    ScoreStreams,
)
from ..kernels import hyper_connections as kernels
from ..memory import with_heads
from ..pass_program import PassProgram
from .step import Step, lowers


@lowers(ExpandStreams, MergeStreams)
class ExpandStreamsStep(Step):
    """Once in a pass each: by a Python function, whose products are with packed weights."""

    def __init__(self, compiled, op: ExpandStreams | MergeStreams):
        super().__init__(compiled, op)
        self.matrix = compiled.matrix(op.weight)

    def emit(self, out: PassProgram) -> None:
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


@lowers(HyperConnectionMix)
def mix(program: PassProgram, x: Value, coefficients: Value, adds: bool, out: Value) -> None:
    streams, width = x.shape
    view, factors, to = program.contiguous(x), program.contiguous(coefficients), program.new(out)
    options = {"streams": streams, "width": width, "adds": adds}
    program.task(kernels.mix, program.by_rows(view), x=view, coefficients=factors, out=to, **options)


@lowers(HyperConnectionAdd)
def add(
    program: PassProgram, x: Value, update: Value, coefficients: Value | None, constants: tuple[float, ...], out: Value
) -> None:
    streams, width = x.shape
    view, added = program.contiguous(x), program.contiguous(update)
    factors = None if coefficients is None else program.contiguous(coefficients)
    options = {"constants": np.array(constants, np.float32), "streams": streams, "width": width}
    to = program.new(out)
    program.task(kernels.add, program.by_rows(view), x=view, update=added, coefficients=factors, out=to, **options)


@lowers(RepeatStreams)
def repeat_streams(program: PassProgram, x: Value, out: Value) -> None:
    to, view = with_heads(program.new(out), *out.shape), with_heads(program.view(x), 1, x.shape[0])
    program.copy(replace(view, heads=out.shape[0], head_bytes=0), to)


@lowers(HyperConnectionWeights)
def weights(
    program: PassProgram,
    x: Value,
    scale: np.ndarray,
    base: np.ndarray,
    streams: int,
    iterations: int,
    epsilon: float,
    out: Value,
) -> None:
    view, to = program.contiguous(x), program.new(out)
    options = {"scales": scale.size, "streams": streams, "iterations": iterations, "epsilon": epsilon}
    program.task(kernels.weights, program.by_rows(view), x=view, out=to, scale=scale, base=base, **options)


@lowers(CollapseStreams)
def collapse(program: PassProgram, x: Value, factors: Value, out: Value) -> None:
    streams, width = x.shape
    view, weights, to = program.contiguous(x), program.contiguous(factors), program.new(out)
    program.task(kernels.collapse, program.by_rows(view), x=view, factors=weights, out=to, streams=streams, width=width)


@lowers(ScoreStreams)
def score(program: PassProgram, x: Value, weight: np.ndarray, epsilon: float, out: Value) -> None:
    streams, width = x.shape
    view, options = program.contiguous(x), {"streams": streams, "width": width, "epsilon": epsilon}
    program.task(kernels.score, program.by_rows(view), x=view, out=program.new(out), weight=weight, **options)


@lowers(MatchStreams)
def match(program: PassProgram, x: Value, y: Value, out: Value) -> None:
    streams, width = x.shape
    view, other, to = program.contiguous(x), program.contiguous(y), program.new(out)
    program.task(kernels.match, program.by_rows(view), x=view, y=other, out=to, streams=streams, width=width)
