"""Hunyuan: queries and keys are normalised after their rotation; dense, or with experts and a shared one (A13B).

Both functions raise FormatError for settings that cannot be converted.
"""

from __future__ import annotations

from ..config import Config
from ..model_spec import ModelSpec
from ..rope import read_rope
from .decoder_spec import DecoderSpec, LayerTensor

SCALED_CONTEXT = 256 * 1024  # tokens for which the scaled rotary embedding is made; not what max_position_embeddings says


def hunyuan_moe(config: Config, mla_layout: str) -> ModelSpec:
    """Hunyuan-A13B."""
    config = _same_in_all_layers(config, "moe_topk", "moe_intermediate_size", "num_shared_expert", "num_experts")
    spec = _spec("hunyuan-moe", config)
    rows = config.integer("moe_intermediate_size", spec.intermediate_size)
    if rows != spec.intermediate_size:
        raise config.error(
            f"moe_intermediate_size is {rows}; it has to be intermediate_size, which is {spec.intermediate_size}"
        )
    experts = spec.add_expert_counts("num_experts", rows, used_key="moe_topk")
    shared = config.integer("num_shared_expert", 1)
    spec.add_uint32({"expert_shared_count": shared, "expert_shared_feed_forward_length": shared * rows})
    feed_forward = [
        *spec.experts(experts, rows, router="mlp.gate.wg"),
        *spec.gated_mlp("mlp.shared_mlp", shared * rows, "_shexp"),
    ]
    return spec.build(_layer(spec, feed_forward))


def hunyuan_dense(config: Config, mla_layout: str) -> ModelSpec:
    """The dense models of 0.5 B to 7 B."""
    spec = _spec("hunyuan-dense", config)
    return spec.build(_layer(spec, spec.gated_mlp()))


def _same_in_all_layers(config: Config, *keys: str) -> Config:
    """Replaces lists with a value per layer by that value, which must be the same in all: GGUF has one for all layers."""
    values = {}
    for key in keys:
        value = config.get(key)
        if isinstance(value, list):
            if not value or any(v != value[0] for v in value):
                raise config.error(f"{key} is {value!r:.60}; only the same value for every layer can be converted")
            values[key] = value[0]
    return config.with_values(values)


def _spec(architecture: str, config: Config) -> DecoderSpec:
    for key, supported, what in (
        ("hidden_act", "silu", "this activation"),
        ("use_qk_norm", True, "attention without normalised queries and keys"),
        ("use_cla", False, "attention across layers"),
        ("mlp_bias", False, "biases in the feed-forward block"),
    ):
        config.require(key, supported, what)
    rope = read_rope(config)
    is_scaled = rope.scaling == "dynamic" and rope.settings.get("alpha") is not None
    if is_scaled:  # NTK-aware scaling with a fixed alpha: theta is enlarged, the same for all lengths
        dim = config.integer("head_dim", config.integer("hidden_size") // config.integer("num_attention_heads"), minimum=4)
        theta = rope.theta * rope.settings.number("alpha", positive=True) ** (dim / (dim - 2))
        config = config.with_values({"rope_parameters": {"rope_type": "default", "rope_theta": theta}})
    spec = DecoderSpec(architecture, config)
    if is_scaled:
        spec.add_float32({"rope.scaling.factor": 1.0})
        spec.metadata[f"{architecture}.rope.scaling.type"] = "none"
        spec.add_uint32({"rope.scaling.original_context_length": SCALED_CONTEXT, "context_length": SCALED_CONTEXT})
    return spec


def _layer(spec: DecoderSpec, feed_forward: list[LayerTensor]) -> list[LayerTensor]:
    bias = spec.config.flag("attention_bias", False)
    return [
        spec.norm("attn_norm", "input_layernorm"),
        *spec.attention(bias=bias, output_bias=bias),
        spec.norm("attn_q_norm", "self_attn.query_layernorm", spec.head_dim),
        spec.norm("attn_k_norm", "self_attn.key_layernorm", spec.head_dim),
        spec.norm("ffn_norm", "post_attention_layernorm"),
        *feed_forward,
    ]
