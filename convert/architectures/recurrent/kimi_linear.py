"""Kimi Linear: delta attention, every few layers latent attention without positions, experts by sigmoid plus bias.

ik_llama.cpp does not know this architecture: latent attention is in llama.cpp's layout whatever is asked for.
"""

from __future__ import annotations

from dataclasses import replace

from ...config import Config
from ...model_spec import ModelSpec
from ...tensor_transforms import kv_b_keys, kv_b_values, reshaped
from ..decoder_spec import SIGMOID_GATING, DecoderSpec, LayerTensor, linear
from ..llama import MIXTRAL_EXPERTS
from .layers import ATTENTION, add_key_value_heads, attention_layers

# key of ours -> other names of it in config.json
_ALIASES = {
    "max_position_embeddings": ("model_max_length",),
    "num_experts": ("num_local_experts", "n_routed_experts"),
    "num_experts_per_tok": ("num_experts_per_token",),
    "n_shared_experts": ("num_shared_experts",),
    "norm_topk_prob": ("moe_renormalize",),
    "n_group": ("num_expert_group",),
}
SPARSE = "block_sparse_moe"
_DEFAULTS = {"linear_head_dim": 128, "linear_num_heads": 32, "linear_conv_kernel_dim": 4}
_LINEAR_KEYS = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads"}
_LINEAR_KEYS |= {"short_conv_kernel_size": "linear_conv_kernel_dim"}


def kimi_linear(config: Config, mla_layout: str) -> ModelSpec:
    """Raises FormatError for settings that cannot be converted."""
    config = _with_our_keys(config)
    config.require("hidden_act", "silu", "this activation")
    config.require("moe_router_activation_func", "sigmoid", "this score of experts")
    config.require("attention_bias", False, "biases in the attention")
    rope = config.integer("qk_rope_head_dim")
    spec = DecoderSpec("kimi-linear", config.with_values({"head_dim": rope, "rope_parameters": None, "rope_scaling": None}))
    is_attention = attention_layers(spec, _layer_types(spec))
    add_key_value_heads(spec, is_attention, 1)
    if config.integer("linear_num_heads") != spec.n_heads:
        raise config.error(f"{config.get('linear_num_heads')} heads of delta attention and {spec.n_heads} of the other kind")
    delta, latent = _delta_attention(spec), _latent_attention(spec)
    dense = config.integer("first_k_dense_replace", 1, minimum=0)
    types = config.get("mlp_layer_types")
    if isinstance(types, list):
        dense = types.count("dense")
        if types != ["dense"] * dense + ["sparse"] * (spec.n_layers - dense):
            raise config.error(f"mlp_layer_types is {types!r:.80}; only dense layers before sparse ones can be converted")
    experts = _experts(spec, dense)
    first_layers = [  # transformers saves them under the experts' name
        replace(own, alternative=other) for own, other in zip(spec.gated_mlp(), spec.gated_mlp(SPARSE), strict=True)
    ]

    def layer(number: int) -> list[LayerTensor]:
        return [
            spec.norm("attn_norm", "input_layernorm"),
            *(latent if is_attention[number] else delta),
            spec.norm("ffn_norm", "post_attention_layernorm"),
            *(first_layers if number < dense else experts),
        ]

    return spec.build(layer)


def _with_our_keys(config: Config) -> Config:
    given = {ours: config.get(other) for ours, names in _ALIASES.items() for other in names if config.get(other) is not None}
    config = config.with_defaults({ours: value for ours, value in given.items() if config.get(ours) is None})
    if config.get("linear_attn_config") is not None:
        linear_config = config.section("linear_attn_config")
        values = {ours: linear_config.get(key) for key, ours in _LINEAR_KEYS.items() if linear_config.get(key) is not None}
        config = config.with_values(values)
    return config.with_defaults(_DEFAULTS)


def _layer_types(spec: DecoderSpec) -> object:
    """layer_types, or what linear_attn_config says: layers of attention, counted from 1."""
    types, settings = spec.config.get("layer_types"), spec.config.get("linear_attn_config")
    if types is not None or not isinstance(settings, dict):
        return types
    listed = settings.get("full_attn_layers")
    if not isinstance(listed, list):
        raise spec.config.error(f"full_attn_layers is {listed!r:.60}; a list of layers is needed")
    return [ATTENTION[0] if i + 1 in listed else "linear_attention" for i in range(spec.n_layers)]


