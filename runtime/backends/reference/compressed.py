"""The ops of DeepSeek-V4, as `functions`: every token's rows are kept, and entries made from all of them in each pass."""

from __future__ import annotations

import numpy as np

from ...graph import Value, compressed_attention_ops, hyper_connection_ops, ops
from .mixtures import sigmoid
from .step import Step


def compress(
    step: Step, x: np.ndarray, gate: np.ndarray, bias: np.ndarray, layer: int, state: str, every: int, out: Value
) -> np.ndarray:
    (width,), result = out.shape, np.zeros((len(x), *out.shape), np.float32)
    weighed = np.stack([x, gate + bias[step.positions % every]], axis=1)
    for cache, rows in step.segments:
        kept = cache.append(layer, state, weighed[rows])
        for at in range(rows.start, rows.stop):
            stop = int(step.positions[at]) + 1
            if stop % every:
                continue
            numbers, logits = (kept[stop - every : stop, part, x.shape[1] - width :] for part in (0, 1))
            if x.shape[1] > width and stop > every:
                before = kept[stop - 2 * every : stop - every, :, :width]
                numbers, logits = np.concatenate([before[:, 0], numbers]), np.concatenate([before[:, 1], logits])
            weights = np.exp(logits - logits.max(axis=0))
            result[at] = (numbers * weights).sum(axis=0) / weights.sum(axis=0)
    return result


def average_run(step: Step, x: np.ndarray, layer: int, state: str, every: int) -> np.ndarray:
    result = np.zeros_like(x)
    for cache, rows in step.segments:
        kept = cache.append(layer, state, x[rows])
        for at in range(rows.start, rows.stop):
            stop = int(step.positions[at]) + 1
            if stop % every == 0:
                result[at] = kept[stop - every : stop].mean(axis=0)
    return result


def window_attention(
    step: Step,
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


def grouped_linear(step: Step, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    if observing := step.observing():
        observer, op = observing
        observer.on_head_inputs(op, op.weights[0], x)
    n, groups, columns = x.shape
    return np.einsum("ngc,grc->ngr", x, weight.reshape(groups, -1, columns)).reshape(n, -1)


def repeat_streams(step: Step, x: np.ndarray, out: Value) -> np.ndarray:
    return np.repeat(x[:, None], out.shape[0], axis=1)


def stream_weights(
    step: Step, x: np.ndarray, scale: np.ndarray, base: np.ndarray, streams: int, iterations: int, epsilon: float
) -> np.ndarray:
    sizes = [streams, streams, streams * streams][: len(scale)]
    least, numbers = np.float32(epsilon), x * np.repeat(scale, sizes) + base
    before = sigmoid(numbers[:, :streams]) + least
    if len(scale) == 1:
        return before
    behind = 2 * sigmoid(numbers[:, streams : 2 * streams])
    mixed = numbers[:, 2 * streams :].reshape(-1, streams, streams)
    mixed = np.exp(mixed - mixed.max(axis=2, keepdims=True))
    mixed = mixed / mixed.sum(axis=2, keepdims=True) + least
    for i in range(2 * iterations - 1):
        mixed = mixed / (mixed.sum(axis=2 if i % 2 else 1, keepdims=True) + least)
    return np.concatenate([before, behind, mixed.transpose(0, 2, 1).reshape(len(x), -1)], axis=1)


def collapse_streams(step: Step, x: np.ndarray, factors: np.ndarray) -> np.ndarray:
    return np.einsum("nsw,ns->nw", x, factors)


COMPRESSED_FUNCTIONS = {
    compressed_attention_ops.Compress: compress,
    compressed_attention_ops.AverageRun: average_run,
    compressed_attention_ops.WindowAttention: window_attention,
    ops.GroupedLinear: grouped_linear,
    hyper_connection_ops.RepeatStreams: repeat_streams,
    hyper_connection_ops.HyperConnectionWeights: stream_weights,
    hyper_connection_ops.CollapseStreams: collapse_streams,
}
