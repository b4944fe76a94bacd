"""Graph of the `llama` architecture: grouped-query attention with rotary positions, dense or expert feed-forward."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .attention import causal_attention
from .cache import KVCache
from .decoder import Block, Decoder, Settings, Step, embedding_and_head
from .feedforward import GatedFeedForward
from .hyper import Hyper
from .moe import MixtureOfExperts, Router
from .norms import RMSNorm
from .rope import Rope, rope_from
from .weights import WeightStore


class Attention:
    """One layer's attention. GGUF keeps q and k rows of llama models permuted so that interleaved rotation applies."""

    def __init__(self, store: WeightStore, hyper: Hyper, layer: int, rope: Rope, settings: Settings):
        n_embd, self.n_head = hyper.int("embedding_length"), hyper.int("attention.head_count")
        self.n_kv = hyper.int("attention.head_count_kv", self.n_head)
        self.k_width = hyper.int("attention.key_length", n_embd // self.n_head)
        self.v_width = hyper.int("attention.value_length", n_embd // self.n_head)
        prefix = f"blk.{layer}.attn_"
        outputs = {"q": self.n_head * self.k_width, "k": self.n_kv * self.k_width, "v": self.n_kv * self.v_width}
        self.linear = {part: store.linear(f"{prefix}{part}.weight", n_embd, rows) for part, rows in outputs.items()}
        self.output = store.linear(f"{prefix}output.weight", self.n_head * self.v_width, n_embd)
        outputs["output"] = n_embd
        names = {part: f"{prefix}{part}.bias" for part in outputs}
        self.bias = {part: store.vector(names[part], rows) for part, rows in outputs.items() if names[part] in store}
        self.workers, self.layer, self.rope, self.scores_bytes = store.workers, layer, rope, settings.scores_bytes
        self.scale = np.float32(hyper.float("attention.scale", self.k_width**-0.5))

    def _project(self, part: str, x: np.ndarray, heads: int, width: int) -> np.ndarray:
        out = self.linear[part].matmul(x)
        if part in self.bias:
            out += self.bias[part]
        return out.reshape(len(x), heads, width)

    def __call__(self, x: np.ndarray, step: Step) -> np.ndarray:
        """float32 [n, n_embd] -> float32 [n, n_embd]."""
        q = self._project("q", x, self.n_head, self.k_width)
        k = self._project("k", x, self.n_kv, self.k_width)
        v = self._project("v", x, self.n_kv, self.v_width)
        table = step.table(self.rope)
        self.rope.rotate(q, table)
        self.rope.rotate(k, table)
        q *= self.scale
        mixed = np.empty((len(x), self.n_head * self.v_width), np.float32)
        for cache, rows in step.segments:
            keys = cache.append(self.layer, "k", k[rows])
            values = cache.append(self.layer, "v", v[rows])
            queries = q[rows].reshape(-1, self.n_kv, self.n_head // self.n_kv, self.k_width).transpose(1, 2, 0, 3)
            result = causal_attention(queries, keys, values, self.scores_bytes, self.workers)
            mixed[rows] = result.transpose(2, 0, 1, 3).reshape(-1, self.n_head * self.v_width)
        out = self.output.matmul(mixed)
        if "output" in self.bias:
            out += self.bias["output"]
        return out


def _feed_forward(store: WeightStore, hyper: Hyper, layer: int) -> Callable[[np.ndarray], np.ndarray]:
    """Dense, or Mixtral's experts: softmax over all, the best few, their weights made to sum to one."""
    prefix, n_embd, n_ff = f"blk.{layer}.", hyper.int("embedding_length"), hyper.int("feed_forward_length")
    if f"{prefix}ffn_gate_inp.weight" not in store:
        return GatedFeedForward.load(store, prefix, "", n_embd, n_ff)
    n_expert = hyper.int("expert_count")
    linear = store.linear(f"{prefix}ffn_gate_inp.weight", n_embd, n_expert)
    router = Router(linear, hyper.int("expert_used_count"), normalise=True)
    return MixtureOfExperts(router, GatedFeedForward.load(store, prefix, "_exps", n_embd, n_ff, n_expert))


def build(store: WeightStore, hyper: Hyper, settings: Settings) -> Decoder:
    """Raises FormatError for a missing key or tensor, or one of the wrong shape."""
    n_embd, n_head = hyper.int("embedding_length"), hyper.int("attention.head_count")
    n_kv, epsilon = hyper.int("attention.head_count_kv", n_head), hyper.float("attention.layer_norm_rms_epsilon")
    k_width = hyper.int("attention.key_length", n_embd // n_head)
    v_width = hyper.int("attention.value_length", n_embd // n_head)
    dims = hyper.int("rope.dimension_count", k_width)
    factors = store.vector("rope_freqs.weight", dims // 2) if "rope_freqs.weight" in store else None
    rope = rope_from(hyper, dims, True, factors)
    blocks = [
        Block(
            RMSNorm(store, f"blk.{i}.attn_norm.weight", n_embd, epsilon),
            Attention(store, hyper, i, rope, settings),
            RMSNorm(store, f"blk.{i}.ffn_norm.weight", n_embd, epsilon),
            _feed_forward(store, hyper, i),
        )
        for i in range(hyper.int("block_count"))
    ]
    embedding, head = embedding_and_head(store, n_embd)

    def new_cache(limit: int) -> KVCache:
        return KVCache(len(blocks), {"k": (n_kv, k_width), "v": (n_kv, v_width)}, limit)

    norm = RMSNorm(store, "output_norm.weight", n_embd, epsilon)
    return Decoder(store, embedding, blocks, norm, head, hyper.int("context_length"), new_cache)
