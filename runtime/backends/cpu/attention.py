"""Softmax attention that stores its scores (no flash attention), those of a block of queries and heads at a time."""

from __future__ import annotations

from itertools import product

import numpy as np

from ....data_classes import dataclass
from ....simd.workers import Workers
from .kernels.gemm import gemm
from .kernels.gemm.vector_products import COLUMN_TILE

QUERY_BLOCK = 128  # keys beyond a block's last query are never touched: smaller blocks skip more, bigger ones multiply faster
SMALLEST_BLOCK = 16


@dataclass(frozen=True, eq=False)
class AttentionParams:
    """Options of an attention op.

    scale     multiplies q k^T
    window    a query attends to the last so many tokens, its own included; 0: to all; -n: to those of its chunk of n. Without
              `causal`: to those at most window // 2 away
    softcap   scores become softcap * tanh(score / softcap); 0: they stay (Gemma 2, arXiv:2408.00118, section 2)
    sinks     float32 [heads] or None: one more score per head, which counts in the softmax's sum and has no value
    slopes    float32 [heads] or None: scores lose slope * distance (ALiBi)
    causal    whether queries see no later tokens
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: np.ndarray | None = None
    slopes: np.ndarray | None = None
    causal: bool = True

    def ahead(self, n: int) -> int:
        """Later tokens that a query of n sees, as far as there are any."""
        return 0 if self.causal else self.window // 2 if self.window else n

    @property
    def span(self) -> int:
        """Keys that a query sees up to the last one; 0: all; -n: as `window`."""
        return self.window if self.causal or not self.window else self.window // 2 * 2 + 1


def first_key(position: int, span: int) -> int:
    """The first position that a query sees; position: the last that it may see; span: as in `AttentionParams`."""
    if span < 0:
        return position // -span * -span
    return max(0, position + 1 - span) if span else 0


def scored_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scores_bytes: int, workers: Workers, params: AttentionParams | None = None
) -> np.ndarray:
    """softmax(q k^T, masked) v, in float32; the caller has multiplied the scale into q.

    q: [kv_heads, group, n, width], the queries that share each key head; k: [kv_heads, m, width], v: [kv_heads, m, width of
    values], m >= n: the last n keys are those of the queries' own tokens; scores_bytes: for the scores of a block, per thread.
    params: everything is applied but the scale. Returns [kv_heads, group, n, width of values].
    """
    params = params or AttentionParams(1.0)
    window, softcap = params.window, np.float32(params.softcap)
    sinks, slopes = (None if x is None else x.reshape(k.shape[0], -1, 1) for x in (params.sinks, params.slopes))
    kv_heads, group, n, width = q.shape
    m = k.shape[1]
    past, ahead = m - n, params.ahead(n)
    out = np.empty((kv_heads, group, n, v.shape[2]), np.float32)
    block = min(n, QUERY_BLOCK, max(SMALLEST_BLOCK, scores_bytes // (4 * m)))
    mask = np.triu(np.full((block, block), -np.inf, np.float32), 1)
    heads = max(1, scores_bytes // (4 * block * m))  # query heads at once
    step_kv, step_group = max(1, heads // group), min(group, heads)

    def attend(place: tuple[int, int, int]) -> None:
        """Attention of the block of queries from the first query, key head and query of a group on that `place` names."""
        start, h, g = place
        stop = min(start + block, n)
        key_stop = min(m, past + stop + ahead)
        # Products are summed by COLUMN_TILE keys: for the same sums in every block of queries, keys begin at a multiple of it.
        first = first_key(past + start + ahead, params.span) // COLUMN_TILE * COLUMN_TILE
        queries = q[h : h + step_kv, g : g + step_group, start:stop]
        shape = queries.shape[:3]
        scores = gemm.matmul(queries.reshape(shape[0], -1, width), k[h : h + step_kv, first:key_stop].transpose(0, 2, 1))
        if softcap:
            scores /= softcap
            np.tanh(scores, out=scores)
            scores *= softcap
        by_query = scores.reshape(*shape, key_stop - first)
        distance = np.abs(np.arange(start, stop)[:, None] + past - np.arange(first, key_stop))
        if slopes is not None:
            by_query -= slopes[h : h + step_kv, g : g + step_group, None] * distance.astype(np.float32)
        if params.causal:
            by_query[..., past + start - first :] += mask[: stop - start, : stop - start]
        if window:
            first_keys = np.array([first_key(past + ahead + i, params.span) for i in range(start, stop)])
            by_query[..., np.arange(first, key_stop) < first_keys[:, None]] = -np.inf
            if not params.causal:
                by_query[..., distance > window // 2] = -np.inf
        extra = None if sinks is None else np.repeat(sinks[h : h + step_kv, g : g + step_group], stop - start, axis=2)
        total = softmax_numerator(scores, None if extra is None else extra.reshape(shape[0], -1, 1))
        result = gemm.matmul(scores, v[h : h + step_kv, first:key_stop])
        result /= total
        out[h : h + step_kv, g : g + step_group, start:stop] = result.reshape(*shape, -1)

    # Last blocks first: they have the most keys, and the short ones then even out the threads' loads.
    places = product(range(0, n, block)[::-1], range(0, kv_heads, step_kv), range(0, group, step_group))
    workers.map(attend, places, kv_heads * group * n * m * (width + v.shape[2]))
    return out


def softmax_numerator(scores: np.ndarray, extra: np.ndarray | None = None) -> np.ndarray:
    """Replaces scores [heads, n, m] by exp(scores - their maximum); returns the sums [heads, n, 1] that would normalise them.

    extra [heads, n, 1]: a further score of each row, counted in maximum and sum.
    """
    maxima = scores.max(axis=-1, keepdims=True)
    if extra is not None:
        maxima = np.maximum(maxima, extra)
    scores -= maxima
    np.exp(scores, out=scores)
    # The order of numpy's sum depends on how many numbers there are.
    total = gemm.matmul(scores, np.ones((1, scores.shape[-1], 1), np.float32).repeat(len(scores), 0))
    return total if extra is None else total + np.exp(extra - maxima)
