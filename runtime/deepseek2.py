"""Graph of the `deepseek2` architecture (DeepSeek V2, V3, R1): latent attention (see `latent`), grouped mixture of experts."""

from __future__ import annotations

from .blocks import feed_forward
from .cache import KVCache
from .decoder import Block, Decoder, Settings, embedding_and_head
from .hyper import Hyper
from .latent import LatentAttention, Shape, cached_parts, observed_parts
from .norms import RMSNorm
from .rope import rope_from, yarn_mscale
from .weights import WeightStore


def build(store: WeightStore, hyper: Hyper, settings: Settings) -> Decoder:
    """Raises FormatError for a missing key or tensor, or one of the wrong shape, PlanError for an unknown setting."""
    shape, epsilon = Shape(hyper), hyper.float("attention.layer_norm_rms_epsilon")
    rope = rope_from(hyper, shape.rope, True)
    scale = (shape.nope + shape.rope) ** -0.5
    if "rope.scaling.yarn_log_multiplier" in hyper:
        scale *= yarn_mscale(hyper.float("rope.scaling.factor"), hyper.float("rope.scaling.yarn_log_multiplier")) ** 2
    blocks = [
        Block(
            RMSNorm(store, f"blk.{i}.attn_norm.weight", shape.n_embd, epsilon),
            LatentAttention(store, hyper, i, rope, scale, settings),
            RMSNorm(store, f"blk.{i}.ffn_norm.weight", shape.n_embd, epsilon),
            feed_forward(store, hyper, i),
        )
        for i in range(hyper.int("block_count"))
    ]
    embedding, head = embedding_and_head(store, shape.n_embd)

    parts = cached_parts(shape, settings)

    def new_cache(limit: int) -> KVCache:
        return KVCache(len(blocks), parts if store.observer is None else observed_parts(parts, shape), limit)

    norm = RMSNorm(store, "output_norm.weight", shape.n_embd, epsilon)
    return Decoder(store, embedding, blocks, norm, head, hyper.int("context_length"), new_cache, settings)
