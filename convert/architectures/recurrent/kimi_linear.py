"""Kimi Linear: delta attention, every few layers latent attention without positions, experts by sigmoid plus bias.

ik_llama.cpp does not know this architecture: latent attention is in llama.cpp's layout whatever is asked for.
"""

from __future__ import annotations

from ...config import Config
from ...model_spec import ModelSpec
from ...tensor_transforms import reshaped
from ..decoder_spec import DecoderSpec, LayerTensor
from ..llama import MIXTRAL_EXPERTS
from .kimi_k3 import kimi_k3
from .kimi_layers import (
    SPARSE,
    add_routing,
    delta_attention,
    delta_output,
    dense_layers,
    latent_attention,
    layer_types,
    with_either_source,
    with_our_keys,
)
from .layers import add_key_value_heads, attention_layers


def kimi_linear(config: Config, mla_layout: str) -> ModelSpec:
    """Raises FormatError for settings that cannot be converted. Kimi K3's text model has the same name in config.json."""
    if config.get("attn_res_block_size") is not None:
        return kimi_k3(config, mla_layout)
    config = with_our_keys(config)
    config.require("hidden_act", "silu", "this activation")
    config.require("moe_router_activation_func", "sigmoid", "this score of experts")
    config.require("attention_bias", False, "biases in the attention")
    rope = config.integer("qk_rope_head_dim")
    spec = DecoderSpec("kimi-linear", config.with_values({"head_dim": rope, "rope_parameters": None, "rope_scaling": None}))
    is_attention = attention_layers(spec, layer_types(spec))
    add_key_value_heads(spec, is_attention, 1)
    n = spec.n_heads
    decay = LayerTensor("ssm_a", "self_attn.A_log", (1, 1, n, 1), reshaped(1, n, exponential=-1))
    delta = [*delta_attention(spec, decay), *delta_output(spec, "self_attn.o_proj")]
    if config.get("q_lora_rank"):
        raise config.error("q_lora_rank is set: queries from a latent cannot be converted for this architecture")
    latent = latent_attention(spec)
    dense = dense_layers(spec)
    experts = _experts(spec, dense)
    first_layers = with_either_source(spec.gated_mlp(), spec.gated_mlp(SPARSE))  # as transformers saves them

    def layer(number: int) -> list[LayerTensor]:
        return [
            spec.norm("attn_norm", "input_layernorm"),
            *(latent if is_attention[number] else delta),
            spec.norm("ffn_norm", "post_attention_layernorm"),
            *(first_layers if number < dense else experts),
        ]

    return spec.build(layer)


def _experts(spec: DecoderSpec, dense: int) -> list[LayerTensor]:
    rows, n = spec.config.integer("moe_intermediate_size"), add_routing(spec, dense)
    return [
        *spec.experts(n, rows, MIXTRAL_EXPERTS, f"{SPARSE}.gate"),
        LayerTensor("exp_probs_b.bias", f"{SPARSE}.gate.e_score_correction_bias", (n,)),
        *spec.gated_mlp(f"{SPARSE}.shared_experts", spec.config.integer("n_shared_experts", 1) * rows, "_shexp"),
    ]
