"""Attention to a window and to compressed entries, for a whole pass at once; matrices of groups of heads."""

from __future__ import annotations

import torch
from torch import Tensor

from ..device_pass import DevicePass, to_numpy
from ..weights import Matrix


def window_attention(
    step: DevicePass,
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


def grouped_linear(step: DevicePass, x: Tensor, weight: Matrix) -> Tensor:
    if observing := step.observing():
        observer, op = observing
        observer.on_head_inputs(op, op.weights[0], to_numpy(x))
    n, groups, columns = x.shape
    return torch.einsum("ngc,grc->ngr", x, weight.decoded().reshape(groups, -1, columns)).reshape(n, -1)
