"""Causal softmax attention over blocks of queries and heads, so that the scores never take more than a set amount of memory."""

from __future__ import annotations

from itertools import product

import numpy as np

from .threads import Workers

QUERY_BLOCK = 128  # keys beyond a block's last query are never touched: smaller blocks skip more, bigger ones multiply faster
SMALLEST_BLOCK = 16


def causal_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, scores_bytes: int, workers: Workers) -> np.ndarray:
    """softmax(q k^T, causally masked) v, in float32; the caller has multiplied the scale into q.

    q: [kv_heads, group, n, width], the queries that share each key head; k: [kv_heads, m, width], v: [kv_heads, m, width of
    values], m >= n: the last n keys are those of the queries' own tokens; scores_bytes: for what a worker has in hand.
    Returns [kv_heads, group, n, width of values].
    """
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
        part = q[h : h + step_kv, g : g + step_group, a:b]
        shape = part.shape[:3]
        scores = part.reshape(shape[0], -1, width) @ k[h : h + step_kv, :seen].transpose(0, 2, 1)
        own = scores.reshape(*shape, seen)[..., past + a :]
        own += hidden[: b - a, : b - a]
        total = softmax_numerator(scores)
        result = scores @ v[h : h + step_kv, :seen]
        result /= total
        out[h : h + step_kv, g : g + step_group, a:b] = result.reshape(*shape, -1)

    # Last blocks first: they see the most keys, and the short ones then even out the threads' loads.
    parts = product(range(0, n, block)[::-1], range(0, kv_heads, step_kv), range(0, group, step_group))
    workers.map(attend, parts, kv_heads * group * n * m * (width + v.shape[2]))
    return out


def softmax_numerator(scores: np.ndarray) -> np.ndarray:
    """Replaces scores [..., m] by exp(scores - their maximum); returns the sums [..., 1] that would normalise them."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    return scores.sum(axis=-1, keepdims=True)
