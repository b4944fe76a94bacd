"""MiniCPM 3: DeepSeek's latent attention in dense layers, factors for embeddings, residuals and logits, LongRoPE."""

from __future__ import annotations

from ...config import Config
from ...model_spec import ModelSpec
from ..decoder_spec import DecoderSpec, LayerTensor
from .deepseek import LatentSizes, attention_tensors, latent_attention

ARCHITECTURE = "minicpm3"
PUBLISHED_FACTORS = (12.0, 1.4, 256)  # scale_emb, scale_depth, dim_model_base, which llama.cpp assumes


def minicpm3(config: Config, mla_layout: str) -> ModelSpec:
    """MiniCPM 3 4B; its attention has one layout, with attn_kv_b. Raises FormatError for settings that cannot be converted."""
    config.require("hidden_act", "silu", "this activation")
    config.require("attention_bias", False, "biases in the attention")
    rope_dim = config.integer("qk_rope_head_dim")
    n_heads, hidden_size = config.integer("num_attention_heads"), config.integer("hidden_size")
    config = config.with_defaults({"v_head_dim": hidden_size // n_heads, "num_key_value_heads": n_heads})
    attention = latent_attention(config)
    # head_dim of the spec is the rotated part of a head, all of which is rotated.
    spec = DecoderSpec(ARCHITECTURE, config.with_values({"head_dim": rope_dim}))
    for key in ("attention.key_length", "attention.value_length"):
        del spec.metadata[f"{ARCHITECTURE}.{key}"]
    spec.add_uint32(
        {"attention.key_length": attention.nope_dim + attention.rope_dim, "attention.value_length": attention.value_dim}
    )
    spec.add_uint32({"attention.q_lora_rank": attention.q_rank, "attention.kv_lora_rank": attention.kv_rank})
    _add_factors(spec)
    layer = [
        spec.norm("attn_norm", "input_layernorm"),
        *_attention_tensors(attention, hidden_size),
        spec.norm("ffn_norm", "post_attention_layernorm"),
        *spec.gated_mlp(),
    ]
    return spec.build(layer, tied=True)


def _add_factors(spec: DecoderSpec) -> None:
    """The factors of embeddings, residuals and logits."""
    config = spec.config
    embedding = config.number("scale_emb", PUBLISHED_FACTORS[0], positive=True)
    depth = config.number("scale_depth", PUBLISHED_FACTORS[1], positive=True)
    base = config.integer("dim_model_base", int(PUBLISHED_FACTORS[2]))
    residual, logit = depth / spec.n_layers**0.5, base / spec.hidden_size
    spec.add_float32({"embedding_scale": embedding, "residual_scale": residual, "logit_scale": logit})
    if (embedding, depth, base) != PUBLISHED_FACTORS:
        spec.notes.append("llama.cpp knows only the published factors of embeddings, residuals and logits")


def _attention_tensors(attention: LatentSizes, hidden_size: int) -> list[LayerTensor]:
    return [
        LayerTensor(t.name.removeprefix("."), f"self_attn{t.sources[0]}", t.shape, t.transform)
        for t in attention_tensors(attention, "legacy", hidden_size, "", "")
    ]
