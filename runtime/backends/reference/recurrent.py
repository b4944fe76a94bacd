"""Ops with a recurrent state in numpy float32: one function per op, as in `functions`, token by token."""

from __future__ import annotations

from typing import Literal

import numpy as np

from .mixtures import sigmoid
from .reference_pass import ReferenceCache, ReferencePass


def short_convolution(
    step: ReferencePass,
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None,
    layer: int,
    activation: Literal["silu", "none"],
    state: str,
    dilation: int,
) -> np.ndarray:
    out, weight = np.empty_like(x), weight.reshape(weight.shape[0], -1)
    channels, kernel = weight.shape
    past = (kernel - 1) * dilation
    for cache, rows in step.segments:
        n = rows.stop - rows.start
        inputs = np.concatenate([np.zeros((past, channels), np.float32), cache.append(layer, state, x[rows])])
        windows = np.lib.stride_tricks.sliding_window_view(inputs[-(n + past) :], past + 1, axis=0)[..., ::dilation]
        out[rows] = np.einsum("nck,ck->nc", windows, weight)
    if bias is not None:
        out += bias
    return out * sigmoid(out) if activation == "silu" else out


def gated_delta_rule(
    step: ReferencePass,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    alpha: np.ndarray,
    beta: np.ndarray,
    decay: np.ndarray,
    alpha_bias: np.ndarray,
    layer: int,
    tiled: bool,
    epsilon: float,
    lower_bound: float,
) -> np.ndarray:
    (heads, width), key_heads = v.shape[1:], k.shape[1]
    own_key = np.arange(heads) % key_heads if tiled else np.arange(heads) // (heads // key_heads)
    q, k = (x / np.sqrt(np.square(x).sum(axis=-1, keepdims=True) + np.float32(epsilon)) for x in (q[:, own_key], k[:, own_key]))
    alpha = alpha.reshape(len(v), heads, -1)  # one decay for each head's matrix, or for each of its rows
    alpha, decay = alpha + alpha_bias.reshape(heads, -1), decay.reshape(heads, 1)
    logs = np.float32(lower_bound) * sigmoid(np.abs(decay) * alpha) if lower_bound else decay * _softplus(alpha)
    shrink = np.exp(logs)[..., None]
    out, strength = np.empty_like(v), sigmoid(beta)
    for cache, rows in step.segments:
        state, states = _past_state(cache, layer, "delta", (heads, k.shape[2], width)), []
        for t in range(rows.start, rows.stop):
            state = state * shrink[t]
            change = (v[t] - np.einsum("hkv,hk->hv", state, k[t])) * strength[t, :, None]
            state = state + k[t, :, :, None] * change[:, None]
            out[t] = np.einsum("hkv,hk->hv", state, q[t])
            states.append(state)
        cache.append(layer, "delta", np.array(states))
    return out * np.float32(k.shape[2] ** -0.5)


def selective_scan(
    step: ReferencePass,
    x: np.ndarray,
    dt: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    decay: np.ndarray,
    skip: np.ndarray,
    layer: int,
    dt_bias: np.ndarray | None,
) -> np.ndarray:
    heads, width = x.shape[1:]
    b, c = (np.repeat(each, heads // each.shape[1], axis=1) for each in (b, c))
    size = b.shape[2]
    factors = decay.T[None] if dt.ndim == 3 else decay[..., None]
    steps = _softplus(dt if dt_bias is None else dt + dt_bias).reshape(len(x), heads, -1)
    out = np.empty_like(x)
    for cache, rows in step.segments:
        state, states = _past_state(cache, layer, "scan", (heads, size, width)), []
        for t in range(rows.start, rows.stop):
            state = state * np.exp(steps[t][:, None] * factors) + b[t][..., None] * (steps[t] * x[t])[:, None]
            out[t] = np.einsum("hsw,hs->hw", state, c[t])
            states.append(state)
        cache.append(layer, "scan", np.array(states))
    return out + skip.reshape(heads, -1) * x


def _past_state(cache: ReferenceCache, layer: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    past = cache.rows.get((layer, name))
    return np.zeros(shape, np.float32) if not cache.length or past is None else past[cache.length - 1]


def _softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(np.float32(0), x)
