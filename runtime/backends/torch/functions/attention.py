"""Attention over the caches of sequences, and the choice of the keys that it sees.

Scores and sums are float32, whatever the type of the cache; for as many queries at a time as `DevicePass.scratch` bytes hold
the scores of.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .....data_classes import dataclass
from ....graph import Value, ops
from ....graph.values import alibi_slopes
from ..cache import DeviceCache, FixedRows, rotate
from ..device_pass import DevicePass, joined, to_numpy
from ..triton import attention_kernels
from ..weights import Matrix


@dataclass(frozen=True)
class Sight:
    """Which keys queries see, and how scores become weights: fields of `ops.Attention`. allowed: of the rows of a block of
    queries and m keys bool [n, m] or [heads, n, m], or None."""

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None
    chunked: bool = False
    alibi: float = 0.0
    causal: bool = True
    allowed: Any = None

    def keys(self, first: int | Tensor, last: int | Tensor, length: int) -> range:
        """The keys that any of the queries at positions first ... last may see, of `length`; all where only the device knows
        these positions."""
        if isinstance(first, Tensor) or isinstance(last, Tensor):
            return range(length)
        stop = last + 1 if self.causal else length
        if not self.window or not self.causal:
            return range(stop)
        return range(first // self.window * self.window if self.chunked else max(0, first - self.window + 1), stop)

    def unseen(self, positions: Tensor, keys: Tensor) -> Tensor:
        """bool [n, m]."""
        distance = positions[:, None] - keys
        if not self.causal:
            return distance.abs() > self.window // 2 if self.window else torch.zeros_like(distance, dtype=torch.bool)
        unseen = distance < 0
        if self.chunked:
            return unseen | (positions[:, None] // self.window != keys // self.window)
        return unseen | (distance >= self.window) if self.window else unseen


def attend(step: DevicePass, q: Tensor, keys: Tensor, values: Tensor, sight: Sight, past: int | Tensor | None = None) -> Tensor:
    """Queries [n, heads, width] over keys and values [kv heads, m, width] -> [n, heads, v_width]. past: the position of the
    first of them; None: they are of the last n tokens.

    Where gradients are taken and all scores of the pass would need more than `scratch` bytes, they are computed again for the
    gradient instead of being kept."""
    (n, heads, _), m = q.shape, keys.shape[1]
    slopes = step.on_device(alibi_slopes(heads, sight.alibi))[:, None, None] if sight.alibi else None
    is_large = torch.is_grad_enabled() and 8 * heads * n * m * len(step.segments) > step.scratch
    blocks, parts = step.row_blocks(n, 8 * heads * m), []
    for rows, own in zip(blocks, q.split([rows.stop - rows.start for rows in blocks]), strict=True):
        arguments = own, keys, values, sight, slopes, rows, m - n if past is None else past
        if is_large:
            parts.append(checkpoint(_attend_rows, *arguments, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(_attend_rows(*arguments))
    return joined(parts)


def _attend_rows(
    q: Tensor, keys: Tensor, values: Tensor, sight: Sight, slopes: Tensor | None, rows: slice, past: int | Tensor
) -> Tensor:
    """As `attend`, of these rows of the queries; past: keys before the first one's. [rows, heads, v_width]."""
    (count, heads, width), kv_heads = q.shape, len(keys)
    seen = sight.keys(past + rows.start, past + rows.stop - 1, keys.shape[1])
    positions = torch.arange(rows.start, rows.stop, device=q.device) + past
    numbers = torch.arange(seen.start, seen.stop, device=q.device)
    grouped = q.transpose(0, 1).reshape(kv_heads, -1, width)
    scores = (grouped @ keys[:, seen.start : seen.stop].transpose(1, 2)).view(heads, count, len(seen)) * sight.scale
    if sight.softcap:
        scores = torch.tanh(scores / sight.softcap) * sight.softcap
    if slopes is not None:
        scores = scores - slopes * (positions[:, None] - numbers).abs()
    scores = scores.masked_fill(sight.unseen(positions, numbers), -torch.inf)
    if sight.allowed is not None:
        scores = scores.masked_fill(~sight.allowed(rows, seen), -torch.inf)
    if sight.sinks is not None:
        scores = torch.cat([scores, sight.sinks[:, None, None].expand(heads, count, 1)], dim=2)
    weights = torch.softmax(scores, dim=2)[..., : len(seen)]
    mixed = weights.reshape(kv_heads, -1, len(seen)) @ values[:, seen.start : seen.stop]
    return mixed.view(heads, count, -1).transpose(0, 1)


