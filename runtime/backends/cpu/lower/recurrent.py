"""Ops with a recurrent state: the short convolution, the gated delta rule (see ../kernels/recurrent.py), the selective scan."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from ....graph import Value
from ....graph.ops import GatedDeltaRule, SelectiveScan, ShortConvolution
from ..kernels import recurrent, selective_scan
from ..memory import View, with_heads
from ..pass_program import PassProgram
from .step import Step, lowers


def sequences(out: PassProgram, layer: int, name: str | None) -> dict[str, Any]:
    """The operands that say which rows each sequence has, and where its state of a name lies, if there is one."""
    offset = 0 if name is None else out.compiled.state_offsets[layer, name]
    return {"ranges": out.ranges, "states": out.state_addresses, "offset": offset}


def _stride(out: PassProgram, layer: int, name: str) -> int:
    """Numbers of a row of a state."""
    return out.compiled.layers[layer].states[name].padded_shape[-1]


def _heads(out: PassProgram, value: Value) -> View:
    """A value's rows of heads."""
    return with_heads(out.view(value), *value.shape)


@lowers(ShortConvolution)
class ShortConvolutionStep(Step):
    def __init__(self, compiled, op: ShortConvolution):
        super().__init__(compiled, op)
        weight = compiled.vector(op.weight)
        self.weight = np.ascontiguousarray(weight.reshape(weight.shape[0], -1).T)
        self.bias = np.zeros(self.weight.shape[1], np.float32) if op.bias is None else compiled.vector(op.bias)

    def emit(self, out: PassProgram) -> None:
        op, x, to = self.op, out.contiguous(self.op.x), out.new(self.op.out)
        kernel, channels = self.weight.shape
        parts = len(out.counts) * -(-channels // recurrent.CHANNELS)
        sizes = {"channels": channels, "kernel_size": kernel, "stride": _stride(out, op.layer, op.state)}
        options = {"silu": op.activation == "silu", "dilation": op.dilation, **sequences(out, op.layer, op.state)}
        out.task(recurrent.short_convolution, parts, x=x, out=to, weight=self.weight, bias=self.bias, **sizes, **options)


@lowers(GatedDeltaRule)
def gated_delta_rule(
    program: PassProgram,
    q: Value,
    k: Value,
    v: Value,
    alpha: Value,
    beta: Value,
    decay: np.ndarray,
    alpha_bias: np.ndarray,
    layer: int,
    tiled: bool,
    epsilon: float,
    lower_bound: float,
    out: Value,
) -> None:
    heads, k_width = v.shape[0], k.shape[1]
    operands: dict[str, Any] = {name: _heads(program, value) for name, value in (("q", q), ("k", k), ("v", v))}
    operands |= {"out": with_heads(program.new(out), *out.shape)}
    operands |= {"alpha": program.contiguous(alpha), "beta": program.contiguous(beta), "decay": decay, "bias": alpha_bias}
    operands |= {"decays": prod(alpha.shape) // heads, "tiled": tiled, "epsilon": epsilon, "scale": k_width**-0.5}
    operands["lower_bound"] = lower_bound
    parts = len(program.counts) * heads * -(-_stride(program, layer, "delta") // recurrent.COLUMNS)
    program.task(recurrent.delta_rule, parts, **operands, **sequences(program, layer, "delta"))


@lowers(SelectiveScan)
class SelectiveScanStep(Step):
    def __init__(self, compiled, op: SelectiveScan):
        super().__init__(compiled, op)
        self.bias, self.skip = compiled.optional_vector(op.dt_bias), compiled.vector(op.skip).reshape(-1)
        self.decay = decay = compiled.vector(op.decay)
        if op.dt_bias is None:  # rows of the matrix, as long as those of the state
            stride = compiled.layers[op.layer].states["scan"].padded_shape[-1]
            self.decay = np.zeros((decay.shape[1], stride), np.float32)
            self.decay[:, : len(decay)] = decay.T

    def emit(self, out: PassProgram) -> None:
        op = self.op
        operands: dict[str, Any] = {name: _heads(out, getattr(op, name)) for name in ("x", "b", "c")}
        operands |= {"dt": out.contiguous(op.dt), "out": with_heads(out.new(op.out), *op.x.shape)}
        operands |= {"dt_bias": self.bias, "decay": self.decay, "skip": self.skip, **sequences(out, op.layer, "scan")}
        parts = len(out.counts) * op.x.shape[0] * -(-_stride(out, op.layer, "scan") // selective_scan.COLUMNS)
        out.task(selective_scan.selective_scan, parts, **operands)
