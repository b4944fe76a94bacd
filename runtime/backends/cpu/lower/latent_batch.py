"""Latent attention of prompts, of observed passes, and wherever a Python function has to multiply."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial

import numpy as np

from .....formats import TYPES
from .....simd.workers import Workers
from ....cache_layout import CachePart
from ....placement.compute_buffers import SCORES_BYTES, Expansion
from ..flash import Segment, attend
from ..kernels.attention.block_panels import BLOCK, WORD_BYTES, encode_words
from ..kernels.attention.cache_rows import BYTES, ROW_WORDS, WORDS
from ..kernels.attention.shared_values import SharedValues
from ..kernels.attention.token_selection import mark_selected
from ..kernels.gemm import gemm
from ..kernels.hadamard import transform_rows
from ..kv_cache import CacheRows, KVCache, encode_with_nan, rotate
from ..latent_matrices import Expander, LatentLayer, LatentShape, PackedExpander, takes_bytes
from ..memory import View
from ..pass_program import PassProgram
from ..pass_tasks import Batch
from ..selected_rows import GatheredAttention, gather
from .attention import stored_scores_attention

_ONE_THREAD = Workers(1)
_PIECE = 4096  # tokens whose latents are decoded at a time
_ABSORBED = 128  # tokens whose queries and weighted latents are in memory at a time


def expansion_bytes(s: LatentShape, n: int, context: int, attention_bytes: int, threads: int, is_rounded: bool) -> int:
    """Bytes that `LatentBatch` takes to expand the keys and values of a sequence of `context` tokens for the last n of them:
    those, the queries and the results of the heads that are computed at a time, and the latents, decoded and as products take
    them. is_rounded: keys and values become words or bytes."""
    expansion = Expansion.of(s.heads, context, s.nope + s.rope, s.v, attention_bytes, threads)
    heads = expansion.heads * max(1, expansion.concurrent)
    words = expansion.nbytes // 4 // BLOCK * WORD_BYTES if is_rounded else 0
    return expansion.nbytes + words + 4 * (heads * n * (s.nope + s.rope + s.v) + context * 2 * (s.rank + s.rope))


def may_round(layer: LatentLayer, out: PassProgram) -> bool:
    """Whether what is multiplied with queries or weights may be WORDS: what comes from quantised latents need not be as fine as
    float32, nor what comes from latents of 16 bits where their products with K and V round more."""
    kind, matrices = TYPES[out.compiled.part(layer.op.layer, "kv").type], layer.matrices
    return (not kind.is_float and not matrices.exact) or (kind.name in ("f16", "bf16") and matrices.rounds)


def _words_of_latents(cache: KVCache, layer: int, new: int) -> CacheRows:
    """The latents of the past and of `new` tokens, with their rotated keys, as WORDS. Their widths are whole blocks."""
    m, width = cache.length + new, cache.layers[layer].rows["kv"].width
    words = np.empty((1, m, width // BLOCK * WORD_BYTES), np.uint8)
    for first in range(0, m, _PIECE):
        at = slice(first, min(m, first + _PIECE))
        words[:, at] = _words(cache.read(layer, "kv", new, at)).memory
    return CacheRows.of(words, WORDS)


class LatentBatch:
    """One layer and pass: q [n, heads, nope + rope], row [n, rank + rope] as they are cached, result [n, heads, v], selection
    [n, top_k] or None.

    sparse_from  the position from which on tokens with a selection have their results from elsewhere
    """

    def __init__(
        self,
        layer: LatentLayer,
        out: PassProgram,
        q: View,
        row: View,
        result: View,
        is_observed: bool,
        selection: View | None = None,
    ):
        self._layer, self._op, self._shape, self._mode = layer, layer.op, layer.shape, layer.mode
        self._matrices = layer.matrices
        self._pass, self._q, self._row, self._result = out, q.array, row.array[:, 0], result.array
        self._params, self._flash = layer.params, out.settings.flash
        self.sparse_from = 0 if out.experts_by_gemv else layer.sparse_from  # few tokens share what is expanded
        self._until = max(layer.until, self.sparse_from)
        self._selection = selection.matrix if selection is not None and self.sparse_from else None
        self._scores_bytes = min(out.settings.attention_bytes, SCORES_BYTES)
        self._observer = out.observer if is_observed else None

    @cached_property
    def _takes_bytes(self) -> bool:
        """Whether expanded keys are, where they may be words."""
        return takes_bytes(self._matrices.store, self._op, self._part)

    @property
    def _part(self) -> CachePart:
        return self._pass.compiled.part(self._op.layer, "kv")

    @cached_property
    def _takes_words(self) -> bool:
        """Whether expanded keys and values are. Asked for when there are some: plans of products are made for it."""
        s = self._shape
        return (s.nope + s.rope) % BLOCK == 0 and s.v % BLOCK == 0 and may_round(self._layer, self._pass)

    def run(self) -> None:
        """Attention over cached latents."""
        s, batch, n = self._shape, self._pass.run_inputs.batch, len(self._q)
        observer = self._observer
        if observer is None and self._until:
            until = [at.start + self._until - cache.length for cache, at in batch]
            batch = [
                (cache, slice(at.start, min(at.stop, stop)))
                for (cache, at), stop in zip(batch, until, strict=True)
                if stop > at.start
            ]
            if not batch:
                return
        absorbs = self._mode == 1 or (self._mode == 3 and self._pass.gemv)
        takes_squares = observer is not None and observer.wants_squares and not absorbs
        squares: dict[int, np.ndarray] = {}  # by the first row of a sequence
        keeps_weighted = absorbs or (observer is not None and not takes_squares)
        weighted = np.empty((n, s.heads, s.rank), np.float32) if keeps_weighted else None
        if absorbs:
            assert weighted is not None
            self._attend_latents(weighted, "v" if self._mode == 1 else "kv", batch)
            for _, at in batch:
                heads = weighted[at].transpose(1, 0, 2)
                self._result[at] = self._matrices.finish(heads, self._pass.gemv).transpose(1, 0, 2)
        else:
            expander = self._matrices.expander(self._part)
            for cache, at in batch:
                observed = None
                if takes_squares:
                    observed = squares[at.start] = np.empty((s.heads, s.rank))
                elif observer is not None:
                    assert weighted is not None
                    observed = weighted[at]
                self._expand(self._q[at], cache, expander, self._result[at], observed, self._seen(cache, at))
        if observer is not None:
            self._report(weighted, squares)

    def _seen(self, cache: KVCache, at: slice) -> np.ndarray | None:
        """Which keys each token sees, uint8 [n, keys]; None: all up to its own."""
        if self._selection is None or self._selection[at.stop - 1, 0] < 0:  # the last token sees the most keys
            return None
        seen = np.empty((at.stop - at.start, cache.length + at.stop - at.start), np.uint8)
        mark_selected(self._selection[at], seen)
        return seen

    def observe(self) -> None:
        """With -mla 0: reports the weighted latents, which are cached for the observer alone."""
        batch, s = self._pass.run_inputs.batch, self._shape
        weighted = np.empty((len(self._q), s.heads, s.rank), np.float32)
        self._attend_latents(weighted, "kv", batch)
        self._report(weighted, {})

    def _report(self, weighted: np.ndarray | None, squares: dict[int, np.ndarray]) -> None:
        """Reports the inputs of the matrices: weighted latents float32 [n, heads, rank], and of the sequences with these first
        rows the sums of their squares, float64 [heads, rank]."""
        observer, op, s = self._observer, self._op, self._shape
        assert observer is not None
        kv_b, k_b, v_b = op.observed
        observer.on_input(op, kv_b, 0, np.ascontiguousarray(self._row[:, : s.rank]))
        observer.on_head_inputs(op, k_b, self._q[..., : s.nope])
        if not squares:
            assert weighted is not None
            observer.on_head_inputs(op, v_b, weighted)
            return
        for _, at in self._pass.run_inputs.batch:  # each for itself: sums do not depend on what runs beside a sequence
            if at.start in squares:
                observer.on_head_squares(op, v_b, squares[at.start], at.stop - at.start)
            else:
                assert weighted is not None
                observer.on_head_inputs(op, v_b, weighted[at])

    def _attend_latents(self, out: np.ndarray, values_name: str, batch: Batch) -> None:
        """Fills in the rows of the batch's sequences in out [n, heads, rank]: each head's attention-weighted latents.

        values_name: under which the latents are cached as values; as keys they are "kv".
        """
        s, q, layer, workers = self._shape, self._q, self._op.layer, self._pass.workers
        wide = self._layer.absorbed(q, self._pass.gemv)
        if self._flash:
            segments, (keys_part, values_part) = [], (self._pass.compiled.part(layer, name) for name in ("kv", values_name))
            rotate(wide.reshape(-1, wide.shape[2]), keys_part)
            for cache, at in batch:
                new = at.stop - at.start
                keys, values = cache.rows(layer, "kv", new), cache.rows(layer, values_name, new)
                segments.append(Segment(wide[at], keys, values, cache.length, out[at]))
            attend(segments, 1, self._params, workers, self._pass.gemv, self._pass.settings.rounds)
            rotate(out.reshape(-1, s.rank), values_part)
            return
        for cache, at in batch:
            new = at.stop - at.start
            keys, values = cache.read(layer, "kv", new), cache.read(layer, values_name, new)[..., : s.rank]
            stored_scores_attention(wide[at], keys, values, out[at], self._params, self._scores_bytes, workers)

    def _expand(
        self,
        q: np.ndarray,
        cache: KVCache,
        expander: Expander | PackedExpander,
        out: np.ndarray,
        observed: np.ndarray | None,
        seen: np.ndarray | None,
    ) -> None:
        """Fills in out [n, heads, v] from q [n, heads, nope + rope] and what is cached, with the n tokens' own latents.

        Expands so many heads at a time that their keys and values take at most `attention_bytes` (or what one head needs).
        observed: takes each head's weighted latents, float32 [n, heads, rank], or the sums of their squares, float64 [heads,
        rank], for which latents may be rounded; seen: see `Segment`.
        """
        s, m, workers = self._shape, cache.length + len(q), self._pass.workers
        limit = self._pass.settings.attention_bytes
        expansion = Expansion.of(s.heads, m, s.nope + s.rope, s.v, limit, workers.count)
        heads, concurrent, k_width, v_width = expansion.heads, expansion.concurrent, expansion.k_width, expansion.v_width
        pieces, rotated = self._latents(cache, len(q), expander)
        latents = None
        if observed is not None:
            past = cache.read(self._op.layer, "kv", len(q))[0]
            latents = SharedValues(past[:, : s.rank], self._matrices.exact or observed.dtype == np.float32)

        def expand(first: int) -> None:
            stop, team = min(first + heads, s.heads), _ONE_THREAD if concurrent else workers
            k, v = np.zeros((stop - first, m, k_width), np.float32), np.zeros((stop - first, m, v_width), np.float32)
            program = gemm.ProductList(team.count)
            for at, inputs in pieces:
                expander.expand(program, inputs, first, k[:, at, : s.nope], v[:, at, : s.v])
            program.run(team.ready())
            k[..., s.nope : s.nope + s.rope] = rotated
            result = np.empty((len(q), stop - first, s.v), np.float32)
            queries = np.array(q[:, first:stop], order="C")
            if latents is None or observed is None:
                self._attend(queries, k, v, result, team, seen)
            else:
                shared_out = observed[first:stop] if observed.dtype == np.float64 else observed[:, first:stop]
                self._attend(queries, k, v, result, team, seen, latents, shared_out)
            out[:, first:stop] = result

        starts = range(0, s.heads, heads)
        if concurrent:
            workers.map(expand, starts, s.heads * m * (s.rank + len(q)) * (s.nope + s.rope + s.v))
        else:
            for first in starts:
                expand(first)

    def _latents(
        self, cache: KVCache, new: int, expander: Expander | PackedExpander
    ) -> tuple[list[tuple[slice, gemm.InputBlocks]], np.ndarray]:
        """The latents of the past and of `new` tokens, piece by piece as products take them, and their rotated keys, float32
        [m, rope]."""
        s, workers, m = self._shape, self._pass.workers, cache.length + new
        pieces, rotated = [], np.empty((m, s.rope), np.float32)
        for first in range(0, m, _PIECE):
            at = slice(first, min(m, first + _PIECE))
            rows = cache.read(self._op.layer, "kv", new, at)[0]
            rotated[at] = rows[:, s.rank :]
            pieces.append((at, expander.inputs(rows[:, : s.rank], workers.ready(), workers.count)))
        return pieces, rotated

    def _attend(
        self,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        out: np.ndarray,
        workers: Workers,
        seen: np.ndarray | None,
        shared: SharedValues | None = None,
        shared_out: np.ndarray | None = None,
    ) -> None:
        """Attention of q [n, heads, width] over k [heads, m, width] and v [heads, m, value width], rows filled up to a multiple
        of sixteen numbers with zeros, into out [n, heads, value width]. q and k may be overwritten.

        shared: further values, the same for all heads, whose weighted sums go to shared_out (see flash.Segment).
        """
        if self._flash:
            if self._takes_words and shared is None:
                if self._takes_bytes and self._part.rotation:  # as keys in a cache are
                    _rotate(q, workers)
                    _rotate(k, workers)
                keys = _bytes(k, workers) if self._takes_bytes else _words(k)
                values = _words(v, ROW_WORDS)
            else:
                keys, values = CacheRows.of(k), CacheRows.of(v)
            segment = Segment(q, keys, values, k.shape[1] - len(q), out, shared, shared_out, seen)
            attend([segment], len(k), self._params, workers, self._pass.gemv)
            return
        keys = k[..., : q.shape[2]]
        stored_scores_attention(q, keys, v[..., : out.shape[2]], out, self._params, self._scores_bytes, workers)
        if shared is not None and shared_out is not None:
            values = np.broadcast_to(shared.rows, (len(k), *shared.rows.shape))
            squares = shared_out.dtype == np.float64
            weighted = np.empty((len(q), len(k), shared.width), np.float32) if squares else shared_out
            stored_scores_attention(q, keys, values, weighted, self._params, self._scores_bytes, workers)
            if squares:
                np.einsum("nhr,nhr->hr", weighted, weighted, dtype=np.float64, out=shared_out)


def _words(x: np.ndarray, type_id: int = WORDS) -> CacheRows:
    """float32 [heads, rows, width] as rows of WORDS or ROW_WORDS."""
    heads, rows, width = x.shape
    out = np.empty((heads, rows, width // BLOCK * WORD_BYTES), np.uint8)
    encode_words(np.ascontiguousarray(x, np.float32).reshape(-1), BLOCK if type_id == WORDS else width, out.reshape(-1))
    return CacheRows.of(out, type_id)


def _rotate(x: np.ndarray, workers: Workers) -> None:
    """Transforms rows [..., width], C-contiguous, in place, in runs of the largest power of two that divides their width.
    Products of two such rows stay as they were."""
    width = x.shape[-1]
    runs = np.full(width // (width & -width), width & -width, np.int64)
    workers.map(lambda rows: transform_rows(rows, runs), np.array_split(x.reshape(-1, width), workers.count), 4 * x.size)


def _bytes(x: np.ndarray, workers: Workers) -> CacheRows:
    """float32 [heads, rows, width] as rows of BYTES."""
    parts = np.array_split(x.reshape(-1, x.shape[2]), workers.count)
    rows = np.concatenate(workers.map(lambda rows: encode_with_nan(rows, "q8_0"), parts, 4 * x.size))
    return CacheRows.of(rows.reshape(*x.shape[:2], -1), BYTES)


def _gathered(keys: CacheRows, values: CacheRows, positions: np.ndarray) -> tuple[CacheRows, CacheRows]:
    own = gather(keys, positions)
    return own, own if keys is values else gather(values, positions)


def _words_of_rows(cache: KVCache, layer: int, new: int, positions: np.ndarray) -> tuple[CacheRows, CacheRows]:
    own = _words(cache.read(layer, "kv", new, positions))
    return own, own


def attend_selected(
    latent: LatentLayer, out: PassProgram, q: View, result: View, selection: View, sparse_from: int = 0
) -> None:
    """Adds to the pass that the results of tokens with a selection are those of attention over the selected keys.

    q: [n, heads, nope + rope]; result: [n, heads, v]; selection: [n, top_k], as SelectKeys gives it; sparse_from: the first
    position of a token whose results these are.
    """
    s, state, layer, params = latent.shape, out.run_inputs, latent.op.layer, latent.params
    queries, results, chosen = q.array, result.array, selection.matrix
    names = ("kv", "kv") if latent.mode else ("k", "v")
    parts = [out.compiled.part(layer, name) for name in names]
    fits = s.rank % BLOCK == 0 and s.rope % BLOCK == 0 and TYPES[parts[0].type].is_float and not parts[0].rotation
    fits = fits and latent.mode > 1 and not out.gemv

    def attend() -> None:
        takes_words = fits and may_round(latent, out)
        for cache, at in state.batch:
            first = at.start + max(0, sparse_from - cache.length)
            chosen_rows = first + np.flatnonzero(chosen[first : at.stop, 0] >= 0)
            keys, values = (cache.rows(layer, name, at.stop - at.start) for name in names)
            rows_of = partial(_gathered, keys, values)
            if takes_words and chosen.shape[1] * len(chosen_rows) >= cache.length + at.stop - at.start:
                words = _words_of_latents(cache, layer, at.stop - at.start)
                rows_of = partial(_gathered, words, words)
            elif takes_words:  # of few rows, the same words
                rows_of = partial(_words_of_rows, cache, layer, at.stop - at.start)
            for begin in range(0, len(chosen_rows), _ABSORBED):
                attend_rows(chosen_rows[begin : begin + _ABSORBED], rows_of)

    def attend_rows(rows: np.ndarray, rows_of: Callable[[np.ndarray], tuple[CacheRows, CacheRows]]) -> None:
        gathered = GatheredAttention(parts[0].heads, params, out.workers, out.gemv, *parts)
        wide = latent.absorbed(queries[rows], out.gemv) if latent.mode else queries[rows]
        weighted = np.empty((len(rows), s.heads, s.rank if latent.mode else s.v), np.float32)
        for number, row in enumerate(rows):
            gathered.add(wide[number], *rows_of(chosen[row].astype(np.int64)), weighted[number])
        gathered.run()
        if latent.mode:
            weighted = latent.matrices.finish(weighted.transpose(1, 0, 2), out.gemv).transpose(1, 0, 2)
        results[rows] = weighted

    out.call(attend)