def attention(
    step: DevicePass,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    layer: int,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    chunked: bool,
    selection: Tensor | None,
    block: int,
    alibi: float,
    causal: bool,
    out: Value,
) -> Tensor:
    if k is not None and v is not None and takes_new(step, step.op):
        cache, sight = step.segments[0][0], Sight(scale, window, softcap, sinks, chunked, alibi, causal)
        kernels, slopes = attention_kernels(step.device), step.on_device(alibi_slopes(q.shape[1], alibi)) if alibi else None
        rows, op = (cache.stored(layer, "k"), cache.stored(layer, "v")), step.op
        turn = step.turns.get(op.q.index) if isinstance(op, ops.Attention) else None
        mixed, made = kernels.attend(q, *rows, cache.length, sight, slopes, kernels.New(k, v, turn))
        return step.prepares(mixed, made).reshape(len(q), *out.shape)
    parts, written = [], [step.split(x) for x in (k, v) if x is not None]
    for number, ((cache, rows), own) in enumerate(zip(step.segments, step.split(q), strict=True)):
        cache.write_all(layer, {name: new[number] for name, new in zip(("k", "v"), written, strict=False)})
        allowed = None if selection is None else _blocks(selection[rows], block, q.shape[1])
        sight = Sight(scale, window, softcap, sinks, chunked, alibi, causal, allowed)
        parts.append(attend_cached(step, own, cache, layer, ("k", "v"), cache.length, sight))
    return joined(parts).reshape(len(q), *out.shape)


def takes_new(step: DevicePass, op: Any) -> bool:
    """Whether the kernel of an attention takes keys and values of its own tokens, and writes them to the cache."""
    if len(step.segments) != 1 or not isinstance(step.segments[0][0], FixedRows) or not isinstance(op, ops.Attention):
        return False
    cache, kernels = step.segments[0][0], step.kernels(attention_kernels)
    if not kernels or op.k is None or op.v is None or op.selection is not None or not op.causal:
        return False
    names = ("k", "v")
    if len(step.tokens) > kernels.MOST_NEW or any(cache.rotation(op.layer, name) for name in names):
        return False
    return all(cache.stored(op.layer, name).is_floating_point() for name in names)


def turned_later(step: DevicePass, rope: Any) -> tuple[Value, Value] | None:
    """Queries and keys whose rotation, by the op `rope` and another one behind, is left to the attention's kernel, or None."""
    op = next((op for op in step.followers if isinstance(op, ops.Attention)), None)
    if op is None or op.k is None or op.q != rope.out or not takes_new(step, op):
        return None
    other = next((each for each in step.followers if isinstance(each, ops.Rope) and each.out == op.k), None)
    is_alike = other is not None and other.rope is rope.rope and other.start == rope.start
    return (op.q, op.k) if is_alike and all(step.readers[value.index] == 1 for value in (op.q, op.k)) else None


