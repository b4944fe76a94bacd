"""The ops of DeepSeek-V4 and Qwen 4 Exp. States are the last rows in order; entries are made and attended to for a whole pass
at once."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ....graph import Value, compressed_attention_ops, hyper_connection_ops, ops
from ....graph.values import NgramHash
from ..step import Step, to_numpy
from ..weights import Matrix


def compress(step: Step, x: Tensor, gate: Tensor, bias: Tensor, layer: int, state: str, every: int, out: Value) -> Tensor:
    width, columns = out.shape[0], x.shape[1]
    rows = torch.cat([x, gate + bias[step.on_device(step.positions % every)]], dim=1)
    result = torch.zeros((len(x), width), device=x.device)
    for cache, at in step.segments:
        past, before = cache.length, cache.state(layer, state)
        kept = torch.cat([before, rows[at]])  # from position past - len(before) on
        cache.write_state(layer, state, kept[len(kept) - len(before) :].clone())
        run, end = past // every, (past + at.stop - at.start) // every
        if run == end:
            continue
        first = (run - len(before) // every + 1) * every - past + len(before)
        runs = kept[first : first + (end - run - 1) * every + len(before)].reshape(-1, every, 2 * columns)
        numbers, gates = runs[..., columns - width : columns], runs[..., 2 * columns - width :]
        if columns > width:
            earlier = runs[:-1, :, columns : columns + width].clone()
            earlier[: run == 0] = -torch.inf
            numbers, gates = torch.cat([runs[:-1, :, :width], numbers[1:]], 1), torch.cat([earlier, gates[1:]], 1)
        entries = (numbers * torch.softmax(gates, dim=1)).sum(dim=1)
        result[at.start + (run + 1) * every - 1 - past : at.stop : every] = entries
    return result


def average_run(step: Step, x: Tensor, layer: int, state: str, every: int) -> Tensor:
    result = torch.zeros_like(x)
    for cache, at in step.segments:
        past, before = cache.length, cache.state(layer, state)
        kept = torch.cat([before, x[at]])  # from position past - every on
        cache.write_state(layer, state, kept[len(kept) - every :].clone())
        run, end = past // every, (past + at.stop - at.start) // every
        if run < end:
            first = (run + 1) * every - past
            runs = kept[first : first + (end - run) * every].reshape(end - run, every, -1)
            result[at.start + (run + 1) * every - 1 - past : at.stop : every] = runs.mean(dim=1)
    return result


def ngram_embedding(step: Step, table: Matrix, layer: int, ngrams: NgramHash) -> Tensor:
    out = []
    for cache, at in step.segments:
        before, new = cache.state(layer, "tokens"), step.tokens[at]
        numbers = ngrams.rows(to_numpy(before), new)
        out.append(table.gather(step.on_device(numbers.reshape(-1))).reshape(len(new), -1))
        kept = torch.cat([before, step.on_device((new[:, None] + 1).astype(np.float32))])
        cache.write_state(layer, "tokens", kept[len(kept) - ngrams.n_past :].clone())
    return torch.cat(out)


def match_streams(step: Step, x: Tensor, y: Tensor) -> Tensor:
    products = (x * y).sum(dim=-1) / x.shape[-1] ** 0.5
    return torch.sign(products) * products.abs().clamp_min(1e-6).sqrt()


def window_attention(
    step: Step,
    q: Tensor,
    kv: Tensor,
    layer: int,
    scale: float,
    window: int,
    sinks: Tensor,
    entries: Tensor | None,
    every: int,
    selection: Tensor | None,
) -> Tensor:
    out = torch.empty_like(q)
    for cache, at in step.segments:
        past, n = cache.length, at.stop - at.start
        keys = torch.cat([cache.state(layer, "window"), kv[at]])
        cache.write_state(layer, "window", keys[n:].clone())
        positions = torch.arange(past, past + n, device=q.device)[:, None]
        near = torch.arange(past - window, past + n, device=q.device)
        hidden = (near < 0) | (near > positions) | (near <= positions - window)
        if entries is not None:
            cache.write(layer, "entries", entries[at, None])
            count = (past + n) // every
            unseen = torch.arange(count, device=q.device) >= (positions + 1) // every
            if selection is not None:
                chosen, padded = selection[at].long(), torch.ones((n, count + 1), dtype=torch.bool, device=q.device)
                padded.scatter_(1, torch.where(chosen < 0, count, chosen), False)
                unseen |= padded[:, :count] & (chosen[:, :1] >= 0)
            keys = torch.cat([keys, cache.read(layer, "entries", 0, count)[0]])
            hidden = torch.cat([hidden, unseen], dim=1)
        results, queries = out[at], q[at]
        for rows in step.row_blocks(n, 8 * q.shape[1] * len(keys)):
            scores = (queries[rows] @ keys.T * scale).masked_fill(hidden[rows, None], -torch.inf)
            scores = torch.cat([scores, sinks[None, :, None].expand(len(scores), -1, 1)], dim=2)
            results[rows] = torch.softmax(scores, dim=2)[..., :-1] @ keys
    return out


def grouped_linear(step: Step, x: Tensor, weight: Matrix) -> Tensor:
    if observing := step.observing():
        observer, op = observing
        observer.on_head_inputs(op, op.weights[0], to_numpy(x))
    n, groups, columns = x.shape
    return torch.einsum("ngc,grc->ngr", x, weight.decoded().reshape(groups, -1, columns)).reshape(n, -1)


def repeat_streams(step: Step, x: Tensor, out: Value) -> Tensor:
    return x[:, None].expand(-1, out.shape[0], -1).contiguous()


def stream_weights(step: Step, x: Tensor, scale: Tensor, base: Tensor, streams: int, iterations: int, epsilon: float) -> Tensor:
    before = torch.sigmoid(x[:, :streams] * scale[0] + base[:streams]) + epsilon
    if len(scale) == 1:
        return before
    behind = 2 * torch.sigmoid(x[:, streams : 2 * streams] * scale[1] + base[streams : 2 * streams])
    mixed = (x[:, 2 * streams :] * scale[2] + base[2 * streams :]).reshape(-1, streams, streams)
    mixed = torch.softmax(mixed, dim=2) + epsilon
    for turn in range(2 * iterations - 1):
        mixed = mixed / (mixed.sum(dim=2 if turn % 2 else 1, keepdim=True) + epsilon)
    return torch.cat([before, behind, mixed.transpose(1, 2).reshape(len(x), -1)], dim=1)


def collapse_streams(step: Step, x: Tensor, factors: Tensor) -> Tensor:
    return (factors[:, None] @ x)[:, 0]


COMPRESSED_FUNCTIONS = {
    compressed_attention_ops.Compress: compress,
    compressed_attention_ops.AverageRun: average_run,
    ops.NgramEmbedding: ngram_embedding,
    hyper_connection_ops.MatchStreams: match_streams,
    compressed_attention_ops.WindowAttention: window_attention,
    ops.GroupedLinear: grouped_linear,
    hyper_connection_ops.RepeatStreams: repeat_streams,
    hyper_connection_ops.HyperConnectionWeights: stream_weights,
    hyper_connection_ops.CollapseStreams: collapse_streams,
}
