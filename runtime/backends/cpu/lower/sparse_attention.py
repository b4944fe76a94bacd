"""Sparse attention: the keys that an indexer selects (SelectKeys), and latent attention over these alone.

A token's results differ from dense attention only when there are more than top_k keys. Then they are computed again, by numpy,
in the place of the dense ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ....graph.ops import SelectKeys
from ..memory import View
from ..passes import Pass, Step
from .attention import with_heads

if TYPE_CHECKING:
    from ..executable import Executable
    from .latent_attention import LatentAttentionStep


class SelectKeysStep(Step):
    def __init__(self, executable: Executable, op: SelectKeys):
        super().__init__(executable, op)
        self.op = op

    def emit(self, out: Pass) -> None:
        op, state = self.op, out.run_state
        heads, width = op.q.shape
        out.write_cache(op.layer, "index_k", with_heads(out.view(op.k), 1, width))
        queries, factors = with_heads(out.dense(op.q), heads, width).array, out.dense(op.factors).matrix
        to = out.new(op.out).matrix

        def select() -> None:
            to[:, 0] = -1
            for cache, at in state.batch:
                first = max(0, op.top_k - cache.length)  # token of this pass that is the first to see more than top_k keys
                if first >= at.stop - at.start:
                    continue
                keys = cache.read(op.layer, "index_k", at.stop - at.start)[0]
                for row in range(at.start + first, at.stop):
                    past = keys[: cache.length + row - at.start + 1]
                    scores = factors[row] @ np.maximum(queries[row] @ past.T, 0)
                    to[row] = np.argpartition(-scores, op.top_k)[: op.top_k]

        out.call(select)


def attend_selected(step: LatentAttentionStep, out: Pass, q: View, result: View, selection: View) -> None:
    """Adds to the pass that the results of tokens with a selection are those of attention over the selected keys.

    q: [n, heads, nope + rope]; result: [n, heads, v]; selection: [n, top_k], as SelectKeys gives it.
    """
    s, state, layer, scale = step.shape, out.run_state, step.op.layer, np.float32(step.op.scale)
    queries, results, chosen = q.array, result.array, selection.matrix

    def weigh(scores: np.ndarray) -> np.ndarray:
        """softmax of scores [heads, keys]"""
        weights = np.exp((scores - scores.max(axis=1, keepdims=True)) * scale)
        return weights / weights.sum(axis=1, keepdims=True)

    def over_heads(row: int, positions: np.ndarray, keys: np.ndarray, values: np.ndarray) -> None:
        scores = np.einsum("hw,hmw->hm", queries[row], keys[:, positions])
        results[row] = np.einsum("hm,hmv->hv", weigh(scores), values[:, positions, : s.v])

    def over_latents(rows: np.ndarray, latents: np.ndarray) -> None:
        wide = np.empty((len(rows), s.heads, s.rank + s.rope), np.float32)
        wide[..., s.rank :] = queries[rows, :, s.nope :]
        wide[..., : s.rank] = step.matrices.absorb(queries[rows, :, : s.nope].transpose(1, 0, 2)).transpose(1, 0, 2)
        weighted = np.empty((len(rows), s.heads, s.rank), np.float32)
        for number, row in enumerate(rows):
            selected = latents[chosen[row].astype(np.int64)]
            weighted[number] = weigh(wide[number] @ selected.T) @ selected[:, : s.rank]
        results[rows] = step.matrices.finish(weighted.transpose(1, 0, 2)).transpose(1, 0, 2)

    def attend() -> None:
        for cache, at in state.batch:
            rows = at.start + np.flatnonzero(chosen[at, 0] >= 0)
            if not rows.size:
                continue
            new = at.stop - at.start
            if step.mode:
                over_latents(rows, cache.read(layer, "kv", new)[0])
                continue
            keys, values = cache.read(layer, "k", new), cache.read(layer, "v", new)
            for row in rows:
                over_heads(row, chosen[row].astype(np.int64), keys, values)

    out.call(attend)
