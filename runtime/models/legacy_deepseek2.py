"""Graphs with latent attention (see `latent`): `deepseek2` (DeepSeek V2, V3, R1) with its mixture of experts, `minicpm3`."""

from __future__ import annotations

from ..backends.cpu.blocks import feed_forward
from ..backends.cpu.decoder import Block, Decoder, Settings, embedding_and_head
from ..backends.cpu.kv_cache import KVCache
from ..backends.cpu.latent import LatentAttention, Shape, cached_parts, observed_parts
from ..backends.cpu.norms import RMSNorm
from ..backends.cpu.rope import frequency_factors, rope_from, yarn_mscale
from ..backends.cpu.weights import WeightStore
from ..hparams import MAX_LAYERS, HParams


def build(store: WeightStore, hparams: HParams, settings: Settings) -> Decoder:
    """Raises FormatError for a missing key or tensor, or one of the wrong shape, PlanError for an unknown setting."""
    shape, epsilon = Shape(hparams), hparams.float("attention.layer_norm_rms_epsilon")
    is_deepseek = hparams.architecture == "deepseek2"
    hparams = hparams if is_deepseek else hparams.with_defaults(_minicpm3(hparams))
    rope = rope_from(hparams, shape.rope, is_deepseek, frequency_factors(store, hparams, shape.rope, settings.n_ctx))
    scale = (shape.nope + shape.rope) ** -0.5
    if "rope.scaling.yarn_log_multiplier" in hparams:
        scale *= yarn_mscale(hparams.float("rope.scaling.factor"), hparams.float("rope.scaling.yarn_log_multiplier")) ** 2
    blocks = [
        Block(
            RMSNorm(store, f"blk.{i}.attn_norm.weight", shape.n_embd, epsilon),
            LatentAttention(store, hparams, i, rope, scale, settings),
            RMSNorm(store, f"blk.{i}.ffn_norm.weight", shape.n_embd, epsilon),
            feed_forward(store, hparams, i),
            scale=hparams.float("residual_scale", 0.0) or 1.0,
        )
        for i in range(hparams.size("block_count", maximum=MAX_LAYERS))
    ]
    embedding, head = embedding_and_head(store, shape.n_embd)

    parts = cached_parts(shape, settings)

    def new_cache(limit: int) -> KVCache:
        return KVCache(len(blocks), parts if store.observer is None else observed_parts(parts, shape), limit)

    norm = RMSNorm(store, "output_norm.weight", shape.n_embd, epsilon)
    return Decoder(
        store,
        embedding,
        blocks,
        norm,
        head,
        hparams.size("context_length"),
        new_cache,
        settings,
        embedding_scale=hparams.float("embedding_scale", 0.0) or 1.0,
        logit_scale=hparams.float("logit_scale", 0.0) or 1.0,
    )


def _minicpm3(hparams: HParams) -> dict[str, float]:
    """Factors of the published model, for files that do not say them."""
    layers, width = hparams.int("block_count"), hparams.int("embedding_length")
    return {"embedding_scale": 12.0, "residual_scale": 1.4 / layers**0.5, "logit_scale": 256 / width}
