"""Ops on rows: tables, products, norms, rotations, activations, sums."""

from __future__ import annotations

from itertools import takewhile
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from ....graph import Value, ops
from ....graph.values import RotaryEmbedding, segments
from ..device_pass import DevicePass, to_numpy
from ..triton import row_kernels
from ..weights import Matrix
from .attention import turned_later


def embedding(
    step: DevicePass, table: Matrix, scale: float, by: Literal["token", "position", "segment"], separator: int
) -> Tensor:
    rows = step.positions if by == "position" else step.tokens
    if by == "segment":
        rows = segments(step.tokens, step.positions, separator)
    return table.gather(step.on_device(rows)) * scale


def linear(step: DevicePass, x: Tensor, weight: Matrix, bias: Tensor | None) -> Tensor:
    x = x.reshape(len(x), -1)
    if observing := step.observing():
        observer, op = observing
        observer.on_input(op, op.weights[0], 0, to_numpy(x))
    out = _product(step, x, weight)
    return out if bias is None else out + bias


def _product(step: DevicePass, x: Tensor, weight: Matrix) -> Tensor:
    """With those of the ops behind that multiply the same few vectors."""
    op, value = step.op, getattr(step.op, "x", None)
    if op is not None and op.outputs[0].index in step.ahead:
        return step.ahead.pop(op.outputs[0].index)[0]
    prepared = step.prepared_of(value)
    if value is None or not step.is_small or step.is_exact or step.kernels(row_kernels) is None:
        return weight.multiply(x, prepared)
    others = list(takewhile(lambda other: isinstance(other, ops.Linear) and other.x == value, step.followers))
    out, *more = weight.multiply_together([step.weights.matrix(other.weights[0], step.device) for other in others], x, prepared)
    step.ahead |= {other.outputs[0].index: [result] for other, result in zip(others, more, strict=False)}
    return out


def split(step: DevicePass, x: Tensor, sizes: tuple[int, ...], more: tuple[Value, ...]) -> tuple[Tensor, ...]:
    return torch.split(x, list(sizes), dim=-1)


def add(step: DevicePass, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """With the norm of the sum, where that comes next."""
    op, kernels = step.following, step.kernels(row_kernels)
    if kernels and isinstance(op, ops.Norm) and step.op is not None and op.x == step.op.out and a.shape == b.shape:
        weight = None if op.weight is None else step.weights.vector(op.weight, step.device)
        if _is_simple(op.kind, weight, op.bias) and a.ndim == 2 and kernels.can_norm(a):
            out, *step.ahead[op.out.index] = kernels.norm(a, weight, op.epsilon, step.wanted, b, scale)
            return out
    return a + b if scale == 1 else a + scale * b


def _is_simple(kind: str, weight: Tensor | None, bias: object) -> bool:
    """Whether a kernel computes a norm."""
    return kind == "rms" and bias is None and (weight is None or weight.ndim == 1)


def norm(
    step: DevicePass,
    x: Tensor,
    weight: Tensor | None,
    epsilon: float,
    bias: Tensor | None,
    kind: Literal["rms", "layer"],
    over: Literal["last", "all"],
) -> Tensor:
    if step.op is not None and step.op.outputs[0].index in step.ahead:
        return step.prepares(*step.ahead.pop(step.op.outputs[0].index))
    rows = x.reshape(len(x), -1) if over == "all" else x
    kernels = step.kernels(row_kernels)
    if kernels and _is_simple(kind, weight, bias) and kernels.can_norm(rows):
        return step.prepares(*kernels.norm(rows, weight, epsilon, step.wanted)[1:]).reshape(x.shape)
    if kind == "layer":
        rows = rows - rows.mean(dim=-1, keepdim=True)
    scaled = rows * torch.rsqrt(rows.square().mean(dim=-1, keepdim=True) + epsilon)
    scaled = scaled if weight is None else scaled * weight
    return (scaled if bias is None else scaled + bias).reshape(x.shape)


def rope(step: DevicePass, x: Tensor, rope: RotaryEmbedding, start: int) -> Tensor:
    cos, sin = step.rotations(rope)
    if step.op is not None and step.op.outputs[0].index in step.turns:
        return x
    if later := turned_later(step, step.op):
        step.turns |= {value.index: (cos, sin, start, rope.interleaved) for value in later}
        return x
    if kernels := step.kernels(row_kernels):
        return kernels.rotated(x, cos, sin, start, rope.interleaved)
    if x.ndim == 3:
        cos, sin = cos[:, None], sin[:, None]
    out, half = x.clone(), rope.dims // 2
    if rope.interleaved:
        first, second = slice(start, start + rope.dims, 2), slice(start + 1, start + rope.dims, 2)
    else:
        first, second = slice(start, start + half), slice(start + half, start + rope.dims)
    a, b = x[..., first], x[..., second]
    out[..., first], out[..., second] = a * cos - b * sin, a * sin + b * cos
    return out


def activation(step: DevicePass, x: Tensor, function: Literal["silu", "gelu", "gelu_erf", "squared_relu"]) -> Tensor:
    if function == "silu":
        return functional.silu(x)
    if function == "gelu":
        return functional.gelu(x, approximate="tanh")
    if function == "gelu_erf":
        return functional.gelu(x)
    return functional.relu(x).square()


def gated_activation(
    step: DevicePass,
    gate: Tensor,
    up: Tensor,
    function: Literal["silu", "gelu", "gelu_erf", "sigmoid", "clamped_silu", "clamped_swish", "identity"],
    limit: float,
) -> Tensor:
    if function == "identity":
        return gate * up
    kernels = step.kernels(row_kernels)
    if kernels and function in ("silu", "gelu") and not limit:
        return step.prepares(*kernels.gated(gate, up, function == "gelu", step.wanted))
    up = up.clamp(-limit, limit) if limit else up
    if function == "clamped_silu":
        return functional.silu(gate).clamp(max=limit) * up
    gate = gate.clamp(max=limit) if limit else gate
    if function == "clamped_swish":
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    if function == "sigmoid":
        return torch.sigmoid(gate) * up
    return activation(step, gate, function) * up


def xielu(step: DevicePass, x: Tensor, alpha_p: float, alpha_n: float, beta: float, epsilon: float) -> Tensor:
    below = alpha_n * (torch.expm1(x.clamp(max=epsilon)) - x)
    return torch.where(x > 0, alpha_p * x * x, below) + beta * x


def softplus(x: Tensor) -> Tensor:
    """ln(1 + e^x), without the straight line that torch's own has for large x."""
    return torch.logaddexp(torch.zeros((), device=x.device), x)


def softplus_gate(step: DevicePass, gate: Tensor, x: Tensor) -> Tensor:
    return (x.reshape(*gate.shape, -1) * softplus(gate)[..., None]).reshape(x.shape)


def sigmoid_gate(step: DevicePass, x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    return y * torch.sigmoid((x * gate).sum(dim=-1))[:, None]
