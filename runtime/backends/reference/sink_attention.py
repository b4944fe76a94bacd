"""Latent attention with parameter sinks, as `functions`."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...graph.sink_attention_ops import SinkAttention
from .reference_pass import ReferencePass


def sink_attention(
    step: ReferencePass,
    q: np.ndarray,
    latent: np.ndarray,
    k_pe: np.ndarray,
    layer: int,
    scale: float,
    v_width: int,
    k_b: np.ndarray,
    v_b: np.ndarray,
    sinks: np.ndarray,
    sink_k_pe: np.ndarray,
    norm: np.ndarray,
    epsilon: float,
    window: int,
    selection: np.ndarray | None,
) -> np.ndarray:
    (n, heads, width), rank = q.shape, latent.shape[1]
    nope, first = width - k_pe.shape[1], len(sinks)
    to_keys, to_values = k_b.reshape(heads, rank, nope), v_b.reshape(heads, v_width, rank)
    sinks = sinks / np.sqrt(np.square(sinks).mean(axis=1, keepdims=True) + np.float32(epsilon)) * norm
    queries = np.concatenate([np.einsum("nhk,hrk->nhr", q[..., :nope], to_keys), q[..., nope:]], axis=2)  # for latents
    weighted = np.empty((n, heads, rank), np.float32)
    for cache, rows in step.segments:
        latents, rotated = cache.append(layer, "latent", latent[rows]), cache.append(layer, "k_pe", k_pe[rows])
        latents, rotated = np.concatenate([sinks, latents]), np.concatenate([sink_k_pe, rotated])
        scores = np.einsum("nhr,mr->hnm", queries[rows], np.concatenate([latents, rotated], axis=1)) * np.float32(scale)
        seen = _seen(rows.stop - rows.start, len(latents) - first, window, None if selection is None else selection[rows])
        seen = np.concatenate([np.ones((len(seen), first), bool), seen], axis=1)
        scores = np.where(seen, scores, np.float32(-np.inf))
        scores = np.exp(scores - scores.max(axis=2, keepdims=True))
        weighted[rows] = np.einsum("hnm,mr->nhr", scores / scores.sum(axis=2, keepdims=True), latents)
    if observing := step.observing():
        observer, op = observing
        assert isinstance(op, SinkAttention)
        observer.on_head_inputs(op, op.k_b, np.ascontiguousarray(q[..., :nope]))
        observer.on_head_inputs(op, op.v_b, weighted)
    return np.einsum("nhr,hvr->nhv", weighted, to_values)


def _seen(n: int, m: int, window: int, selection: np.ndarray | None) -> np.ndarray:
    """bool [n, m]: which of m keys the last n tokens see; selection: positions [n, top_k], all where the first is -1."""
    distance = np.arange(m - n, m)[:, None] - np.arange(m)
    seen = (distance >= 0) & (distance < window) if window else distance >= 0
    for row, chosen in zip(seen, [] if selection is None else selection, strict=selection is not None):
        if chosen[0] >= 0:
            row &= np.isin(np.arange(m), chosen.astype(np.int64))
    return seen


SINK_ATTENTION_FUNCTIONS: dict[Any, Any] = {SinkAttention: sink_attention}
