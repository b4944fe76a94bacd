"""Graph of the `llama` architecture: grouped-query attention with rotary positions, dense or expert feed-forward."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .attention import Span
from .cache import KVCache
from .decoder import Block, Decoder, Settings, embedding_and_head
from .feedforward import GatedFeedForward
from .grouped import GroupedAttention, Heads
from .hyper import Hyper
from .moe import MixtureOfExperts, Router
from .norms import RMSNorm
from .rope import rope_from
from .weights import WeightStore


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
    heads = Heads(n_head, n_kv, k_width, v_width)
    span = Span(hyper.float("attention.scale", k_width**-0.5))
    dims = hyper.int("rope.dimension_count", k_width)
    factors = store.vector("rope_freqs.weight", dims // 2) if "rope_freqs.weight" in store else None
    rope = rope_from(hyper, dims, True, factors)
    blocks = [
        Block(
            RMSNorm(store, f"blk.{i}.attn_norm.weight", n_embd, epsilon),
            GroupedAttention(store, i, n_embd, heads, rope, span, epsilon),
            RMSNorm(store, f"blk.{i}.ffn_norm.weight", n_embd, epsilon),
            _feed_forward(store, hyper, i),
        )
        for i in range(hyper.int("block_count"))
    ]
    embedding, head = embedding_and_head(store, n_embd)

    def new_cache(limit: int) -> KVCache:
        return KVCache(len(blocks), {"k": (n_kv, k_width), "v": (n_kv, v_width)}, limit)

    norm = RMSNorm(store, "output_norm.weight", n_embd, epsilon)
    return Decoder(store, embedding, blocks, norm, head, hyper.int("context_length"), new_cache, settings)
