"""Attention: queries over the cached keys and values of their own sequence."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .....formats import PlanError
from .....simd.workers import Workers
from ....graph.ops import Attention
from ....graph.values import alibi_slopes
from ....placement.compute_buffers import SCORES_BYTES
from ..attention import AttentionParams, scored_attention
from ..attention_jobs import CachedAttention
from ..memory import Partition, with_heads
from ..pass_program import PassProgram
from .sparse_attention import attend_blocks
from .step import Step, lowers


@lowers(Attention)
class AttentionStep(Step):
    def __init__(self, compiled, op: Attention):
        super().__init__(compiled, op)
        if op.chunked and not op.causal:
            raise PlanError(f"{compiled.store.source.path}: attention to chunks of tokens that see later ones is not supported")
        window = -op.window if op.chunked else op.window
        slopes = alibi_slopes(op.q.shape[0], op.alibi) if op.alibi else None
        self.params = AttentionParams(op.scale, window, op.softcap, compiled.optional_vector(op.sinks), slopes, op.causal)

    def emit(self, out: PassProgram) -> None:
        op = self.op
        for name, value in (("k", op.k), ("v", op.v)):
            if value is not None:
                out.write_cache(op.layer, name, with_heads(out.view(value), *value.shape))
        q, kv_heads = with_heads(out.dense(op.q), *op.q.shape), out.compiled.part(op.layer, "k").heads
        result = out.new(op.out)
        until = 0 if op.selection is None else op.block * op.selection.shape[1]  # all tokens select from there on
        attention = CachedAttention(op.layer, q, result, "k", "v", kv_heads, self.params, until)
        attend(out, attention, selected=None if op.selection is None else op)


def attend(
    out: PassProgram, attention: CachedAttention, by_heads: Partition | None = None, selected: Attention | None = None
) -> None:
    """Adds the attention to the pass, as the settings ask: flash attention, or with stored scores.

    Flash attention reads the cache's rows as they are: where keys are rotated, queries are too, and the results of rotated
    values are rotated back. by_heads: of the tasks before and after it, whose rows are the heads of tokens; None: tokens.
    selected: an op with a selection of blocks, which is always flash attention: tokens that have one see no more."""
    if out.settings.flash or selected is not None:
        q, result = attention.q, attention.result
        parts = (out.compiled.part(attention.layer, name) for name in (attention.keys, attention.values))
        k_rotation, v_rotation = (part.rotation for part in parts)
        if k_rotation:
            q = out.rotate(q, out.temporary(q.rows, q.heads, q.width), k_rotation, by_heads)
        out.attention.add(replace(attention, q=q))
        if selected is not None:
            attend_blocks(selected, out, q, result)
        if v_rotation:
            out.rotate(result, result, v_rotation, by_heads)
        return
    params, queries, result, state = attention.params, attention.q.array, attention.result.array, out.run_inputs
    scores_bytes = min(out.settings.attention_bytes, SCORES_BYTES)

    def with_scores() -> None:
        for cache, at in state.batch:
            new = at.stop - at.start
            keys = cache.read(attention.layer, attention.keys, new)
            values = cache.read(attention.layer, attention.values, new)[..., : attention.result.width]
            stored_scores_attention(queries[at], keys, values, result[at], params, scores_bytes, out.workers)

    out.call(with_scores)


def stored_scores_attention(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    out: np.ndarray,
    params: AttentionParams,
    scores_bytes: int,
    workers: Workers,
) -> None:
    """scored_attention of q float32 [n, heads, width] over keys and values [kv heads, m, width], into out [n, heads, width]."""
    n, heads, width = q.shape
    queries = (q * np.float32(params.scale)).reshape(n, len(keys), heads // len(keys), width).transpose(1, 2, 0, 3)
    result = scored_attention(queries, keys, values, scores_bytes, workers, params)
    out[...] = result.transpose(2, 0, 1, 3).reshape(out.shape)
