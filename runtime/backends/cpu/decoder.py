"""The frame that all graphs share: embedding, pre-norm blocks with residuals, output norm, head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ....simd.workers import Workers, one_blas_thread
from .attention import Span, causal_attention
from .flash import Segment, attend, run_tasks
from .kernels.attention.shared_values import Shared
from .kernels.elementwise import add_part, add_rows
from .kv_cache import KVCache, Rows, Task
from .norms import Norm
from .rope import Rope
from .weights import Linear, WeightStore

ADDED = 1 << 16  # numbers from which on a sum is shared out: some ten microseconds
SCORES_BYTES = 2 << 20  # scores that a thread has in hand: about what its own cache holds


@dataclass(frozen=True)
class Settings:
    """How a model is run; every field can be given to `load_model` by name.

    n_ctx             tokens a session may hold; None: the context length that the model was trained for
    cache_bytes       decoded float32 weights kept in memory; None: 4 GiB, or a quarter of what is free if that is less
    threads           cores used; None: all that the process may use
    batch             tokens of several sequences taken on together
    ubatch            tokens per pass through the layers: more use big matrices better, fewer take less memory for activations
    parallel          sequences that a server works on at once, each with n_ctx tokens of its own
    cache_k, cache_v  types of the cached keys and values; None: f16, or f32 with `exact`. With mla 2 and 3 only cache_k counts.
    flash             attention that never stores its scores; without it they are, within `attention_bytes`
    attention_bytes   most that attention takes for scores, or for keys and values that it expands from latents
    mla               latent attention: 0 caches each head's keys and values; 1 caches the latents for keys and for values apart
                      and absorbs the matrices of both into query and output; 2 caches the latents once and expands keys and
                      values from them; 3 caches them once and does whichever multiplies less for the tokens at hand. The same
                      numbers up to rounding.
    repack            weights are interleaved (as `repack` does for files) when they are loaded
    expert_reduction  (n, share): a token uses its n strongest experts, and of the others it would use those that weigh at least
                      share times the strongest
    exact             weights multiply as float32, without rounding the activations to eight bits first
    """

    n_ctx: int | None = None
    cache_bytes: int | None = None
    threads: int | None = None
    batch: int = 2048
    ubatch: int = 2048
    parallel: int = 1
    cache_k: str | None = None
    cache_v: str | None = None
    flash: bool = True
    attention_bytes: int = 512 << 20
    mla: int = 3
    repack: bool = False
    expert_reduction: tuple[int, float] | None = None
    exact: bool = False

    @property
    def cache_types(self) -> tuple[str, str]:
        """Of keys and of values."""
        usual = "f32" if self.exact else "f16"
        return self.cache_k or usual, self.cache_v or usual


@dataclass
class Step:
    """One pass: the tokens of several sequences, concatenated.

    segments      the cache of each sequence and the rows that are its tokens
    positions     int64 [n], each token's place in its own sequence
    flash         attention whose scores are never stored
    scores_bytes  without flash: for the scores that a thread has in hand
    """

    segments: list[tuple[KVCache, slice]]
    positions: np.ndarray
    workers: Workers
    flash: bool
    scores_bytes: int
    _tables: dict[int, np.ndarray] = field(default_factory=dict)

    def table(self, rope: Rope) -> np.ndarray:
        """The rotation table of all tokens, computed once per pass."""
        key = id(rope)
        if key not in self._tables:
            self._tables[key] = rope.table(self.positions)
        return self._tables[key]

    def attend(self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray, span: Span) -> np.ndarray:
        """Appends k and v to the caches of `layer` and lets every query see its own sequence.

        q float32 [n, heads, width], k [n, kv heads, width], v [n, kv heads, value width] -> [n, heads * value width].
        """
        before = self._put(layer, {"k": k, "v": v})
        return self._look(layer, q, ("k", "v"), v.shape[1:], span, self.segments, before)

    def put(self, layer: int, rows: dict[str, np.ndarray]) -> None:
        """Appends to the caches of `layer`: name -> float32 [n, heads, width]."""
        run_tasks(self._put(layer, rows), self.workers)

    def look(
        self,
        layer: int,
        q: np.ndarray,
        names: tuple[str, str],
        v_shape: tuple[int, ...],
        span: Span,
        segments: list[tuple[KVCache, slice]],
    ) -> np.ndarray:
        """Attention of q [n, heads, width] over what is cached under two names as keys and values (their first elements).

        v_shape: heads and width of the values. Returns [n, heads * value width]; rows of other segments are left as they are.
        """
        return self._look(layer, q, names, v_shape, span, segments, [])

    def check(self, store: WeightStore, layer: int, mixed: np.ndarray) -> None:
        """Has the result of an attention looked at, if somebody wants every result to be: keys and values may have been beyond
        the range of the type that they are kept in."""
        if store.watch:
            types = " and ".join(part.type for part in self.segments[0][0].parts.values())
            store.check(f"the attention of layer {layer} over keys and values kept as {types}", mixed)

    def _put(self, layer: int, rows: dict[str, np.ndarray]) -> list[Task]:
        tasks = [cache.put(layer, name, new[at]) for cache, at in self.segments for name, new in rows.items()]
        return [task for task in tasks if task is not None]

    def _look(
        self,
        layer: int,
        q: np.ndarray,
        names: tuple[str, str],
        v_shape: tuple[int, ...],
        span: Span,
        segments: list[tuple[KVCache, slice]],
        before: list[Task],
    ) -> np.ndarray:
        (n_kv, v_width), (k_name, v_name) = v_shape, names
        out = np.empty((len(q), q.shape[1], v_width), np.float32)
        if self.flash:
            parts = []
            for cache, at in segments:
                new = at.stop - at.start
                keys, values = cache.rows(layer, k_name, new), cache.rows(layer, v_name, new)
                parts.append(Segment(np.ascontiguousarray(q[at]), keys, values, cache.length, out[at]))
            attend(parts, n_kv, span, self.workers, before)
            return out.reshape(len(q), -1)
        run_tasks(before, self.workers)
        for cache, at in segments:
            new = at.stop - at.start
            keys, values = cache.read(layer, k_name, new), cache.read(layer, v_name, new)[..., :v_width]
            self._plain(q[at], keys, values, out[at], span)
        return out.reshape(len(q), -1)

    def over(
        self,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        out: np.ndarray,
        span: Span,
        workers: Workers,
        shared: Shared | None = None,
        shared_out: np.ndarray | None = None,
    ) -> None:
        """Attention of q [n, heads, width] over k [heads, m, width] and v [heads, m, value width], rows filled up to a multiple
        of sixteen numbers with zeros, into out [n, heads, value width]: float32, C-contiguous, m >= n.

        shared: m values more, the same for all heads, that are weighed into shared_out (see flash.Segment).
        """
        if self.flash:
            segment = Segment(q, Rows.of(k), Rows.of(v), k.shape[1] - len(q), out, shared, shared_out)
            attend([segment], len(k), span, workers)
            return
        self._plain(q, k[..., : q.shape[2]], v[..., : out.shape[2]], out, span)
        if shared is not None and shared_out is not None:
            values = np.broadcast_to(shared.rows, (len(k), *shared.rows.shape))
            squares = shared_out.dtype == np.float64
            weighed = np.empty((len(q), len(k), shared.width), np.float32) if squares else shared_out
            self._plain(q, k[..., : q.shape[2]], values, weighed, span)
            if squares:
                np.einsum("nhr,nhr->hr", weighed, weighed, dtype=np.float64, out=shared_out)

    def _plain(self, q: np.ndarray, keys: np.ndarray, values: np.ndarray, out: np.ndarray, span: Span) -> None:
        n, heads, width = q.shape
        queries = (q * np.float32(span.scale)).reshape(n, len(keys), heads // len(keys), width).transpose(1, 2, 0, 3)
        result = causal_attention(queries, keys, values, self.scores_bytes, self.workers, span)
        out[...] = result.transpose(2, 0, 1, 3).reshape(out.shape)


@dataclass(frozen=True)
class Block:
    """One layer: x += attention(attn_norm(x)); x += feed_forward(ffn_norm(x)).

    attn_norm, ffn_norm  None: the block sees x as it is
    attn_post, ffn_post  norms of what is added, where a model has them
    scale                factor of what is added
    parallel             both blocks see the same x, instead of the second what the first has added
    """

    attn_norm: Norm | None
    attention: Callable[[np.ndarray, Step], np.ndarray]
    ffn_norm: Norm | None
    feed_forward: Callable[[np.ndarray], np.ndarray]
    attn_post: Norm | None = None
    ffn_post: Norm | None = None
    scale: float = 1.0
    parallel: bool = False

    def attended(self, x: np.ndarray, step: Step) -> np.ndarray:
        """What the attention adds to x."""
        out = self.attention(self.attn_norm(x) if self.attn_norm is not None else x, step)
        return self._added(out, self.attn_post)

    def fed_forward(self, x: np.ndarray) -> np.ndarray:
        """What the feed-forward block adds to x."""
        out = self.feed_forward(self.ffn_norm(x) if self.ffn_norm is not None else x)
        return self._added(out, self.ffn_post)

    def _added(self, out: np.ndarray, post: Norm | None) -> np.ndarray:
        if post is not None:
            out = post(out)
        if self.scale != 1:
            out *= np.float32(self.scale)
        return out


OnLayer = Callable[[int, np.ndarray], None]


@dataclass(frozen=True)
class Decoder:
    """A whole graph.

    n_context        the length it was trained for
    new_cache        (tokens at most) -> what a sequence keeps
    embedding_scale  factor of the embeddings
    logit_scale      factor of the logits
    logit_softcap    logits become softcap * tanh(logit / softcap); 0: not
    on_layer         each is called as (layer, its output float32 [n, n_embd], to be read only) in every pass
    single           takes the embedding of a single token [1, n_embd], overwriting it, through all layers, if it can
    """

    store: WeightStore
    embedding: Linear
    blocks: list[Block]
    norm: Norm
    head: Linear
    n_context: int
    new_cache: Callable[[int], KVCache]
    settings: Settings
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    on_layer: list[OnLayer] = field(default_factory=list)
    single: Callable[[np.ndarray, KVCache], bool] | None = None

    @property
    def n_vocab(self) -> int:
        return self.head.rows

    def hidden(self, tokens: np.ndarray, caches: list[tuple[KVCache, int]]) -> np.ndarray:
        """One pass. tokens int [n]; caches: each sequence's cache and how many of the tokens, in order, are its next ones.

        Returns the normalised output of the last layer, float32 [n, n_embd]; the caches then hold the tokens.
        """
        for cache, count in caches:
            cache.room_for(count)
        # NaN and infinity are looked for in the results, not reported by the hardware.
        with np.errstate(all="ignore"):
            x = self.embedding.lookup(tokens)
            self.store.check(self.embedding.name, x)
            if self.embedding_scale != 1:
                x *= np.float32(self.embedding_scale)
            if self.single is None or len(tokens) != 1 or not self.single(x, caches[0][0]):
                with one_blas_thread():
                    x = self._through_layers(x, self._step(caches))
            x = self.norm(x)
        for cache, count in caches:
            cache.commit(count)
        return x

    def _step(self, caches: list[tuple[KVCache, int]]) -> Step:
        segments, positions, row = [], [], 0
        for cache, count in caches:
            segments.append((cache, slice(row, row + count)))
            positions.append(np.arange(cache.length, cache.length + count))
            row += count
        settings = self.settings
        scores_bytes = min(settings.attention_bytes, SCORES_BYTES)
        return Step(segments, np.concatenate(positions), self.store.workers, settings.flash, scores_bytes)

    def _through_layers(self, x: np.ndarray, step: Step) -> np.ndarray:
        for number, block in enumerate(self.blocks):
            attended = block.attended(x, step)
            fed_forward = block.fed_forward(x) if block.parallel else None
            self._add(x, attended)
            self.store.check(f"the attention of layer {number}", x)
            self._add(x, block.fed_forward(x) if fed_forward is None else fed_forward)
            self.store.check(f"layer {number}", x)
            for told in self.on_layer:
                told(number, x)
        return x

    def _add(self, x: np.ndarray, more: np.ndarray) -> None:
        """x += more, by several threads where there is much of it."""
        if self.store.workers.count == 1 or x.size < ADDED:
            x += more
            return
        places, factors = np.arange(len(x)), np.ones(len(x), np.float32)
        add_rows(self.store.workers.ready(), add_part.address, np.ascontiguousarray(more), factors, places, x)

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """float32 [n, n_embd] -> float32 [n, n_vocab]."""
        with one_blas_thread(), np.errstate(all="ignore"):
            logits = self.head.matmul(hidden)
            if self.logit_scale != 1:
                logits *= np.float32(self.logit_scale)
            if self.logit_softcap:
                logits /= np.float32(self.logit_softcap)
                np.tanh(logits, out=logits)
                logits *= np.float32(self.logit_softcap)
            return logits


def embedding_and_head(store: WeightStore, n_embd: int) -> tuple[Linear, Linear]:
    """token_embd.weight and output.weight; a model without the latter uses the former for both."""
    embedding = store.linear("token_embd.weight")
    shape = (n_embd, embedding.rows)
    store.tensor("token_embd.weight", shape)
    return embedding, store.linear("output.weight", *shape) if "output.weight" in store else embedding
