"""Causal softmax attention over blocks of queries and heads, so that the scores never take more than a set amount of memory."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from ....simd.workers import Workers
from .kernels.gemm import gemm
from .kernels.gemm.vector_products import COLUMN_TILE

QUERY_BLOCK = 128  # keys beyond a block's last query are never touched: smaller blocks skip more, bigger ones multiply faster
SMALLEST_BLOCK = 16


@dataclass(frozen=True, eq=False)
class Span:
    """What a query sees of the past, and how its scores are treated.

    scale     multiplies q k^T
    window    the last so many tokens, its own included; 0: all
    softcap   scores become softcap * tanh(score / softcap); 0: not (Gemma 2, arXiv:2408.00118, section 2)
    sinks     float32 [heads] or None: one more score per head, that takes part in the softmax's sum and has no value
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: np.ndarray | None = None


def causal_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scores_bytes: int, workers: Workers, span: Span | None = None
) -> np.ndarray:
    """softmax(q k^T, causally masked) v, in float32; the caller has multiplied the scale into q.

    q: [kv_heads, group, n, width], the queries that share each key head; k: [kv_heads, m, width], v: [kv_heads, m, width of
    values], m >= n: the last n keys are those of the queries' own tokens; scores_bytes: for what a worker has in hand.
    span: its window, soft cap and sinks are applied, its scale is not. Returns [kv_heads, group, n, width of values].
    """
    span = span or Span(1.0)
    window, softcap = span.window, np.float32(span.softcap)
    sinks = None if span.sinks is None else span.sinks.reshape(k.shape[0], -1, 1)
    kv_heads, group, n, width = q.shape
    m = k.shape[1]
    past = m - n
    out = np.empty((kv_heads, group, n, v.shape[2]), np.float32)
    block = min(n, QUERY_BLOCK, max(SMALLEST_BLOCK, scores_bytes // (4 * m)))
    hidden = np.triu(np.full((block, block), -np.inf, np.float32), 1)
    heads = max(1, scores_bytes // (4 * block * m))  # query heads at once
    step_kv, step_group = max(1, heads // group), min(group, heads)

    def attend(at: tuple[int, int, int]) -> None:
        a, h, g = at
        b = min(a + block, n)
        seen = past + b
        # Keys are added up in stretches: those of a query have to begin at the same keys whichever block it is in.
        first = max(0, past + a + 1 - window) // COLUMN_TILE * COLUMN_TILE if window else 0
        part = q[h : h + step_kv, g : g + step_group, a:b]
        shape = part.shape[:3]
        scores = gemm.matmul(part.reshape(shape[0], -1, width), k[h : h + step_kv, first:seen].transpose(0, 2, 1))
        if softcap:
            scores /= softcap
            np.tanh(scores, out=scores)
            scores *= softcap
        by_query = scores.reshape(*shape, seen - first)
        own = by_query[..., past + a - first :]
        own += hidden[: b - a, : b - a]
        if window:
            behind = np.arange(a, b)[:, None] + past - np.arange(first, seen)
            by_query[..., behind >= window] = -np.inf
        extra = None if sinks is None else np.repeat(sinks[h : h + step_kv, g : g + step_group], b - a, axis=2)
        total = softmax_numerator(scores, None if extra is None else extra.reshape(shape[0], -1, 1))
        result = gemm.matmul(scores, v[h : h + step_kv, first:seen])
        result /= total
        out[h : h + step_kv, g : g + step_group, a:b] = result.reshape(*shape, -1)

    # Last blocks first: they see the most keys, and the short ones then even out the threads' loads.
    parts = product(range(0, n, block)[::-1], range(0, kv_heads, step_kv), range(0, group, step_group))
    workers.map(attend, parts, kv_heads * group * n * m * (width + v.shape[2]))
    return out


def softmax_numerator(scores: np.ndarray, extra: np.ndarray | None = None) -> np.ndarray:
    """Replaces scores [heads, n, m] by exp(scores - their maximum); returns the sums [heads, n, 1] that would normalise them.

    extra [heads, n, 1]: a further score of each row, counted in maximum and sum.
    """
    top = scores.max(axis=-1, keepdims=True)
    if extra is not None:
        top = np.maximum(top, extra)
    scores -= top
    np.exp(scores, out=scores)
    # numpy's sum adds up in an order that depends on how many there are.
    total = gemm.matmul(scores, np.ones((1, scores.shape[-1], 1), np.float32).repeat(len(scores), 0))
    return total if extra is None else total + np.exp(extra - top)
