"""Kimi K3's text model: Kimi Linear with gated latent attention, experts that work in a latent, another activation, and
attention residuals, which weigh the sums of earlier blocks of layers.

llama.cpp knows this architecture, ik_llama.cpp does not: latent attention is in llama.cpp's layout whatever is asked for.
"""

from __future__ import annotations

from dataclasses import replace

from ...config import Config
from ...model_spec import ModelSpec
from ...tensor_spec import TensorSpec
from ...tensor_transforms import product, reshaped
from ..decoder_spec import DecoderSpec, LayerTensor, expert_stacks, linear
from ..llama import MIXTRAL_EXPERTS
from .kimi_layers import (
    SPARSE,
    add_routing,
    delta_attention,
    delta_output,
    dense_layers,
    latent_attention,
    layer_types,
    with_our_keys,
)
from .layers import add_key_value_heads, attention_layers

ARCHITECTURE = "kimi-k3"
# tensor of the GGUF -> prefix of the two of the checkpoint that are multiplied
RESIDUAL_SCORES = {"attn_res_score": "self_attention_res", "ffn_res_score": "mlp_res"}


def kimi_k3(config: Config, mla_layout: str) -> ModelSpec:
    """Raises FormatError for settings that cannot be converted."""
    config = with_our_keys(config)
    settings = config.section("linear_attn_config")
    for key, supported, what in (
        ("hidden_act", "situ", "this activation"),
        ("moe_router_activation_func", "sigmoid", "this score of experts"),
        ("attention_bias", False, "biases in the attention"),
        ("mla_use_nope", True, "latent attention with positions"),
        ("moe_layer_freq", 1, "dense layers between those with experts"),
        ("num_nextn_predict_layers", 0, "a model with draft layers"),
        ("tie_word_embeddings", False, "an output that shares the embeddings"),
    ):
        config.require(key, supported, what)
    settings.require("use_full_rank_gate", True, "a gate of delta attention from two matrices")
    rope = config.integer("qk_rope_head_dim")
    spec = DecoderSpec(ARCHITECTURE, config.with_values({"head_dim": rope, "rope_parameters": None, "rope_scaling": None}))
    is_attention, n = attention_layers(spec, layer_types(spec)), spec.n_heads
    add_key_value_heads(spec, is_attention, 1)
    if settings.get("gate_lower_bound") is not None:
        spec.add_float32({"kda.gate_lower_bound": settings.number("gate_lower_bound")})
    spec.add_uint32({"attn_res.block_size": config.integer("attn_res_block_size")})
    for key in ("beta", "linear_beta"):
        spec.add_float32({f"activation.situ_{key}": config.number(f"activation_situ_{key}", positive=True)})
    decay = LayerTensor("ssm_a", "self_attn.A_log", (n,), reshaped(n, exponential=-1))
    decay = replace(decay, alternative=replace(decay, shape=(1, 1, n, 1)))
    delta = [*delta_attention(spec, decay, full_rank={"g": "ssm_g"}), *delta_output(spec, "self_attn.o_proj")]
    gate_rows = config.integer("v_head_dim") if config.flag("mla_use_output_gate", False) else 0
    latent = latent_attention(spec, gate_rows=gate_rows)
    dense = dense_layers(spec)
    experts = _experts(spec, dense)

    def layer(number: int) -> list[LayerTensor]:
        return [
            spec.norm("attn_norm", "input_layernorm"),
            *(latent if is_attention[number] else delta),
            spec.norm("ffn_norm", "post_attention_layernorm"),
            *(spec.gated_mlp() if number < dense else experts),
        ]

    model = spec.build(layer)
    for number in range(spec.n_layers):
        for name, source in RESIDUAL_SCORES.items():
            model.tensors.append(_score(spec, f"blk.{number}.{name}", f"model.layers.{number}.{source}"))
    model.tensors.append(_score(spec, "output_res_score", "model.output_attn_res"))
    return model


def _score(spec: DecoderSpec, name: str, source: str) -> TensorSpec:
    """A norm's weights times those of the matrix of one row that reads its result."""
    norm, matrix = f"{source}_norm.weight", f"{source}_proj.weight"
    return TensorSpec(f"{name}.weight", (norm, matrix), (spec.hidden_size,), product, last_shape=(1, spec.hidden_size))


def _experts(spec: DecoderSpec, dense: int) -> list[LayerTensor]:
    """Experts that read a latent of the layer's input, and shared ones that read the input."""
    config, n, rows = spec.config, add_routing(spec, dense), spec.config.integer("moe_intermediate_size")
    latent, latents = spec.hidden_size, []
    if config.get("routed_expert_hidden_size") is not None:
        latent = config.integer("routed_expert_hidden_size")
        spec.add_uint32({"expert_latent_length": latent})
        latents = linear("ffn_routed_down", f"{SPARSE}.routed_expert_down_proj", (latent, spec.hidden_size))
        latents += linear("ffn_routed_up", f"{SPARSE}.routed_expert_up_proj", (spec.hidden_size, latent))
        if config.flag("latent_moe_use_norm", False):
            latents.append(spec.norm("ffn_routed_norm", f"{SPARSE}.routed_expert_norm", latent))
    return [
        LayerTensor("ffn_gate_inp.weight", f"{SPARSE}.gate.weight", (n, spec.hidden_size)),
        *expert_stacks(n, rows, latent, MIXTRAL_EXPERTS),
        LayerTensor("exp_probs_b.bias", f"{SPARSE}.gate.e_score_correction_bias", (n,)),
        *latents,
        *spec.gated_mlp(f"{SPARSE}.shared_experts", config.integer("n_shared_experts", 1) * rows, "_shexp"),
    ]
