"""LatentAttention: over each head's keys and values (-mla 0), or over the latents that these come from.

Head h's key is (K_h c, k_pe) and its value V_h c, with the cached latent c. There are two ways to compute with the latents,
equal but for rounding: absorb K_h into the query (q_h K_h) and V_h into the output, so that attention runs on the latents
themselves, or expand every head's keys and values. -mla 1 absorbs, 2 expands, and 3 expands for prompts and absorbs for tokens
that are generated, which mostly multiplies less. (Where a few tokens follow many, absorbing would: but the results of a token
would then depend on how many are computed with it.) The absorption of tokens that are generated is tasks of the program; for
the rest see latent_batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from .....formats import PlanError
from ....graph import Observer
from ....graph.ops import LatentAttention
from ..attention import AttentionParams
from ..attention_jobs import CachedAttention
from ..latent_matrices import HeadMatrices, LatentLayer, LatentShape, rounds_latents
from ..memory import View, with_heads
from ..pass_program import PassProgram
from .attention import attend
from .elementwise import heads_partition
from .latent_batch import LatentBatch, attend_selected, expansion_bytes
from .linear import multiply_matrix
from .products import gemv_inputs, gemv_task
from .sparse_attention import attend_listed, can_list
from .step import Step, lowers

_QUERIES = 512  # of a micro-batch, as most have
# How many times as long selected latents take for as many products: they are brought together for each token, whose heads are
# few queries for them, and queries and results are absorbed.
_GATHERING = 2


@lowers(LatentAttention)
class LatentAttentionStep(Step):
    def __init__(self, compiled, op: LatentAttention):
        super().__init__(compiled, op)
        self.shape = shape = LatentShape(op)
        self.matrices, self.mode = HeadMatrices(compiled.store, op, shape), compiled.settings.mla
        until = 0 if op.selection is None else op.selection.shape[0]  # all tokens select from there on
        # Products of a head's query with a latent; with a key, and what expanding that takes for each of _QUERIES.
        per_latent, per_key = 2 * shape.rank + shape.rope, shape.nope + shape.rope + shape.v
        per_key += shape.rank * (shape.nope + shape.v) // _QUERIES
        sparse_from = _GATHERING * until * per_latent // per_key if self.mode > 1 and compiled.settings.flash else 0
        self.layer = LatentLayer(op, shape, self.matrices, AttentionParams(op.scale), self.mode, until, sparse_from)
        self.kv_b = None if op.kv_b is None else compiled.matrix(op.kv_b)
        weights = [op.k_b, op.v_b] if op.kv_b is None else [op.kv_b] if self.mode else []
        packs = self.mode > 1 and self.matrices.packs(compiled.part(op.layer, "kv"))
        if packs and op.selection is None:  # which has other products in prompts
            weights = []
        self.decoded = tuple(weight for weight in weights if weight is not None)
        self.made_bytes = self.matrices.packed_bytes if packs else 0  # K and V as q8_0

    def inner_bytes(self, counts: Sequence[int], context: int, observer: Observer | None) -> int:
        """Of what is made from latents of the heads that are computed at a time: keys, values, queries and results, and which
        keys are seen where an indexer selects them. Of the weighted latents of all heads where the result is made from them, or
        an observer wants more of them than squares: their queries, or a copy of them for the product that makes the result and
        what that makes, take as much again."""
        op, s, n = self.op, self.shape, sum(counts)
        wanting = observer if observer is not None and observer.wants_input(op) else None
        if self.mode == 0 and wanting is None:
            return 0
        if self.mode in (0, 1):
            matrices = 0 if self.decoded else s.rank * (s.nope + s.v)  # for the observer alone
            return 4 * s.heads * (matrices + n * (2 * s.rank + max(s.nope + s.rope, 2 * s.v)))
        keeps_weighted = wanting is not None and not wanting.wants_squares
        limit, threads = self.compiled.settings.attention_bytes, self.compiled.store.workers.count
        most = context if wanting else min(context, self.layer.sparse_from + max(counts))
        seen = most * max(counts) if self.layer.sparse_from else 0
        rounds = wanting is None and (self.compiled.settings.fast or rounds_latents(self.compiled.store, op))
        expanded = expansion_bytes(s, max(counts), context, limit, threads, rounds)
        return expanded + keeps_weighted * 4 * s.heads * n * s.rank + seen

    def emit(self, out: PassProgram) -> None:
        op, s = self.op, self.shape
        q = with_heads(out.dense(op.q), s.heads, s.nope + s.rope)
        row = self._row(out)
        result = out.new(op.out)
        is_observed = out.observer is not None and out.observer.wants_input(op)
        selection = None if op.selection is None else out.dense(op.selection)
        batch = LatentBatch(self.layer, out, q, row, result, is_observed, selection)
        if self.mode == 0:
            self._over_heads(out, q, row, result)
            if is_observed:
                if "kv" not in out.names:
                    raise PlanError(
                        "with -mla 0 an observer has to be set before the cache is made: it keeps the latents for it"
                    )
                out.write_cache(op.layer, "kv", row)
                out.call(batch.observe)
        else:
            self._over_latents(out, q, row, result, batch, is_observed)
        if op.selection is not None and not (self._is_static(out, is_observed) and self._lists(out)):
            attend_selected(self.layer, out, q, result, out.view(op.selection), batch.sparse_from)

    def _over_latents(self, out: PassProgram, q: View, row: View, result: View, batch: LatentBatch, is_observed: bool) -> None:
        out.write_cache(self.op.layer, "kv", row)
        if self.mode == 1:
            out.write_cache(self.op.layer, "v", row.columns(0, self.shape.rank))
        if self._is_static(out, is_observed):
            self._absorb(out, q, result)
        else:
            out.call(batch.run)

    def _is_static(self, out: PassProgram, is_observed: bool) -> bool:
        """Whether it absorbs with GEMV products. Plans of those are made last: they have to be compiled."""
        absorbs = self.mode != 2 and out.gemv and out.settings.flash and not is_observed
        return absorbs and self.matrices.query_plan is not None and self.matrices.output_plan is not None

    def _lists(self, out: PassProgram) -> bool:
        """Whether latents that are absorbed, and selected, are read where they lie: as keys and values at once."""
        layer, part = self.op.layer, out.compiled.part
        if self.mode == 1 and (part(layer, "v").type != part(layer, "kv").type or part(layer, "v").rotation):
            return False
        return self.mode != 0 and can_list(out, layer, "kv")

    def _row(self, out: PassProgram) -> View:
        """Latents followed by their rotated keys: as they are in memory, or copied to be so."""
        s, latent, k_pe = self.shape, out.view(self.op.latent), out.view(self.op.k_pe)
        if latent.block is k_pe.block and k_pe.offset == latent.offset + 4 * s.rank and latent.row_bytes == k_pe.row_bytes:
            return replace(latent, heads=1, head_bytes=0, width=s.rank + s.rope)
        row = out.temporary(out.n, 1, s.rank + s.rope)
        out.copy(latent, row.columns(0, s.rank))
        out.copy(k_pe, row.columns(s.rank, s.rope))
        return row

    def _over_heads(self, out: PassProgram, q: View, row: View, result: View) -> None:
        op, s, n = self.op, self.shape, out.n
        k, v = out.temporary(n, s.heads, s.nope + s.rope), out.temporary(n, s.heads, s.v)
        if self.kv_b is not None:
            k_and_v = out.temporary(n, s.heads, s.nope + s.v)
            multiply_matrix(out, op.latent, self.kv_b, k_and_v)
            out.copy(k_and_v.columns(0, s.nope), k.columns(0, s.nope))
            out.copy(k_and_v.columns(s.nope, s.v), v)
        else:
            latents, keys, values = row.columns(0, s.rank).array[:, 0], k.array[..., : s.nope], v.array
            out.call(lambda: self.matrices.expand(np.ascontiguousarray(latents), keys, values))
        out.copy(replace(row.columns(s.rank, s.rope), heads=s.heads, head_bytes=0), k.columns(s.nope, s.rope))
        out.write_cache(op.layer, "k", k)
        out.write_cache(op.layer, "v", v)
        attend(out, CachedAttention(op.layer, q, result, "k", "v", s.heads, self.layer.params, self.layer.until))

    def _absorb(self, out: PassProgram, q: View, result: View) -> None:
        s, n = self.shape, out.n
        rows = n * s.heads
        partition = heads_partition(out, q)
        # One row per token and head.
        by_head = replace(q, rows=rows, row_bytes=q.head_bytes, heads=1, head_bytes=0, axis=partition.axis)
        nope = out.temporary(rows, 1, s.nope, partition.axis)
        wide = out.temporary(rows, 1, s.rank + s.rope, partition.axis)
        out.copy(by_head.columns(0, s.nope), nope, replace(partition, columns=s.nope, column_step=s.nope))
        out.copy(by_head.columns(s.nope, s.rope), wide.columns(s.rank, s.rope), partition)
        temporary = out.take_temporary
        jobs = out.schedule.numbers(
            word for head in range(s.heads) for t in range(n) for word in (head, t * s.heads + head, 1, t * s.heads + head)
        )
        plan = self.matrices.query_plan
        assert plan is not None
        block = plan.product.activations
        codes = gemv_inputs(out, nope, block, replace(partition, columns=s.nope, column_step=s.nope), temporary)
        gemv_task(out, plan, codes, wide.columns(0, s.rank), jobs, rows, several=False, stride=s.rank + s.rope)
        weighted = out.temporary(n, s.heads, s.rank)
        queries = replace(wide, rows=n, row_bytes=s.heads * wide.row_bytes, heads=s.heads, head_bytes=wide.row_bytes)
        layer, params, selection = self.op.layer, self.layer.params, self.op.selection
        if selection is not None and self._lists(out):
            attend_listed(out, layer, "kv", queries, weighted, params, out.contiguous(selection))
        else:
            values = "v" if self.mode == 1 else "kv"
            attend(out, CachedAttention(layer, queries, weighted, "kv", values, 1, params, self.layer.until), partition)
        plan = self.matrices.output_plan
        assert plan is not None
        block = plan.product.activations
        by_head = replace(weighted, rows=rows, row_bytes=weighted.head_bytes, heads=1, head_bytes=0, axis=partition.axis)
        step = max(1, 1024 // s.rank)
        codes = gemv_inputs(
            out, by_head, block, replace(partition, row_step=step, columns=s.rank, column_step=s.rank), temporary
        )
        to = replace(result, rows=rows, row_bytes=4 * s.v, heads=1, head_bytes=0, width=s.v)
        gemv_task(out, plan, codes, to, jobs, rows, several=False)
