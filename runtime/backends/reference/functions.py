"""One function per op in numpy float32; the first axis of every array is that of the tokens.

A function's parameters are the fields of its op by name, values and weights as arrays. An option with a limited number of
values lists them in its annotation: other values are refused when a graph is compiled.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from ...graph import Value, activation_ops, ops
from ...graph.signatures import functions_of, support_of
from ...graph.values import RotaryEmbedding, alibi_slopes, segments
from . import recurrent
from .compressed_attention import COMPRESSED_ATTENTION_FUNCTIONS
from .elementwise import ELEMENTWISE_FUNCTIONS
from .hyper_connections import HYPER_CONNECTION_FUNCTIONS
from .mixtures import expert_linear, route, sigmoid
from .reference_pass import ReferencePass
from .sink_attention import SINK_ATTENTION_FUNCTIONS


def embedding(
    step: ReferencePass, table: np.ndarray, scale: float, by: Literal["token", "position", "segment"], separator: int
) -> np.ndarray:
    rows = step.positions if by == "position" else step.tokens
    if by == "segment":
        rows = segments(step.tokens, step.positions, separator)
    return table[rows] * np.float32(scale)


def linear(step: ReferencePass, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    x = x.reshape(len(x), -1)
    if observing := step.observing():
        observer, op = observing
        observer.on_input(op, op.weights[0], 0, x)
    return x @ weight.T if bias is None else x @ weight.T + bias


def split(step: ReferencePass, x: np.ndarray, sizes: tuple[int, ...], more: tuple[Value, ...]) -> list[np.ndarray]:
    return [np.ascontiguousarray(part) for part in np.split(x, np.cumsum(sizes)[:-1], axis=-1)]


def norm(
    step: ReferencePass,
    x: np.ndarray,
    weight: np.ndarray | None,
    epsilon: float,
    bias: np.ndarray | None,
    kind: Literal["rms", "layer"],
    over: Literal["last", "all"],
) -> np.ndarray:
    rows = x.reshape(len(x), -1) if over == "all" else x
    if kind == "layer":
        rows = rows - rows.mean(axis=-1, keepdims=True)
    scaled = rows / np.sqrt(np.square(rows).mean(axis=-1, keepdims=True) + np.float32(epsilon))
    scaled = scaled if weight is None else scaled * weight
    return (scaled if bias is None else scaled + bias).reshape(x.shape)


def rope(step: ReferencePass, x: np.ndarray, rope: RotaryEmbedding, start: int) -> np.ndarray:
    angles = (step.positions[:, None] + rope.offset) * rope.frequencies
    cos, sin = ((rope.magnitude * f(angles)).astype(np.float32) for f in (np.cos, np.sin))
    if x.ndim == 3:
        cos, sin = cos[:, None], sin[:, None]
    out, half = x.copy(), rope.dims // 2
    if rope.interleaved:
        pairs = slice(start, start + rope.dims, 2), slice(start + 1, start + rope.dims, 2)
    else:
        pairs = slice(start, start + half), slice(start + half, start + rope.dims)
    a, b = x[..., pairs[0]], x[..., pairs[1]]
    out[..., pairs[0]], out[..., pairs[1]] = a * cos - b * sin, a * sin + b * cos
    return out


def attention(
    step: ReferencePass,
    q: np.ndarray,
    k: np.ndarray | None,
    v: np.ndarray | None,
    layer: int,
    scale: float,
    window: int,
    softcap: float,
    sinks: np.ndarray | None,
    chunked: bool,
    selection: np.ndarray | None,
    block: int,
    alibi: float,
    causal: bool,
    out: Value,
) -> np.ndarray:
    result = np.empty((len(q), *out.shape), np.float32)
    for cache, rows in step.segments:
        if k is None or v is None:
            keys, values = cache.rows[layer, "k"], cache.rows[layer, "v"]
        else:
            keys, values = cache.append(layer, "k", k[rows]), cache.append(layer, "v", v[rows])
        hidden = None
        if chunked:
            position = np.arange(len(keys)) // window
            hidden = position[len(keys) - len(q[rows]) :, None] != position
        if selection is not None:
            hidden = _not_in_blocks(selection[rows], len(keys), block, q.shape[1])
        options = {"hidden": hidden, "alibi": alibi, "causal": causal}
        weights = _attention_weights(q[rows], keys, scale, 0 if chunked else window, softcap, sinks, **options)
        result[rows] = np.einsum("hnm,mhw->nhw", weights, _for_each_head(values, q.shape[1]))
    return result


def _for_each_head(rows: np.ndarray, heads: int) -> np.ndarray:
    """Keys or values [m, kv heads, width] -> [m, heads, width]."""
    return np.repeat(rows, heads // rows.shape[1], axis=1)


def _attention_weights(
    q: np.ndarray,
    keys: np.ndarray,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: np.ndarray | None = None,
    hidden: np.ndarray | None = None,
    alibi: float = 0.0,
    causal: bool = True,
) -> np.ndarray:
    """Softmax of the scores of the last n tokens' queries [n, heads, width] over keys [m, kv heads, width]: [heads, n, m].
    hidden: bool [n, m] or [heads, n, m], keys that are not seen besides."""
    n, heads, m = q.shape[0], q.shape[1], len(keys)
    scores = np.einsum("nhw,mhw->hnm", q, _for_each_head(keys, heads)) * np.float32(scale)
    if softcap:
        scores = np.tanh(scores / np.float32(softcap)) * np.float32(softcap)
    distance = np.arange(m - n, m)[:, None] - np.arange(m)
    if alibi:
        scores -= alibi_slopes(heads, alibi)[:, None, None] * np.abs(distance).astype(np.float32)
    if causal:
        unseen = (distance < 0) | (distance >= window) if window else distance < 0
    else:
        unseen = np.abs(distance) > window // 2 if window else np.zeros(distance.shape, bool)
    scores = np.where(unseen if hidden is None else unseen | hidden, np.float32(-np.inf), scores)
    if sinks is not None:
        scores = np.concatenate([scores, np.broadcast_to(sinks[:, None, None], (heads, n, 1))], axis=2)
    scores = np.exp(scores - scores.max(axis=2, keepdims=True))
    return (scores / scores.sum(axis=2, keepdims=True))[..., :m]


def latent_attention(
    step: ReferencePass,
    q: np.ndarray,
    latent: np.ndarray,
    k_pe: np.ndarray,
    layer: int,
    scale: float,
    v_width: int,
    prefix: str,
    kv_b: np.ndarray | None,
    k_b: np.ndarray | None,
    v_b: np.ndarray | None,
    selection: np.ndarray | None,
) -> np.ndarray:
    (n, heads, width), rank = q.shape, latent.shape[1]
    nope = width - k_pe.shape[1]
    if kv_b is not None:
        both = kv_b.reshape(heads, nope + v_width, rank)
        to_keys, to_values = both[:, :nope], both[:, nope:]
    else:
        assert k_b is not None
        assert v_b is not None
        to_keys, to_values = k_b.reshape(heads, rank, nope).transpose(0, 2, 1), v_b.reshape(heads, v_width, rank)
    weighted = np.empty((n, heads, rank), np.float32)  # each head's sum of the latents that it attends to
    for cache, rows in step.segments:
        latents, rotated = cache.append(layer, "latent", latent[rows]), cache.append(layer, "k_pe", k_pe[rows])
        keys = np.concatenate(
            [
                np.einsum("mr,hkr->mhk", latents, to_keys),
                np.broadcast_to(rotated[:, None], (len(rotated), heads, k_pe.shape[1])),
            ],
            axis=2,
        )
        hidden = None if selection is None else _not_selected(selection[rows], len(keys))
        weighted[rows] = np.einsum("hnm,mr->nhr", _attention_weights(q[rows], keys, scale, hidden=hidden), latents)
    if observing := step.observing():
        observer, op = observing
        assert isinstance(op, ops.LatentAttention)
        kv, k, v = op.observed
        observer.on_input(op, kv, 0, latent)
        observer.on_head_inputs(op, k, np.ascontiguousarray(q[..., :nope]))
        observer.on_head_inputs(op, v, weighted)
    return np.einsum("nhr,hvr->nhv", weighted, to_values)


def _not_selected(selection: np.ndarray, m: int) -> np.ndarray:
    """Positions [n, top_k] -> bool [n, m]; none where the first is -1."""
    hidden = selection[:, :1] >= 0 if m else np.zeros((len(selection), 0), bool)
    hidden = np.repeat(hidden, m, axis=1)
    for row, chosen in zip(hidden, selection, strict=True):
        row[chosen[chosen >= 0].astype(np.int64)] = False
    return hidden


def _not_in_blocks(selection: np.ndarray, m: int, block: int, heads: int) -> np.ndarray:
    """Blocks [n, index heads, top_k] -> bool [heads, n, m]; none where the first is -1."""
    hidden = np.repeat(selection[:, :, :1] >= 0, m, axis=2)
    for row, chosen in zip(hidden.reshape(-1, m), selection.reshape(-1, selection.shape[2]), strict=True):
        if chosen[0] >= 0:
            row[np.isin(np.arange(m) // block, chosen)] = False
    return np.repeat(hidden.transpose(1, 0, 2), heads // selection.shape[1], axis=0)


def select_blocks(
    step: ReferencePass, q: np.ndarray, k: np.ndarray, layer: int, block: int, top_k: int, local: int
) -> np.ndarray:
    out = np.full((len(q), q.shape[1], top_k), -1, np.float32)
    for cache, rows in step.segments:
        keys = cache.append(layer, "index_k", k[rows])
        for at in range(rows.start, rows.stop):
            count = step.positions[at] // block + 1  # of blocks up to the token's own
            if count > top_k:
                scores = q[at] @ keys[: step.positions[at] + 1].T
                best = np.maximum.reduceat(scores, np.arange(0, scores.shape[1], block), axis=1)
                best[:, max(0, count - local) :] = np.inf
                out[at] = np.argsort(-best, axis=1, kind="stable")[:, :top_k]
    return out


def select_keys(
    step: ReferencePass,
    q: np.ndarray,
    k: np.ndarray,
    factors: np.ndarray | None,
    layer: int,
    top_k: int,
    every: int,
    open_run: bool,
) -> np.ndarray:
    out = np.full((len(q), top_k + open_run), -1, np.float32)
    for cache, rows in step.segments:
        keys = cache.append(layer, "index_k", k[rows])[every - 1 :: every]
        for at in range(rows.start, rows.stop):
            count = (step.positions[at] + 1) // every
            if count > top_k:
                products = np.maximum(q[at] @ keys[:count].T, 0)
                scores = products.sum(axis=0) if factors is None else factors[at] @ products
                out[at, :top_k], out[at, top_k:] = np.argpartition(-scores, top_k)[:top_k], count
    return out


def activation(step: ReferencePass, x: np.ndarray, function: Literal["silu", "gelu", "gelu_erf", "squared_relu"]) -> np.ndarray:
    if function == "silu":
        return x * sigmoid(x)
    if function == "gelu":
        return x / 2 * (1 + np.tanh(np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x**3)))
    if function == "gelu_erf":
        erf = np.array([math.erf(value) for value in (x * np.float32(np.sqrt(0.5))).reshape(-1)], np.float32)
        return x / 2 * (1 + erf.reshape(x.shape))
    return np.square(np.maximum(x, 0))


def xielu(step: ReferencePass, x: np.ndarray, alpha_p: float, alpha_n: float, beta: float, epsilon: float) -> np.ndarray:
    above = np.float32(alpha_p) * x * x
    below = np.float32(alpha_n) * (np.expm1(np.minimum(x, np.float32(epsilon))) - x)
    return np.where(x > 0, above, below) + np.float32(beta) * x


def softplus_gate(step: ReferencePass, gate: np.ndarray, x: np.ndarray) -> np.ndarray:
    return (x.reshape(*gate.shape, -1) * np.logaddexp(np.float32(0), gate)[..., None]).reshape(x.shape)


def gated_activation(
    step: ReferencePass,
    gate: np.ndarray,
    up: np.ndarray,
    function: Literal["silu", "gelu", "gelu_erf", "sigmoid", "clamped_silu", "clamped_swish", "identity"],
    limit: float,
) -> np.ndarray:
    if function == "identity":
        return gate * up
    if limit:
        up = np.clip(up, np.float32(-limit), np.float32(limit))
    if function == "clamped_silu":
        return np.minimum(gate * sigmoid(gate), np.float32(limit)) * up
    gate = np.minimum(gate, np.float32(limit)) if limit else gate
    if function == "clamped_swish":
        return gate * sigmoid(np.float32(1.702) * gate) * (up + 1)
    if function == "sigmoid":
        return sigmoid(gate) * up
    return activation(step, gate, function) * up


def sigmoid_gate(step: ReferencePass, x: np.ndarray, y: np.ndarray, gate: np.ndarray) -> np.ndarray:
    return y * sigmoid(x @ gate)[:, None]


_BY_CLASS = {
    **ELEMENTWISE_FUNCTIONS,
    ops.Embedding: embedding,
    ops.Linear: linear,
    ops.Split: split,
    ops.Norm: norm,
    ops.Rope: rope,
    ops.Attention: attention,
    ops.LatentAttention: latent_attention,
    ops.ShortConvolution: recurrent.short_convolution,
    ops.GatedDeltaRule: recurrent.gated_delta_rule,
    ops.SelectiveScan: recurrent.selective_scan,
    ops.SelectKeys: select_keys,
    ops.SelectBlocks: select_blocks,
    ops.Activation: activation,
    activation_ops.Xielu: xielu,
    activation_ops.SoftplusGate: softplus_gate,
    ops.GatedActivation: gated_activation,
    ops.Route: route,
    ops.ExpertLinear: expert_linear,
    ops.SigmoidGate: sigmoid_gate,
    **HYPER_CONNECTION_FUNCTIONS,
    **COMPRESSED_ATTENTION_FUNCTIONS,
    **SINK_ATTENTION_FUNCTIONS,
}
FUNCTIONS = functions_of(_BY_CLASS)
SUPPORT = support_of(FUNCTIONS)