def attend_cached(
    step: DevicePass,
    q: Tensor,
    cache: Any,
    layer: int,
    names: tuple[str, str],
    past: Any,
    sight: Sight,
    width: int | None = None,
) -> Tensor:
    """`attend` over the rows of keys and values of a layer, of these names, up to those of the queries; past: the rows before;
    width: of values, the first so many of a row. Where rows are rotated in memory, queries are rotated too, and the results
    back."""
    of_keys, of_values = (cache.rotation(layer, name) for name in names)
    kernels = step.kernels(attention_kernels)
    if kernels and sight.allowed is None and sight.causal and width is None and isinstance(cache, DeviceCache | FixedRows):
        rows = [cache.stored(layer, name) for name in names]
        if all(row.is_floating_point() for row in rows):
            slopes = step.on_device(alibi_slopes(q.shape[1], sight.alibi)) if sight.alibi else None
            out, made = kernels.attend(rotate(q, of_keys), *rows, past, sight, slopes)
            is_whole = len(step.segments) == 1 and not of_values
            return step.prepares(rotate(out, of_values), made if is_whole else None)
    end = past + len(q)
    keys = cache.read_rotated(layer, names[0], 0, end)
    values = keys if names[0] == names[1] else cache.read_rotated(layer, names[1], 0, end)
    return rotate(attend(step, rotate(q, of_keys), keys, values[..., :width], sight, past), of_values)


def _chosen(selection: Tensor, size: int) -> Tensor:
    """Numbers [..., top_k], as float32, to bool [..., size]; where the first is -1, all."""
    chosen = torch.zeros((*selection.shape[:-1], size), dtype=torch.bool, device=selection.device)
    chosen.scatter_(-1, selection.clamp(0, size - 1).long(), True)
    return chosen | (selection[..., :1] < 0)


