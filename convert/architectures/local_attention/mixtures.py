"""Mixtures of experts with local and global layers: Laguna, Mellum 2, Trinity (AFMoE), Cohere 2 MoE.

All raise FormatError for settings that cannot be converted. Layers for multi-token prediction are left out.
"""

from __future__ import annotations

import numpy as np

from ...config import Config
from ...metadata import RMS_NORM
from ...model_spec import ModelSpec
from ...tensor_transforms import unchanged
from ..decoder_spec import SIGMOID_GATING, DecoderSpec, LayerTensor, linear
from ..experts.mixture_variants import GATINGS, dense_prefix

LAYER_NORM = ("attention.layer_norm_epsilon", "layer_norm_eps")
LAGUNA_ROPE = {
    "full_attention": {"rope_theta": 500000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_theta": 10000.0, "partial_rotary_factor": 1.0},
}
MELLUM_ROPE = {"full_attention": {"rope_theta": 500000.0}, "sliding_attention": {"rope_theta": 10000.0}}
GATE_BY_HEAD = (True, "per-head", "per_head")
GATE_BY_ELEMENT = ("per-element", "per_element")


def laguna(config: Config, mla_layout: str) -> ModelSpec:
    """Laguna (poolside): heads per layer, attention with a gate by softplus, another rotation in local layers; experts by
    sigmoid plus bias, and a shared one, after dense layers."""
    config.require("hidden_act", "silu", "this activation")
    config.require("moe_apply_router_weight_on_input", False, "weights of experts on their inputs")
    spec, local_dim = _spec_with_local_rope("laguna", config.with_defaults({"head_dim": 128}), LAGUNA_ROPE)
    is_local = spec.local_layers(lambda i: False)
    if any(is_local):
        _add_window_pattern(spec, is_local)
        spec.add_uint32({"rope.dimension_count_swa": local_dim})
    heads = config.get("num_attention_heads_per_layer") or [spec.n_heads] * spec.n_layers
    if len(heads) != spec.n_layers or any(not isinstance(n, int) or n < 1 or n % spec.n_kv_heads for n in heads):
        raise config.error(f"num_attention_heads_per_layer is {heads!r:.80}; a number of heads is needed for each layer")
    spec.metadata["laguna.attention.head_count"] = np.array(heads, np.uint32)
    gates = config.get("gating_types") or [config.get("gating", True)] * spec.n_layers
    if len(gates) != spec.n_layers or any(g not in (*GATE_BY_HEAD, *GATE_BY_ELEMENT) for g in gates):
        raise config.error(f"gating is {gates!r:.80}: only gates per head or per element can be converted")
    dense = dense_prefix(config, spec.n_layers, default=1)
    rows, shared = config.integer("moe_intermediate_size"), config.integer("shared_expert_intermediate_size")
    n = spec.add_expert_counts("num_experts", rows, layers=spec.n_layers - dense)
    spec.add_uint32({"expert_shared_count": 1, "expert_shared_feed_forward_length": shared})
    spec.add_uint32({"leading_dense_block_count": dense, "expert_gating_func": SIGMOID_GATING})
    spec.add_float32({"expert_weights_scale": config.number("moe_routed_scaling_factor", 1.0, positive=True)})
    spec.metadata["laguna.expert_weights_norm"] = True
    softcap = config.number("moe_router_logit_softcapping", 0.0)
    if softcap:
        spec.add_float32({"router_logit_softcapping": softcap})
    bias, hidden_size, kv_rows = config.flag("attention_bias", False), spec.hidden_size, spec.n_kv_heads * spec.head_dim
    routed = [
        *spec.experts(n, rows),
        LayerTensor("exp_probs_b.bias", "mlp.experts.e_score_correction_bias", (n,)),
        *spec.gated_mlp("mlp.shared_expert", shared, "_shexp"),
    ]

    def layer(i: int) -> list[LayerTensor]:
        q_rows = heads[i] * spec.head_dim
        return [
            spec.norm("attn_norm", "input_layernorm"),
            *linear("attn_q", "self_attn.q_proj", (q_rows, hidden_size), bias=bias),
            *linear("attn_k", "self_attn.k_proj", (kv_rows, hidden_size), bias=bias),
            *linear("attn_v", "self_attn.v_proj", (kv_rows, hidden_size), bias=bias),
            *linear("attn_gate", "self_attn.g_proj", (heads[i] if gates[i] in GATE_BY_HEAD else q_rows, hidden_size)),
            *linear("attn_output", "self_attn.o_proj", (hidden_size, q_rows), bias=bias),
            *(spec.norm(f"attn_{p}_norm", f"self_attn.{p}_norm", spec.head_dim) for p in "qk"),
            spec.norm("ffn_norm", "post_attention_layernorm"),
            *(spec.gated_mlp() if i < dense else routed),
        ]

    return spec.build(layer)


def mellum(config: Config, mla_layout: str) -> ModelSpec:
    """Mellum 2 (JetBrains): as Qwen 3 MoE, with local layers, which are rotated otherwise."""
    config.require("hidden_act", "silu", "this activation")
    spec, _ = _spec_with_local_rope("mellum", config.with_defaults({"head_dim": 128}), MELLUM_ROPE)
    is_local = spec.local_layers(lambda i: False)
    if any(is_local):
        _add_window_pattern(spec, is_local)
    types = config.get("mlp_layer_types") or ["sparse"] * spec.n_layers
    if len(types) != spec.n_layers or any(t not in ("dense", "sparse") for t in types):
        raise config.error(f"mlp_layer_types is {types!r:.80}; dense or sparse is needed for each layer")
    rows, has_old_key = config.integer("moe_intermediate_size"), config.get("num_experts") is not None
    n = spec.add_expert_counts("num_experts" if has_old_key else "num_local_experts", rows, layers=types.count("sparse"))
    spec.metadata["mellum.expert_weights_norm"] = config.flag("norm_topk_prob", True)
    spec.skipped_prefixes["mtp."] = "multi-token prediction layers"
    bias = config.flag("attention_bias", False)
    attention = [
        spec.norm("attn_norm", "input_layernorm"),
        *spec.attention(bias=bias, output_bias=bias, head_norms=unchanged),
        spec.norm("ffn_norm", "post_attention_layernorm"),
    ]
    return spec.build(lambda i: [*attention, *(spec.gated_mlp() if types[i] == "dense" else spec.experts(n, rows))])


def afmoe(config: Config, mla_layout: str) -> ModelSpec:
    """Trinity (Arcee): norms before and after both blocks, attention with a gate by sigmoid, rotation in local layers only;
    experts by sigmoid plus bias, and shared ones, after dense layers."""
    for key, supported, what in (
        ("hidden_act", "silu", "this activation"),
        ("score_func", "sigmoid", "this choice of experts"),
        ("n_group", 1, "experts in groups"),
    ):
        config.require(key, supported, what)
    spec = DecoderSpec("afmoe", config.with_defaults({"head_dim": 128}))
    period = config.integer("global_attn_every_n_layers", 4)
    is_local = spec.local_layers(lambda i: (i + 1) % period != 0)
    spec.add_sliding_window(is_local, default_period=4, always=config.get("sliding_window") is not None)
    dense = config.integer("num_dense_layers", 1, minimum=0)
    if dense > spec.n_layers:
        raise config.error(f"num_dense_layers is {dense}, of {spec.n_layers} layers")
    rows, shared = config.integer("moe_intermediate_size"), config.integer("num_shared_experts", 2)
    n = spec.add_expert_counts("num_experts", rows, layers=spec.n_layers - dense)
    spec.add_uint32({"expert_shared_count": shared, "leading_dense_block_count": dense, "expert_gating_func": SIGMOID_GATING})
    spec.add_float32({"expert_weights_scale": config.number("route_scale", 1.0, positive=True)})
    spec.metadata["afmoe.expert_weights_norm"] = config.flag("route_norm", True)
    if not config.flag("mup_enabled", False):  # readers multiply by the root of n_embd
        spec.add_float32({"embedding_scale": 1.0})
        spec.notes.append("mup_enabled is false: llama.cpp scales the embeddings of this architecture all the same")
    bias = config.flag("attention_bias", False)
    attention = [
        spec.norm("attn_norm", "input_layernorm"),
        *spec.attention(bias=bias, output_bias=bias, head_norms=unchanged),
        *linear("attn_gate", "self_attn.gate_proj", (spec.n_heads * spec.head_dim, spec.hidden_size)),
        spec.norm("post_attention_norm", "post_attention_layernorm"),
        spec.norm("ffn_norm", "pre_mlp_layernorm"),
        spec.norm("post_ffw_norm", "post_mlp_layernorm"),
    ]
    routed = [
        *spec.experts(n, rows, router="mlp.router.gate"),
        LayerTensor("exp_probs_b.bias", "mlp.expert_bias", (n,)),
        *spec.gated_mlp("mlp.shared_experts", shared * rows, "_shexp"),
    ]
    return spec.build(lambda i: [*attention, *(spec.gated_mlp() if i < dense else routed)])


def cohere2moe(config: Config, mla_layout: str) -> ModelSpec:
    """Cohere 2 with experts (Command A+): attention and feed-forward block in parallel after one norm; local layers and dense
    ones are rotated; experts by softmax or sigmoid, their sum averaged with that of shared ones.

    ik_llama.cpp and llama.cpp have the same tensors under two names of the architecture: the layout 'ik' writes the former's,
    as far as that has the model (RMS norms, no shared experts), the others the latter's.
    """
    config = config.with_defaults({"head_dim": 128, "logit_scale": 0.0625, "layer_norm_eps": 1e-5, "tie_word_embeddings": True})
    config.require("hidden_act", "silu", "this activation")
    is_rms, shared = config.get("rms_norm_eps") is not None, config.integer("num_shared_experts", 0, minimum=0)
    name = "cohere2_moe" if mla_layout == "ik" and is_rms and not shared else "cohere2moe"
    layers = config.count("num_hidden_layers")
    dense = dense_prefix(config, layers, default=0)
    rows = config.integer("intermediate_size")
    config = config.with_values({"intermediate_size": config.integer("prefix_dense_intermediate_size", rows)})
    spec = DecoderSpec(name, config, norm=RMS_NORM if is_rms else LAYER_NORM)
    period = config.integer("sliding_window_pattern", 4)
    prefix_period = config.integer("prefix_dense_sliding_window_pattern", 1)
    is_local = spec.local_layers(lambda i: (i + 1) % prefix_period != 0 if i < dense else (i - dense + 1) % period != 0)
    if prefix_period != 1 and not all(is_local[:dense]):
        raise config.error(f"prefix_dense_sliding_window_pattern is {prefix_period}: a dense layer would not be rotated")
    _add_window_pattern(spec, is_local)
    n = spec.add_expert_counts("num_experts", rows, layers=spec.n_layers - dense)
    score = config.get("expert_selection_fn", "softmax")
    if score not in GATINGS:
        raise config.error(f"expert_selection_fn is {score!r:.60}; known are {', '.join(GATINGS)}")
    spec.add_uint32({"leading_dense_block_count": dense, "expert_gating_func": GATINGS[score]})
    # Softmax of the chosen experts' logits is that of all, divided by the sum of the chosen.
    spec.metadata[f"{name}.expert_weights_norm"] = score == "softmax" or config.flag("norm_topk_prob", True)
    spec.add_float32({"logit_scale": config.number("logit_scale", positive=True)})
    if shared:
        config.require("shared_expert_combination_strategy", "average", "this combination with shared experts")
        spec.add_uint32({"expert_shared_count": shared, "expert_shared_feed_forward_length": shared * rows})
    if spec.rope.scaling == "default":
        spec.metadata[f"{name}.rope.scaling.type"] = "none"
    spec.skip_prediction_layers(config.count("num_nextn_predict_layers", 0, minimum=0))
    bias = config.flag("attention_bias", False)
    attention = [spec.norm("attn_norm", "input_layernorm"), *spec.attention(bias=bias, output_bias=bias)]
    routed = spec.experts(n, rows)
    if shared:
        routed += spec.gated_mlp("mlp.shared_experts", shared * rows, "_shexp")
    return spec.build(lambda i: [*attention, *(spec.gated_mlp() if i < dense else routed)], tied=True)


def _add_window_pattern(spec: DecoderSpec, is_local: list[bool]) -> None:
    """The metadata of a window, with a flag for each layer whatever the pattern is."""
    spec.add_uint32({"attention.sliding_window": spec.config.integer("sliding_window")})
    spec.metadata[f"{spec.architecture}.attention.sliding_window_pattern"] = np.array(is_local, bool)


def _spec_with_local_rope(architecture: str, config: Config, defaults: dict[str, dict[str, float]]) -> tuple[DecoderSpec, int]:
    """(spec with the rotation of global layers, how many elements of a head local layers rotate).

    rope_parameters has a set of settings for each type of layers; defaults: those of the model's own code.
    """
    parameters = config.part({}) if config.get("rope_parameters") is None else config.section("rope_parameters")
    given = {kind: {} if parameters.get(kind) is None else parameters.section(kind).values for kind in defaults}
    full, local = (config.part(values | given[kind]) for kind, values in defaults.items())
    local.require("rope_type", "default", "rotary scaling of local layers")
    spec = DecoderSpec(architecture, config, rope=config.with_values({"rope_parameters": full.values}))
    spec.add_float32({"rope.freq_base_swa": local.number("rope_theta", positive=True)})
    return spec, int(spec.head_dim * local.number("partial_rotary_factor", 1.0, positive=True))
