"""Ops with a recurrent state: the short convolution, the gated delta rule (see ../kernels/recurrent.py), the selective scan."""

from __future__ import annotations

from math import prod

import numpy as np

from ....graph.ops import GatedDeltaRule, SelectiveScan, ShortConvolution
from ....graph.values import Value
from ..kernels import recurrent, selective_scan
from ..memory import View, with_heads
from ..passes import Pass, Step
from ..schedule import real


def _sequences(out: Pass, layer: int, name: str) -> tuple[int, int, int]:
    """The words of tables that say which rows each sequence has, and where its state of a name lies."""
    counts = np.array(out.counts, np.int64)
    rows = np.stack([np.cumsum(counts) - counts, counts], axis=1)
    return out.constant(rows), out.state_addresses.ctypes.data, out.executable.state_offsets[layer, name]


class ShortConvolutionStep(Step):
    def __init__(self, executable, op: ShortConvolution):
        super().__init__(executable, op)
        weight = self.vector(op.weight)
        assert weight is not None
        self.op, self.weight = op, np.ascontiguousarray(weight.reshape(weight.shape[0], -1).T)
        bias = self.vector(op.bias)
        self.bias = np.zeros(self.weight.shape[1], np.float32) if bias is None else bias

    def emit(self, out: Pass) -> None:
        op, x = self.op, out.view(self.op.x)
        x, to = x if x.is_row else out.copied(x), out.new(self.op.out)
        kernel, channels = self.weight.shape
        stride = out.executable.layers[op.layer].states[op.state].padded_shape[-1]
        words = (x.address, x.row_bytes, to.address, to.row_bytes, out.constant(self.weight), channels, kernel, stride)
        parts = len(out.counts) * -(-channels // recurrent.CHANNELS)
        table = (
            *words,
            *_sequences(out, op.layer, op.state),
            out.constant(self.bias),
            int(op.activation == "silu"),
            op.dilation,
        )
        out.schedule.task(recurrent.short_convolution.address, table, parts, (x,), (to,))


class GatedDeltaRuleStep(Step):
    def __init__(self, executable, op: GatedDeltaRule):
        super().__init__(executable, op)
        self.op = op
        self.decay, self.bias = self.vector(op.decay), self.vector(op.alpha_bias)

    def emit(self, out: Pass) -> None:
        op = self.op
        assert self.decay is not None
        assert self.bias is not None
        q, k, v, to = (self._heads(out, value) for value in (op.q, op.k, op.v, op.out))
        alpha, beta = (view if view.is_row else out.copied(view) for view in (out.view(op.alpha), out.view(op.beta)))
        words = [word for view in (q, k, v, to) for word in (view.address, view.row_bytes, view.head_bytes)]
        words += [word for view in (alpha, beta) for word in (view.address, view.row_bytes)]
        (heads, v_width), (key_heads, k_width) = op.v.shape, op.k.shape
        words += [out.constant(self.decay), out.constant(self.bias), heads, key_heads, k_width, v_width, int(op.tiled)]
        words += [*_sequences(out, op.layer, "delta"), real(op.epsilon), real(k_width**-0.5), prod(op.alpha.shape) // heads]
        stride = out.executable.layers[op.layer].states["delta"].padded_shape[-1]
        parts = len(out.counts) * heads * -(-stride // recurrent.COLUMNS)
        out.schedule.task(recurrent.delta_rule.address, words, parts, (q, k, v, alpha, beta), (to,))

    def _heads(self, out: Pass, value: Value) -> View:
        """A value's rows of heads; new memory for the result."""
        return with_heads(out.new(value) if value is self.op.out else out.view(value), *value.shape)


class SelectiveScanStep(Step):
    def __init__(self, executable, op: SelectiveScan):
        super().__init__(executable, op)
        self.op, self.bias = op, self.vector(op.dt_bias)
        decay, skip = self.vector(op.decay), self.vector(op.skip)
        assert decay is not None
        assert skip is not None
        self.decay, self.skip = decay, skip.reshape(-1)
        if op.dt_bias is None:  # rows of the matrix, as long as those of the state
            stride = executable.layers[op.layer].states["scan"].padded_shape[-1]
            self.decay = np.zeros((decay.shape[1], stride), np.float32)
            self.decay[:, : len(decay)] = decay.T

    def emit(self, out: Pass) -> None:
        op, (heads, width), (groups, size) = self.op, self.op.x.shape, self.op.b.shape
        x, b, c = (with_heads(out.view(value), *value.shape) for value in (op.x, op.b, op.c))
        dt = out.view(op.dt)
        dt = dt if dt.is_row else out.copied(dt)
        to = with_heads(out.new(op.out), heads, width)
        words = [word for view in (x, to, b, c) for word in (view.address, view.row_bytes, view.head_bytes)]
        words += [dt.address, dt.row_bytes, 0 if self.bias is None else out.constant(self.bias)]
        words += [out.constant(self.decay), out.constant(self.skip), heads, groups, size, width]
        words += _sequences(out, op.layer, "scan")
        stride = out.executable.layers[op.layer].states["scan"].padded_shape[-1]
        parts = len(out.counts) * heads * -(-stride // selective_scan.COLUMNS)
        out.schedule.task(selective_scan.selective_scan.address, words, parts, (x, b, c, dt), (to,))
