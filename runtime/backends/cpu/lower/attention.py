"""Attention: queries over the cached keys and values of their own sequence."""

from __future__ import annotations

import numpy as np

from ....graph.ops import Attention
from ..attention import Span, causal_attention
from ..memory import View
from ..passes import Pass
from .step import Step

SCORES_BYTES = 2 << 20  # scores that a thread has in hand: about what its own cache holds


class AttentionStep(Step):
    def __init__(self, executable, op: Attention):
        super().__init__(executable, op)
        self.op = op
        self.sinks = None if op.sinks is None else executable.vector(op.sinks)

    def emit(self, out: Pass) -> None:
        op = self.op
        for name, value in (("k", op.k), ("v", op.v)):
            out.write_cache(op.layer, name, shaped(out.view(value), *value.shape))
        q = shaped(out.dense(op.q), *op.q.shape)
        result = out.new(op.out)
        options = op.scale, op.window, op.softcap, self.sinks
        attend(out, op.layer, q, result, ("k", "v"), op.k.shape[0], *options)


def shaped(view: View, heads: int, width: int) -> View:
    return view if view.heads == heads and view.width == width else view.reshaped(heads, width)


def attend(
    out: Pass,
    layer: int,
    q: View,
    result: View,
    names: tuple[str, str],
    kv_heads: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: np.ndarray | None = None,
) -> None:
    """result [n, heads, width of values] = attention of q [n, heads, width] over what is cached under two names."""
    if out.settings.flash:
        out.attention.add(layer, q, result, names, kv_heads, scale, window, softcap, sinks)
        return
    queries, target, state = q.array, result.array, out.run_state
    span = Span(scale, window, softcap, sinks)
    scores_bytes = min(out.settings.attention_bytes, SCORES_BYTES)

    def with_scores() -> None:
        for cache, at in state.batch:
            new = at.stop - at.start
            keys, values = cache.read(layer, names[0], new), cache.read(layer, names[1], new)[..., : result.width]
            plain_attention(queries[at], keys, values, target[at], span, scores_bytes, out.workers)

    out.call(with_scores)


def plain_attention(q, keys, values, out, span: Span, scores_bytes: int, workers) -> None:
    """Attention that stores its scores: q float32 [n, heads, width], keys and values [kv heads, m, width], into out."""
    n, heads, width = q.shape
    queries = (q * np.float32(span.scale)).reshape(n, len(keys), heads // len(keys), width).transpose(1, 2, 0, 3)
    result = causal_attention(queries, keys, values, scores_bytes, workers, span)
    out[...] = result.transpose(2, 0, 1, 3).reshape(out.shape)
