"""MiMo-V2-Flash: local layers with attention sinks and more key-value heads, values of another width, experts by sigmoid."""

from __future__ import annotations

import numpy as np

from ...config import Config
from ...draft_layers import LAYER_NORM_NAMES
from ...model_spec import ModelSpec
from ..decoder_spec import SIGMOID_GATING, DecoderSpec, LayerTensor, linear

ARCHITECTURE = "mimo2"
DEFAULTS = {"head_dim": 192, "v_head_dim": 128, "sliding_window": 129, "num_key_value_heads": 4}
DRAFT_LAYERS = 3  # that checkpoints have at most; config.json does not say how many
FRACTION, THETA, LOCAL_THETA = 0.334, 5e6, 1e4  # rotated part of a head, bases of the frequencies


def mimo2(config: Config, mla_layout: str) -> ModelSpec:
    """Raises FormatError for settings that cannot be converted. The draft layers are local ones without experts."""
    config = config.with_defaults(DEFAULTS | {"rms_norm_eps": config.get("layernorm_epsilon")})
    for key, supported, what in (
        ("hidden_act", "silu", "this activation"),
        ("attention_bias", False, "biases in the attention"),
        ("scoring_func", "sigmoid", "this choice of experts"),
        ("topk_method", "noaux_tc", "this choice of experts"),
        ("add_full_attention_sink_bias", False, "sinks in global layers"),
        ("add_swa_attention_sink_bias", True, "local layers without sinks"),
    ):
        config.require(key, supported, what)
    fraction = config.number("partial_rotary_factor", FRACTION)
    both = config.get("rope_parameters")
    is_split = isinstance(both, dict) and isinstance(both.get("full_attention"), dict)
    full, local = (config.part(both.get(f"{kind}_attention") or {} if is_split else {}) for kind in ("full", "sliding"))
    for rope in (full, local):
        rope.require("rope_type", "default", "rotary scaling")
        fraction = rope.number("partial_rotary_factor", fraction)
    theta = full.number("rope_theta", config.number("rope_theta", THETA))
    local_theta = local.number("rope_theta", config.number("swa_rope_theta", LOCAL_THETA), positive=True)
    values = {"rope_theta": theta, "partial_rotary_factor": fraction}
    spec = DecoderSpec(ARCHITECTURE, config, rope=config.part(values))
    pattern = config.get("hybrid_layer_pattern")
    is_local = spec.local_layers(lambda i: bool(pattern[i]) if isinstance(pattern, list) else i > 0 and (i + 1) % 6 != 0)
    window = config.integer("sliding_window_size", config.integer("sliding_window") - 1) + 1
    value_width = config.integer("v_head_dim")
    local_heads = config.integer("swa_num_key_value_heads", 2 * spec.n_kv_heads)
    kv_heads = [local_heads if each else spec.n_kv_heads for each in is_local]
    spec.metadata[f"{ARCHITECTURE}.attention.head_count_kv"] = np.array(kv_heads, np.uint32)
    spec.metadata[f"{ARCHITECTURE}.attention.sliding_window_pattern"] = np.array(is_local, bool)
    spec.add_uint32({"attention.sliding_window": window, "attention.value_length": value_width})
    spec.add_float32({"rope.freq_base_swa": local_theta})
    if config.get("attention_value_scale") is not None:
        spec.add_float32({"attention.value_scale": config.number("attention_value_scale", positive=True)})
    types, sparse = config.get("mlp_layer_types"), config.get("moe_layer_freq")
    has_experts = [t == "sparse" for t in types] if isinstance(types, list) else None
    if has_experts is None:
        has_experts = [bool(x) for x in sparse] if isinstance(sparse, list) else [i > 0 for i in range(spec.n_layers)]
    if len(has_experts) != spec.n_layers:
        raise config.error(f"mlp_layer_types or moe_layer_freq has {len(has_experts)} values for {spec.n_layers} layers")
    rows = config.integer("moe_intermediate_size")
    n = spec.add_expert_counts("n_routed_experts", rows, layers=sum(has_experts))
    spec.add_uint32({"expert_gating_func": SIGMOID_GATING})
    groups, used_groups = config.integer("n_group", 1), config.integer("topk_group", 1)
    if groups > 1:
        spec.add_uint32({"expert_group_count": groups, "expert_group_used_count": used_groups})
    spec.add_float32({"expert_weights_scale": config.number("routed_scaling_factor", 1.0, positive=True)})
    spec.metadata[f"{ARCHITECTURE}.expert_weights_norm"] = config.flag("norm_topk_prob", True)
    bias = LayerTensor("exp_probs_b.bias", "mlp.gate.e_score_correction_bias", (n,))

    def layer(*, local: bool, experts: bool, ffn_norm: str = "post_attention_layernorm") -> list[LayerTensor]:
        q_rows, hidden_size = spec.n_heads * spec.head_dim, spec.hidden_size
        sinks = LayerTensor("attn_sinks.weight", "self_attn.attention_sink_bias", (spec.n_heads,))
        heads = local_heads if local else spec.n_kv_heads
        return [
            spec.norm("attn_norm", "input_layernorm"),
            *linear("attn_q", "self_attn.q_proj", (q_rows, hidden_size)),
            *linear("attn_k", "self_attn.k_proj", (heads * spec.head_dim, hidden_size)),
            *linear("attn_v", "self_attn.v_proj", (heads * value_width, hidden_size)),
            *linear("attn_output", "self_attn.o_proj", (hidden_size, spec.n_heads * value_width)),
            *([sinks] if local else []),
            spec.norm("ffn_norm", ffn_norm),
            *([*spec.experts(n, rows), bias] if experts else spec.gated_mlp()),
        ]

    draft = layer(local=True, experts=False, ffn_norm="pre_mlp_layernorm")
    count = config.count("num_nextn_predict_layers", DRAFT_LAYERS, minimum=0)
    spec.add_draft_layers(
        [*draft, spec.norm("layer_output_norm", "final_layernorm")],
        count=count,
        source=lambda number: f"model.mtp.layers.{number - spec.n_layers}",
        names=LAYER_NORM_NAMES,
        prefixes=("model.mtp.",),
        metadata={
            f"{ARCHITECTURE}.attention.head_count_kv": np.array(kv_heads + [local_heads] * count, np.uint32),
            f"{ARCHITECTURE}.attention.sliding_window_pattern": np.array(is_local + [True] * count, bool),
        },
        refused_by="ik_llama.cpp",
    )
    return spec.build(lambda i: layer(local=is_local[i], experts=has_experts[i]))
