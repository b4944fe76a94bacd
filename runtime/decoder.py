"""The frame that all graphs share: embedding, pre-norm blocks with residuals, output norm, head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from .attention import Span, causal_attention
from .cache import KVCache
from .norms import RMSNorm
from .rope import Rope
from .threads import Workers, one_blas_thread
from .weights import Linear, WeightStore


@dataclass(frozen=True)
class Settings:
    """How a model is run; every field can be given to `load_model` by name.

    n_ctx         tokens a session may hold; None: the context length that the model was trained for
    cache_bytes   decoded float32 weights kept in memory
    threads       cores used; None: all that the process may use
    batch         tokens per pass: more use big matrices better, fewer take less memory for activations
    scores_bytes  attention scores that a thread computes at a time
    mla           latent attention: 'expand' keys and values from the latents, 'absorb' their matrices into query and output,
                  or 'auto': whichever multiplies less for the tokens at hand. The same numbers up to rounding.
    """

    n_ctx: int | None = None
    cache_bytes: int = 4 << 30
    threads: int | None = None
    batch: int = 2048
    scores_bytes: int = 2 << 20
    mla: str = "auto"


@dataclass
class Step:
    """One pass: the tokens of several sequences, concatenated.

    segments   the cache of each sequence and the rows that are its tokens
    positions  int64 [n], each token's place in its own sequence
    """

    segments: list[tuple[KVCache, slice]]
    positions: np.ndarray
    workers: Workers
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
        n_kv, v_width = v.shape[1:]
        q *= np.float32(span.scale)
        mixed = np.empty((len(q), q.shape[1] * v_width), np.float32)
        for cache, rows in self.segments:
            keys, values = cache.append(layer, "k", k[rows]), cache.append(layer, "v", v[rows])
            queries = q[rows].reshape(-1, n_kv, q.shape[1] // n_kv, q.shape[2]).transpose(1, 2, 0, 3)
            result = causal_attention(queries, keys, values, self.scores_bytes, self.workers, span)
            mixed[rows] = result.transpose(2, 0, 1, 3).reshape(-1, mixed.shape[1])
        return mixed


@dataclass(frozen=True)
class Block:
    """One layer: x += attention(attn_norm(x)); x += feed_forward(ffn_norm(x))."""

    attn_norm: RMSNorm
    attention: Callable[[np.ndarray, Step], np.ndarray]
    ffn_norm: RMSNorm
    feed_forward: Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Decoder:
    """A whole graph. n_context: the length it was trained for; new_cache: (tokens at most) -> what a sequence keeps."""

    store: WeightStore
    embedding: Linear
    blocks: list[Block]
    norm: RMSNorm
    head: Linear
    n_context: int
    new_cache: Callable[[int], KVCache]
    settings: Settings

    @property
    def n_vocab(self) -> int:
        return self.head.rows

    def hidden(self, tokens: np.ndarray, caches: list[tuple[KVCache, int]]) -> np.ndarray:
        """One pass. tokens int [n]; caches: each sequence's cache and how many of the tokens, in order, are its next ones.

        Returns the normalised output of the last layer, float32 [n, n_embd]; the caches then hold the tokens.
        """
        segments, positions, row = [], [], 0
        for cache, count in caches:
            cache.room_for(count)
            segments.append((cache, slice(row, row + count)))
            positions.append(np.arange(cache.length, cache.length + count))
            row += count
        step = Step(segments, np.concatenate(positions), self.store.workers, self.settings.scores_bytes)
        # NaN and infinity are looked for in the results, not reported by the hardware.
        with one_blas_thread(), np.errstate(all="ignore"):
            x = self.embedding.lookup(tokens)
            self.store.check(self.embedding.name, x)
            for number, block in enumerate(self.blocks):
                x += block.attention(block.attn_norm(x), step)
                self.store.check(f"the attention of layer {number}", x)
                x += block.feed_forward(block.ffn_norm(x))
                self.store.check(f"layer {number}", x)
            x = self.norm(x)
        for cache, count in caches:
            cache.commit(count)
        return x

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """float32 [n, n_embd] -> float32 [n, n_vocab]."""
        with one_blas_thread(), np.errstate(all="ignore"):
            return self.head.matmul(hidden)


def embedding_and_head(store: WeightStore, n_embd: int) -> tuple[Linear, Linear]:
    """token_embd.weight and output.weight; a model without the latter uses the former for both."""
    embedding = store.linear("token_embd.weight")
    shape = (n_embd, embedding.rows)
    store.tensor("token_embd.weight", shape)
    return embedding, store.linear("output.weight", *shape) if "output.weight" in store else embedding