def _blocks(selection: Tensor, block: int, heads: int) -> Any:
    """Blocks [n, index heads, top_k] -> (rows, keys) -> bool [heads, n, m]."""

    def allowed(rows: slice, keys: range) -> Tensor:
        part = selection[rows]
        numbers = torch.arange(keys.start, keys.stop, device=part.device) // block
        chosen = _chosen(part, -(-keys.stop // block) + 1)[..., numbers]  # one more: an open run may not have begun
        return chosen.transpose(0, 1).repeat_interleave(heads // part.shape[1], dim=0)

    return allowed


def latent_attention(
    step: DevicePass,
    q: Tensor,
    latent: Tensor,
    k_pe: Tensor,
    layer: int,
    scale: float,
    v_width: int,
    prefix: str,
    kv_b: Matrix | None,
    k_b: Matrix | None,
    v_b: Matrix | None,
    selection: Tensor | None,
) -> Tensor:
    """Over latents: queries are multiplied with K, and the weighted sums of latents with V. With -mla 0 the cache has each
    head's keys and values, and the latents besides only where somebody observes."""
    (n, heads, width), rank = q.shape, latent.shape[1]
    nope, observing = width - k_pe.shape[1], step.observing()
    if kv_b is not None:
        both = kv_b.decoded().view(heads, nope + v_width, rank)
        to_keys, to_values = both[:, :nope], both[:, nope:]
    else:
        assert k_b is not None
        assert v_b is not None
        to_keys, to_values = k_b.decoded().view(heads, rank, nope).transpose(1, 2), v_b.decoded().view(heads, v_width, rank)
    absorbed = torch.cat([torch.einsum("nhk,hkr->nhr", q[..., :nope], to_keys), q[..., nope:]], dim=2)
    weighted, result = (torch.empty((n, heads, size), device=q.device) for size in (rank, v_width))
    for cache, rows in step.segments:
        past, by_head = cache.length, cache.part(layer, "k") is not None
        sight = Sight(scale, allowed=None if selection is None else seen_keys(selection[rows]))
        if by_head:
            rotated = k_pe[rows, None].expand(-1, heads, -1)
            cache.write(layer, "k", torch.cat([torch.einsum("nr,hkr->nhk", latent[rows], to_keys), rotated], dim=2))
            cache.write(layer, "v", torch.einsum("nr,hvr->nhv", latent[rows], to_values))
            result[rows] = attend_cached(step, q[rows], cache, layer, ("k", "v"), past, sight)
        if cache.part(layer, "kv") is not None:
            cache.write(layer, "kv", torch.cat([latent[rows], k_pe[rows]], dim=1)[:, None])
        if by_head and not (observing and cache.part(layer, "kv") is not None):
            continue
        names = "kv", "kv"
        if cache.part(layer, "v") is not None and not by_head:
            cache.write(layer, "v", latent[rows, None])
            names = "kv", "v"
        weighted[rows] = attend_cached(step, absorbed[rows], cache, layer, names, past, sight, rank)
        if not by_head:
            result[rows] = torch.einsum("nhr,hvr->nhv", weighted[rows], to_values)
    if observing:
        observer, op = observing
        assert isinstance(op, ops.LatentAttention)
        kv, key, value = op.observed
        observer.on_input(op, kv, 0, to_numpy(latent))
        observer.on_head_inputs(op, key, to_numpy(q[..., :nope]))
        observer.on_head_inputs(op, value, to_numpy(weighted))
    return result


def seen_keys(selection: Tensor) -> Any:
    """Positions [n, top_k] -> (rows, keys) -> bool [n, m]."""
    return lambda rows, keys: _chosen(selection[rows], keys.stop)[..., keys.start :]


def select_keys(
    step: DevicePass, q: Tensor, k: Tensor, factors: Tensor | None, layer: int, top_k: int, every: int, open_run: bool
) -> Tensor:
    out = torch.full((len(q), top_k + open_run), -1.0, device=q.device)
    for cache, at in step.segments:
        cache.write(layer, "index_k", k[at, None])
        end = (cache.length + at.stop - at.start) // every
        if end <= top_k:
            continue
        keys, found = cache.read(layer, "index_k", 0, end)[0], out[at]
        for rows in step.row_blocks(at.stop - at.start, 8 * q.shape[1] * end):
            products = torch.relu(q[at][rows] @ keys.T)
            scores = (products if factors is None else products * factors[at][rows][..., None]).sum(dim=1)
            positions = torch.arange(cache.length + rows.start, cache.length + rows.stop, device=q.device)[:, None]
            counts = (positions + 1) // every
            scores = scores.masked_fill(torch.arange(end, device=q.device) >= counts, -torch.inf)
            best = scores.topk(top_k, dim=1).indices
            best = torch.cat([best, counts], dim=1) if open_run else best
            found[rows] = torch.where(counts > top_k, best.float(), -1.0)
    return out


def select_blocks(step: DevicePass, q: Tensor, k: Tensor, layer: int, block: int, top_k: int, local: int) -> Tensor:
    out = torch.full((len(q), q.shape[1], top_k), -1.0, device=q.device)
    for cache, at in step.segments:
        cache.write(layer, "index_k", k[at, None])
        end = cache.length + at.stop - at.start
        blocks = -(-end // block)
        if blocks <= top_k:
            continue
        keys, found = cache.read(layer, "index_k", 0, end)[0], out[at]
        for rows in step.row_blocks(at.stop - at.start, 8 * q.shape[1] * end):
            positions = torch.arange(cache.length + rows.start, cache.length + rows.stop, device=q.device)[:, None, None]
            scores = (q[at][rows] @ keys.T).masked_fill(torch.arange(end, device=q.device) > positions, -torch.inf)
            padded = torch.nn.functional.pad(scores, (0, blocks * block - end), value=-torch.inf)
            best, count = padded.unflatten(2, (blocks, block)).amax(dim=3), positions // block + 1
            numbers = torch.arange(blocks, device=q.device)
            best = best.masked_fill((numbers >= count - local) & (numbers < count), torch.inf)
            order = torch.sort(best, dim=2, descending=True, stable=True).indices[..., :top_k]
            found[rows] = torch.where(count > top_k, order.float(), -1.0)
    return out
