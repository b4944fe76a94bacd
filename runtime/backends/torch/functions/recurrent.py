"""Ops with a recurrent state, token by token."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from ..step import Step
from .elementwise import softplus


def short_convolution(
    step: Step,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    layer: int,
    activation: Literal["silu", "none"],
    state: str,
    dilation: int,
) -> Tensor:
    out, weight = torch.empty_like(x), weight.reshape(weight.shape[0], -1)
    past = (weight.shape[1] - 1) * dilation
    for cache, rows in step.segments:
        inputs = torch.cat([cache.state(layer, state), x[rows]])
        out[rows] = (inputs.unfold(0, past + 1, 1)[..., ::dilation] * weight).sum(dim=2)
        cache.write_state(layer, state, inputs[len(inputs) - past :].clone())
    out = out if bias is None else out + bias
    return functional.silu(out) if activation == "silu" else out


def gated_delta_rule(
    step: Step,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    beta: Tensor,
    decay: Tensor,
    alpha_bias: Tensor,
    layer: int,
    tiled: bool,
    epsilon: float,
) -> Tensor:
    heads, key_heads = v.shape[1], k.shape[1]
    numbers = torch.arange(heads, device=v.device)
    own_key = numbers % key_heads if tiled else numbers // (heads // key_heads)
    q, k = (x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + epsilon) for x in (q[:, own_key], k[:, own_key]))
    alpha = alpha.reshape(len(v), heads, -1)  # one decay for each head's matrix, or for each of its rows
    shrink = torch.exp(decay.reshape(heads, 1) * softplus(alpha + alpha_bias.reshape(heads, -1)))[..., None]
    out, strength = torch.empty_like(v), torch.sigmoid(beta)[..., None]
    for cache, rows in step.segments:
        state = cache.state(layer, "delta")
        for t in range(rows.start, rows.stop):
            state = state * shrink[t]
            change = (v[t] - (k[t, :, None] @ state)[:, 0]) * strength[t]
            state = state + k[t, :, :, None] * change[:, None]
            out[t] = (q[t, :, None] @ state)[:, 0]
        cache.write_state(layer, "delta", state)
    return out * k.shape[2] ** -0.5


def selective_scan(
    step: Step,
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    decay: Tensor,
    skip: Tensor,
    layer: int,
    dt_bias: Tensor | None,
) -> Tensor:
    heads = x.shape[1]
    b, c = (each.repeat_interleave(heads // each.shape[1], dim=1) for each in (b, c))
    factors = decay.T[None] if dt.ndim == 3 else decay[..., None]
    steps = softplus(dt if dt_bias is None else dt + dt_bias).reshape(len(x), heads, -1)
    out = torch.empty_like(x)
    for cache, rows in step.segments:
        state = cache.state(layer, "scan")
        for t in range(rows.start, rows.stop):
            state = state * torch.exp(steps[t][:, None] * factors) + b[t][..., None] * (steps[t] * x[t])[:, None]
            out[t] = (c[t, :, None] @ state)[:, 0]
        cache.write_state(layer, "scan", state)
    return out + skip.reshape(heads, -1) * x
