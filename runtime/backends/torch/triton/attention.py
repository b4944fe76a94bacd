"""Attention over cached rows without storing scores (arXiv:2307.08691), over any part of the keys by itself: the parts of few
queries are computed at the same time and put together afterwards (arXiv:2311.01282, section 3).

Products are sums of three of tf32 numbers, which have the bits of float32.
"""

# pyright: basic, reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .bytes4 import store_bytes
from .dependent import begin as begin_kernel
from .dependent import launched
from .rows import turned
from .vector_bytes import VectorBytes, empty_bytes

_KEYS, _ROWS, _FEW_ROWS = 32, 64, 16  # of a tile
_PARTS, _PART_KEYS = 32, 64  # of the keys, at most, and keys of a part, at least
_FEW = 8  # queries whose keys are taken in parts
MOST_NEW = 8  # tokens; products take tiles of 16


@triton.jit
def _with_keys(
    x, k, v, key, there, position, slopes, head, most, total, mixed, scale, window, softcap,
    WINDOW: tl.constexpr, CHUNKED: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
):  # fmt: skip
    """The largest scores, sums of weights and weighted sums, with a tile of keys."""
    scores = tl.dot(x, k.to(tl.float32), input_precision="tf32x3") * scale
    if SOFTCAP:
        scores = (1 - 2 / (tl.exp(scores * (2 / softcap)) + 1)) * softcap
    if ALIBI:
        slope = tl.load(slopes + head)
        scores -= slope[:, None] * tl.abs(position[:, None] - key[None, :]).to(tl.float32)
    seen = there[None, :] & (key[None, :] <= position[:, None])
    if WINDOW:
        if CHUNKED:
            seen = seen & (position[:, None] // window == key[None, :] // window)
        else:
            seen = seen & (position[:, None] - key[None, :] < window)
    scores = tl.where(seen, scores, -float("inf"))
    new = tl.maximum(most, tl.max(scores, axis=1))
    base = tl.where(new == -float("inf"), 0.0, new)
    weights = tl.exp(scores - base[:, None])
    shrunk = tl.exp(most - base)
    total = total * shrunk + tl.sum(weights, axis=1)
    mixed = mixed * shrunk[:, None] + tl.dot(weights, v.to(tl.float32), input_precision="tf32x3")
    return new, total, mixed


@triton.jit
def _attend(
    q, keys, values, out, sums, sinks, slopes, new_keys, new_values, cos, sin, past, n, kv_heads, room_keys, first, pairs,
    scale, window, softcap,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, PARTS: tl.constexpr, ON_DEVICE: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, ALIBI: tl.constexpr, NEW: tl.constexpr, TURNS: tl.constexpr,
    INTERLEAVED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of rows, heads of keys, parts). A row is a query of one of the GROUP heads that share keys. With parts, out
    has the weighted sums of each, and sums the largest score and the sum of weights; else out is the result.

    NEW: keys and values of the queries' own tokens, at most NEW, are not in memory yet, and are written there; TURNS: queries
    and these keys are rotated first (see `rows.turned`)."""
    begin_kernel(DEPENDENT)
    if ON_DEVICE:
        past = tl.load(past).to(tl.int32)
    kv_head, part = tl.program_id(1), tl.program_id(2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    query, head = row // GROUP, kv_head * GROUP + row % GROUP
    inside = query < n
    d, dv = tl.arange(0, D), tl.arange(0, DV)
    at = (query * kv_heads * GROUP + head).to(tl.int64)
    row_inside = inside[:, None] & (d[None, :] < WIDTH)
    if TURNS:
        x = turned(q + at[:, None] * WIDTH, d[None, :], query[:, None], cos, sin, first, pairs, row_inside, INTERLEAVED)
    else:
        x = tl.load(q + at[:, None] * WIDTH + d[None, :], mask=row_inside, other=0.0)
    position = past + query
    first_query = tl.program_id(0) * ROWS // GROUP
    last_query = tl.minimum((tl.program_id(0) * ROWS + ROWS - 1) // GROUP, n - 1)
    begin, end = 0, past + (0 if NEW else last_query + 1)
    if WINDOW:
        if CHUNKED:
            begin = (past + first_query) // window * window
        else:
            begin = tl.maximum(past + first_query - window + 1, 0)
    begin = begin // KEYS * KEYS
    each = tl.cdiv(tl.cdiv(end - begin, KEYS), PARTS) * KEYS
    begin += part * each
    end = tl.minimum(end, begin + each)
    most = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DV], tl.float32)
    rows_of_head = kv_head.to(tl.int64) * room_keys
    for start in range(begin, end, KEYS):
        key = start + tl.arange(0, KEYS)
        there = key < end
        place = rows_of_head + key
        k = tl.load(keys + place[None, :] * WIDTH + d[:, None], mask=there[None, :] & (d[:, None] < WIDTH), other=0.0)
        v = tl.load(values + place[:, None] * V_WIDTH + dv[None, :], mask=there[:, None] & (dv[None, :] < V_WIDTH), other=0.0)
        most, total, mixed = _with_keys(
            x, k, v, key, there, position, slopes, head, most, total, mixed, scale, window, softcap,
            WINDOW, CHUNKED, SOFTCAP, ALIBI,
        )  # fmt: skip
    if NEW > 0:  # noqa: SIM102
        if part == PARTS - 1:
            own = tl.arange(0, NEW if NEW > 0 else 1)
            there = own < n
            place, own_row = rows_of_head + past + own, own * kv_heads + kv_head
            k_inside = there[None, :] & (d[:, None] < WIDTH)
            v_inside = there[:, None] & (dv[None, :] < V_WIDTH)
            if TURNS:
                k = turned(
                    new_keys + own_row[None, :] * WIDTH, d[:, None], own[None, :], cos, sin, first, pairs, k_inside, INTERLEAVED
                )
            else:
                k = tl.load(new_keys + own_row[None, :] * WIDTH + d[:, None], mask=k_inside, other=0.0)
            k = k.to(keys.dtype.element_ty)
            v = tl.load(new_values + own_row[:, None] * V_WIDTH + dv[None, :], mask=v_inside, other=0.0)
            v = v.to(values.dtype.element_ty)
            if tl.program_id(0) == 0:
                tl.store(keys + place[None, :] * WIDTH + d[:, None], k, mask=k_inside)
                tl.store(values + place[:, None] * V_WIDTH + dv[None, :], v, mask=v_inside)
            most, total, mixed = _with_keys(
                x, k, v, past + own, there, position, slopes, head, most, total, mixed, scale, window, softcap,
                WINDOW, CHUNKED, SOFTCAP, ALIBI,
            )  # fmt: skip
    mask = inside[:, None] & (dv[None, :] < V_WIDTH)
    if PARTS == 1:
        if SINKS:
            sink = tl.load(sinks + head)
            new = tl.maximum(most, sink)
            mixed = mixed * tl.exp(most - new)[:, None]
            total = total * tl.exp(most - new) + tl.exp(sink - new)
        tl.store(out + at[:, None] * V_WIDTH + dv[None, :], mixed / total[:, None], mask=mask)
    else:
        at = at * PARTS + part
        tl.store(out + at[:, None] * V_WIDTH + dv[None, :], mixed, mask=mask)
        tl.store(sums + 2 * at, most, mask=inside)
        tl.store(sums + 2 * at + 1, total, mask=inside)


@triton.jit
def _put_together(
    parts, sums, sinks, out, words, row_words, part_words, heads,
    V_WIDTH: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr, SINKS: tl.constexpr, BYTES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: (queries, heads): the result of a query's head, as numbers and as bytes (see `store_bytes`)."""
    begin_kernel(DEPENDENT)
    query, head = tl.program_id(0), tl.program_id(1)
    at = (query * heads + head).to(tl.int64)
    part = tl.arange(0, PARTS)
    most = tl.load(sums + 2 * (at * PARTS + part))
    total = tl.load(sums + 2 * (at * PARTS + part) + 1)
    highest = tl.max(most, axis=0)
    if SINKS:
        highest = tl.maximum(highest, tl.load(sinks + head))
    shares = tl.exp(most - highest)
    whole = tl.sum(total * shares, axis=0)
    if SINKS:
        whole += tl.exp(tl.load(sinks + head) - highest)
    column = tl.arange(0, GROUPS)[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = column < V_WIDTH
    place = (at * PARTS + part)[:, None, None] * V_WIDTH + column[None, :, :]
    mixed = tl.load(parts + place, mask=inside[None, :, :], other=0.0)
    result = tl.sum(mixed * shares[:, None, None], axis=0) / whole
    tl.store(out + at * V_WIDTH + column, result, mask=inside)
    if BYTES:
        group = head * (V_WIDTH // 32) + tl.arange(0, GROUPS)
        store_bytes(
            result, group, tl.arange(0, GROUPS) < V_WIDTH // 32, words + query.to(tl.int64) * row_words, part_words, GROUPS
        )


class New(NamedTuple):
    """Keys and values [n, kv heads, width] of the tokens of queries. turn: the rotation that keys and queries lack, as
    arguments of `rows.rotated`, or None."""

    keys: Tensor
    values: Tensor
    turn: tuple[Tensor, Tensor, int, bool] | None


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    past: int | Tensor,
    sight: Any,
    slopes: Tensor | None,
    new: New | None = None,
) -> tuple[Tensor, Any]:
    """Queries [n, heads, width] at positions past ..., over rows [kv heads, room, width] and [kv heads, room, v_width] of any
    float type -> float32 [n, heads, v_width], and of few queries its `VectorBytes`, or None. sight: as of
    `functions.attention`, causal and with no keys of its own. new: of at most MOST_NEW tokens, written to the rows."""
    n, heads, width = q.shape
    kv_heads, room, v_width = values.shape
    group, few = heads // kv_heads, n <= _FEW
    rows = _FEW_ROWS if n * group <= _FEW_ROWS else _ROWS
    parts = 1 << (max(1, min(_PARTS, room // _PART_KEYS)).bit_length() - 1) if few else 1
    out = torch.empty((n, heads, v_width), device=q.device)
    split = torch.empty((n, heads, parts, v_width), device=q.device) if parts > 1 else out
    sums = torch.empty((n, heads, parts, 2), device=q.device) if parts > 1 else out
    nothing = out
    sinks = nothing if sight.sinks is None else sight.sinks
    on_device, own = isinstance(past, Tensor), new or New(nothing, nothing, None)
    cos, sin, first, is_interleaved = own.turn or (nothing, nothing, 0, False)
    _attend[-(-n * group // rows), kv_heads, parts](
        q.contiguous(), keys, values, split, sums, sinks, nothing if slopes is None else slopes, own.keys.contiguous(),
        own.values.contiguous(), cos, sin, past, n, kv_heads, room, first, cos.shape[1], sight.scale, sight.window,
        sight.softcap, group, width, v_width, max(16, triton.next_power_of_2(width)),
        max(16, triton.next_power_of_2(v_width)), rows, _KEYS, parts, on_device, sight.window > 0, sight.chunked,
        sight.softcap > 0, sight.sinks is not None, slopes is not None, 0 if new is None else 2 * MOST_NEW,
        own.turn is not None, is_interleaved, num_warps=4, num_stages=2, **launched(q.device),
    )  # fmt: skip
    made: VectorBytes | None = None
    if parts > 1:
        if v_width % 32 == 0:
            made = empty_bytes(n, heads * v_width, q.device)
        words = made.words if made is not None else out
        _put_together[n, heads](
            split, sums, sinks, out, words, words.shape[1] if made is not None else 0, made.part_words if made is not None
            else 0,
            heads, v_width, triton.next_power_of_2(-(-v_width // 32)), parts, sight.sinks is not None, made is not None,
            num_warps=4, **launched(q.device),
        )  # fmt: skip
    return out, made