def _delta_attention(spec: DecoderSpec) -> list[LayerTensor]:
    """The tensors of a layer of delta attention; adds their metadata."""
    config, source, hidden = spec.config, "self_attn", spec.hidden_size
    n, width, kernel = (config.integer(key) for key in ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"))
    spec.add_uint32({"ssm.conv_kernel": kernel, "kda.head_dim": width})
    size, tensors = n * width, []
    for part in "qkv":
        tensors += linear(f"attn_{part}", f"{source}.{part}_proj", (size, hidden))
        convolution = LayerTensor(
            f"ssm_conv1d_{part}.weight", f"{source}.{part}_conv1d.weight", (size, 1, kernel), reshaped(kernel, 1, size)
        )
        tensors.append(replace(convolution, alternative=replace(convolution, shape=(size, kernel))))
    for name in "fg":
        tensors += linear(f"ssm_{name}_a", f"{source}.{name}_a_proj", (width, hidden))
        tensors += linear(f"ssm_{name}_b", f"{source}.{name}_b_proj", (size, width))
    return [
        *tensors,
        *linear("ssm_beta", f"{source}.b_proj", (n, hidden)),
        LayerTensor("ssm_a", f"{source}.A_log", (1, 1, n, 1), reshaped(1, n, negated_exponential=True)),
        LayerTensor("ssm_dt.bias", f"{source}.dt_bias", (size,)),
        spec.norm("ssm_norm", f"{source}.o_norm", width),
        *linear("attn_output", f"{source}.o_proj", (hidden, size)),
    ]


def _latent_attention(spec: DecoderSpec) -> list[LayerTensor]:
    """The tensors of a layer of latent attention; adds their metadata."""
    config, source, hidden, n = spec.config, "self_attn", spec.hidden_size, spec.n_heads
    nope, rope, v_width = (config.integer(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    rank, q_rank = config.integer("kv_lora_rank"), config.integer("q_lora_rank", 0, minimum=0)
    if q_rank:
        raise config.error("q_lora_rank is set: queries from a latent cannot be converted for this architecture")
    keys = {"kv_lora_rank": rank, "key_length": rank + rope, "value_length": rank}
    keys |= {"key_length_mla": nope + rope, "value_length_mla": v_width}
    spec.add_uint32({f"attention.{key}": value for key, value in keys.items()})
    kv_b = (n * (nope + v_width), rank)
    return [
        *linear("attn_q", f"{source}.q_proj", (n * (nope + rope), hidden)),
        *linear("attn_kv_a_mqa", f"{source}.kv_a_proj_with_mqa", (rank + rope, hidden)),
        spec.norm("attn_kv_a_norm", f"{source}.kv_a_layernorm", rank),
        LayerTensor("attn_k_b.weight", f"{source}.kv_b_proj.weight", kv_b, kv_b_keys(n, nope, v_width, by_head=True)),
        LayerTensor("attn_v_b.weight", f"{source}.kv_b_proj.weight", kv_b, kv_b_values(n, nope, v_width, by_head=True)),
        *linear("attn_output", f"{source}.o_proj", (hidden, n * v_width)),
    ]


def _experts(spec: DecoderSpec, dense: int) -> list[LayerTensor]:
    config, source = spec.config, SPARSE
    rows, shared = config.integer("moe_intermediate_size"), config.integer("n_shared_experts", 1)
    n = spec.add_expert_counts("num_experts", rows, layers=spec.n_layers - dense)
    spec.add_uint32({"leading_dense_block_count": dense, "expert_shared_count": shared, "expert_gating_func": SIGMOID_GATING})
    groups = config.integer("n_group", 1)
    if groups > 1:
        spec.add_uint32({"expert_group_count": groups, "expert_group_used_count": config.integer("topk_group", 1)})
    spec.add_float32({"expert_weights_scale": config.number("routed_scaling_factor", 1.0, positive=True)})
    spec.metadata["kimi-linear.expert_weights_norm"] = config.flag("norm_topk_prob", True)
    return [
        *spec.experts(n, rows, MIXTRAL_EXPERTS, f"{source}.gate"),
        LayerTensor("exp_probs_b.bias", f"{source}.gate.e_score_correction_bias", (n,)),
        *spec.gated_mlp(f"{source}.shared_experts", shared * rows, "_shexp"),
    ]
