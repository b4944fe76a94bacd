"""Attention to compressed entries, as `functions`. What makes the entries, and embeddings of n-grams, are for arrays of numpy
as for tensors of torch, and no other backend has functions for them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...graph import Value, compressed_attention_ops, ops
from ...graph.values import NgramHash
from .reference_pass import Array, ReferencePass


def compress(step: ReferencePass, x: Array, gate: Array, bias: Array, layer: int, state: str, every: int, out: Value) -> Array:
    xp, width = step.xp, out.shape[0]
    series, result = x.shape[1] // width, xp.zeros_like(x[:, :width])
    rows = xp.concatenate([x, gate + bias[step.on_device(step.positions % every)]], axis=1)
    for cache, at in step.segments:
        past = cache.length
        run, end = past // every, (past + at.stop - at.start) // every
        first = max(0, run - series + 1) * every
        kept = cache.extend(layer, state, rows[at], first)
        if run < end:
            runs = kept[: end * every - first].reshape(-1, every, rows.shape[1])
            entries = _entries(xp, runs, series)[run - end :]
            result[at.start + (run + 1) * every - 1 - past : at.stop : every] = entries
    return result


def _entries(xp: Any, runs: Array, series: int) -> Array:
    """Numbers and gates [runs, every, 2 * series * width] -> the entry of each run, [runs, width]."""
    half = runs.shape[2] // 2
    numbers, gates = runs[..., :half], runs[..., half:]
    if series == 2:
        numbers, gates = _with_run_before(xp, numbers, 0.0), _with_run_before(xp, gates, -np.inf)
    weights = xp.exp(gates - xp.amax(gates, axis=1, keepdims=True))
    return (numbers * weights).sum(axis=1) / weights.sum(axis=1)


def _with_run_before(xp: Any, x: Array, fill: float) -> Array:
    """[runs, every, 2 * width] -> [runs, 2 * every, width]: the first halves of the run before, and the second ones."""
    following, own = x[..., : x.shape[2] // 2], x[..., x.shape[2] // 2 :]
    before = xp.concatenate([xp.full_like(following[:1], fill), following[:-1]], axis=0)
    return xp.concatenate([before, own], axis=1)


def average_run(step: ReferencePass, x: Array, layer: int, state: str, every: int) -> Array:
    result = step.xp.zeros_like(x)
    for cache, at in step.segments:
        past = cache.length
        run, end = past // every, (past + at.stop - at.start) // every
        kept = cache.extend(layer, state, x[at], run * every)
        if run < end:
            means = kept[: (end - run) * every].reshape(end - run, every, -1).mean(axis=1)
            result[at.start + (run + 1) * every - 1 - past : at.stop : every] = means
    return result


def ngram_embedding(step: ReferencePass, table: Any, layer: int, ngrams: NgramHash) -> Array:
    out = []
    for cache, at in step.segments:
        tokens = step.tokens[at]
        new = step.on_device((tokens[:, None] + 1).astype(np.float32))
        kept = cache.extend(layer, "tokens", new, cache.length - ngrams.n_past)
        rows = ngrams.rows(step.to_numpy(kept[: ngrams.n_past]), tokens)
        out.append(table[step.on_device(rows)].reshape(len(tokens), -1))
    return step.xp.concatenate(out, axis=0)


def window_attention(
    step: ReferencePass,
    q: np.ndarray,
    kv: np.ndarray,
    layer: int,
    scale: float,
    window: int,
    sinks: np.ndarray,
    entries: np.ndarray | None,
    every: int,
    selection: np.ndarray | None,
) -> np.ndarray:
    out = np.empty_like(q)
    for cache, rows in step.segments:
        past = cache.append(layer, "window", kv[rows])
        kept = past[:0] if entries is None else cache.append(layer, "entries", entries[rows])[every - 1 :: every]
        for at in range(rows.start, rows.stop):
            stop = int(step.positions[at]) + 1
            seen = kept[: stop // every] if every else kept
            if selection is not None and selection[at, 0] >= 0:
                seen = kept[selection[at].astype(np.int64)]
            keys = np.concatenate([past[max(0, stop - window) : stop], seen])
            logits = np.concatenate([q[at] @ keys.T * np.float32(scale), sinks[:, None]], axis=1)
            weights = np.exp(logits - logits.max(axis=1, keepdims=True))
            out[at] = (weights / weights.sum(axis=1, keepdims=True))[:, :-1] @ keys
    return out


def grouped_linear(step: ReferencePass, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    if observing := step.observing():
        observer, op = observing
        observer.on_head_inputs(op, op.weights[0], x)
    n, groups, columns = x.shape
    return np.einsum("ngc,grc->ngr", x, weight.reshape(groups, -1, columns)).reshape(n, -1)


COMPRESSED_ATTENTION_FUNCTIONS: dict[Any, Any] = {
    compressed_attention_ops.Compress: compress,
    compressed_attention_ops.AverageRun: average_run,
    compressed_attention_ops.WindowAttention: window_attention,
    ops.NgramEmbedding: ngram_embedding,
    ops.GroupedLinear: grouped_linear,
}
