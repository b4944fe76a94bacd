"""Ops with a recurrent state: a prompt goes through them in chunks, of which matrix products make all tokens at once.

With decays d_t of the state S [keys, values] and u_t = what a token adds, S_t = diag(d_t) S_t-1 + k_t u_t^T. Within a chunk,
with D_ts the product of the decays of the tokens after s up to t, q_t S_t is (q_t D_t0) S_0 plus the sum over s <= t of
(q_t D_ts k_s) u_s: a masked product as in attention (arXiv:2405.21060, 2412.06464). Decays are at most 1, and only D_ts with
s <= t are formed, as exponentials of differences of sums, so that nothing overflows.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from ..device_pass import DevicePass
from .elementwise import softplus

_LEAST_LOG = -30.0  # of a decay: what it leaves is below the rounding of float32
_CHUNK = 64  # tokens
_CHUNK_OF_ROWS = 8  # where each row of the state has its own decay: the D_ts are numbers per row


def short_convolution(
    step: DevicePass,
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
    step: DevicePass,
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
    lower_bound: float,
) -> Tensor:
    heads, key_heads = v.shape[1], k.shape[1]
    numbers = torch.arange(heads, device=v.device)
    own_key = numbers % key_heads if tiled else numbers // (heads // key_heads)
    q, k = (x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + epsilon) for x in (q[:, own_key], k[:, own_key]))
    alpha = alpha.reshape(len(v), heads, -1) + alpha_bias.reshape(heads, -1)  # for each head's matrix, or each of its rows
    decay = decay.reshape(heads, 1)
    logs = lower_bound * torch.sigmoid(decay.abs() * alpha) if lower_bound else decay * softplus(alpha)
    out, strength = torch.empty_like(v), torch.sigmoid(beta)
    for cache, rows in step.segments:
        state = cache.state(layer, "delta")
        for chunk in _chunks(rows, _CHUNK if logs.shape[2] == 1 else _CHUNK_OF_ROWS):
            terms = _Chunk(k[chunk], logs[chunk])
            added = strength[chunk].T[..., None] * (v[chunk].transpose(0, 1) - terms.of_state(k[chunk], state))
            if added.shape[1] > 1:  # u_t + strength_t * the sum over s < t of (k_t D_ts k_s) u_s is `added`
                matrix = strength[chunk].T[..., None] * terms.products(k[chunk])
                added = torch.linalg.solve_triangular(matrix, added, upper=False, unitriangular=True)
            out[chunk] = (terms.of_state(q[chunk], state) + terms.products(q[chunk]) @ added).transpose(0, 1)
            state = terms.next_state(state, added)
        cache.write_state(layer, "delta", state)
    return out * k.shape[2] ** -0.5


def _chunks(rows: slice, size: int) -> list[slice]:
    return [slice(first, min(first + size, rows.stop)) for first in range(rows.start, rows.stop, size)]


class _Chunk:
    """What the tokens of a chunk leave of each other and of the state before it.

    k     [tokens, heads, keys]
    logs  [tokens, heads, keys or 1]: logarithms of the decays, at most 0
    """

    def __init__(self, k: Tensor, logs: Tensor):
        self._k, self._sums = k.transpose(0, 1), logs.clamp(min=_LEAST_LOG).cumsum(0).transpose(0, 1)
        count = len(logs)
        later = torch.ones(count, count, dtype=torch.bool, device=k.device).triu(1)
        differences = self._sums[:, :, None] - self._sums[:, None]
        between = differences.masked_fill(later[..., None], -torch.inf).exp()  # D_ts: [heads, t, s, keys or 1]
        self._last = between[:, -1]
        self._between = between[..., 0] if between.shape[3] == 1 else between * self._k[:, None]  # of rows: D_ts k_s

    def products(self, x: Tensor) -> Tensor:
        """x_t D_ts k_s, 0 where s > t: [tokens, heads, keys] -> [heads, t, s]."""
        x = x.transpose(0, 1)
        if self._between.ndim == 3:
            return (x @ self._k.transpose(1, 2)) * self._between
        return (self._between @ x[..., None])[..., 0]

    def of_state(self, x: Tensor, state: Tensor) -> Tensor:
        """x_t D_t0 S_0: [tokens, heads, keys] -> [heads, tokens, values]."""
        return (x.transpose(0, 1) * self._sums.exp()) @ state

    def next_state(self, state: Tensor, added: Tensor) -> Tensor:
        """The state after the chunk. added: u, [heads, tokens, values]."""
        keys = self._k * self._last
        return self._sums[:, -1].exp()[..., None] * state + keys.transpose(1, 2) @ added


def selective_scan(
    step: DevicePass,
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
    steps = softplus(dt if dt_bias is None else dt + dt_bias).reshape(len(x), heads, -1)
    out, inputs = torch.empty_like(x), steps * x
    for cache, rows in step.segments:
        state = cache.state(layer, "scan")
        for chunk in _chunks(rows, _CHUNK if dt.ndim == 2 else _CHUNK_OF_ROWS):
            if dt.ndim == 3:
                states = _every_state(
                    state, torch.exp(steps[chunk, :, None] * decay.T), b[chunk, ..., None] * inputs[chunk, :, None]
                )
                out[chunk], state = (c[chunk, :, None] @ states)[:, :, 0], states[-1]
                continue
            terms, added = _Chunk(b[chunk], steps[chunk] * decay.reshape(heads, 1)), inputs[chunk].transpose(0, 1)
            out[chunk] = (terms.of_state(c[chunk], state) + terms.products(c[chunk]) @ added).transpose(0, 1)
            state = terms.next_state(state, added)
        cache.write_state(layer, "scan", state)
    return out + skip.reshape(heads, -1) * x


def _every_state(state: Tensor, shrink: Tensor, added: Tensor) -> Tensor:
    """The states after each token, where every number of the state has its own decay: [tokens, heads, size, width].

    state [heads, size, width]; shrink: the decays, and added: [tokens, heads, size, width]
    """
    states = []
    for t in range(len(added)):
        state = torch.addcmul(added[t], state, shrink[t])  # nothing in place, so that gradients can be taken
        states.append(state)
    return torch.stack(states)
