"""Ops on rows, element by element, as `functions`, for arrays of numpy as for tensors of torch, which has no others."""

from __future__ import annotations

from typing import Any

from ...graph import Value, activation_ops, ops
from ...graph.values import Temperature
from .reference_pass import Array, ReferencePass

Routing = tuple[Array, Array]  # experts and weights [n, used]


def hidden_input(step: ReferencePass, out: Value) -> Array:
    assert step.inputs is not None
    return step.constants(step.inputs).reshape(-1, *out.shape)


def concat(step: ReferencePass, a: Array, b: Array) -> Array:
    return step.xp.concatenate([a, b], axis=1)


def reshape(step: ReferencePass, x: Array, out: Value) -> Array:
    return x.reshape(len(x), *out.shape)


def clamp(step: ReferencePass, x: Array, limit: float) -> Array:
    return x.clip(-limit, limit)


def multiply(step: ReferencePass, x: Array, weight: Array) -> Array:
    return x * weight


def gaussian_top_k(step: ReferencePass, x: Array, factor: float) -> Array:
    centred = x - x.mean(axis=-1, keepdims=True)
    return (centred - factor * (centred * centred).mean(axis=-1, keepdims=True) ** 0.5).clip(min=0)


def gate_heads(step: ReferencePass, x: Array, gate: Array) -> Array:
    return x * (1 / (1 + step.xp.exp(-gate)))[..., None]


def add(step: ReferencePass, a: Array, b: Array, scale: float) -> Array:
    return a + b if scale == 1 else a + scale * b


def scale(step: ReferencePass, x: Array, factor: float) -> Array:
    return x * factor


def scale_by_position(step: ReferencePass, x: Array, temperature: Temperature) -> Array:
    return x * step.on_device(temperature.factors(step.positions)).reshape(-1, *[1] * (x.ndim - 1))


def softcap(step: ReferencePass, x: Array, cap: float) -> Array:
    return step.xp.tanh(x / cap) * cap


def scale_by_routing(step: ReferencePass, x: Array, routing: Routing) -> Array:
    return x[:, None] * routing[1][..., None]


def identity_experts(step: ReferencePass, x: Array, routing: Routing) -> Array:
    experts, weights = routing
    return x * (weights * (experts < 0)).sum(axis=1, keepdims=True)


def combine_experts(step: ReferencePass, x: Array, routing: Routing, weighted: bool) -> Array:
    experts, weights = routing
    factors = weights if weighted else step.xp.ones_like(weights)
    return step.xp.einsum("nuc,nu->nc", x, factors * (experts >= 0))


ELEMENTWISE_FUNCTIONS: dict[Any, Any] = {
    ops.HiddenInput: hidden_input,
    ops.Concat: concat,
    ops.Reshape: reshape,
    ops.GateHeads: gate_heads,
    ops.Add: add,
    ops.Scale: scale,
    ops.ScaleByPosition: scale_by_position,
    ops.SoftCap: softcap,
    ops.ScaleByRouting: scale_by_routing,
    ops.IdentityExperts: identity_experts,
    ops.CombineExperts: combine_experts,
    activation_ops.Clamp: clamp,
    activation_ops.Multiply: multiply,
    activation_ops.GaussianTopK: gaussian_top_k,
}
