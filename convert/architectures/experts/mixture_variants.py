"""Mixtures of experts that differ from a dense family in little: Ling 2, OLMoE, EXAONE MoE, Granite MoE, Hunyuan 3.

All raise FormatError for settings that cannot be converted.
"""

from __future__ import annotations

from ...config import Config
from ...draft_layers import LAYER_NORM_NAMES, QWEN_NAMES
from ...expert_transforms import expert_half, expert_rows
from ...model_spec import ModelSpec
from ...tensor_transforms import select_rows, unchanged
from ..decoder_spec import SIGMOID_GATING, CheckpointNames, DecoderSpec, LayerTensor
from ..llama_variants import GRANITE_FACTORS
from .mixtures import BAILING_NAMES

SOFTMAX_GATING = 1
GATINGS = {"softmax": SOFTMAX_GATING, "sigmoid": SIGMOID_GATING}


def bailing2(config: Config, mla_layout: str) -> ModelSpec:
    """Ling and Ring 2.0: normalised heads, part of which is rotated; experts by sigmoid plus bias, in groups."""
    for key, supported, what in (
        ("hidden_act", "silu", "this activation"),
        ("use_bias", False, "a model with biases"),
        ("use_qkv_bias", False, "a model with biases"),
        ("use_qk_norm", True, "attention without normalised queries and keys"),
        ("norm_head", False, "logits with normalised rows of the output"),
    ):
        config.require(key, supported, what)
    spec = DecoderSpec("bailingmoe2", config, rope=config.with_defaults({"partial_rotary_factor": 0.5}))
    dense = config.integer("first_k_dense_replace", 0, minimum=0)
    rows, shared = config.integer("moe_intermediate_size"), config.integer("num_shared_experts", 0, minimum=0)
    shared_rows = config.integer("moe_shared_expert_intermediate_size", rows)
    if shared > 1 and shared_rows != rows:
        raise config.error(f"{shared} shared experts of moe_shared_expert_intermediate_size {shared_rows} cannot be converted")
    n = _routed(spec, "num_experts", rows, dense, default_score="sigmoid")
    spec.add_uint32({"expert_shared_count": shared, "expert_shared_feed_forward_length": shared_rows})
    q_rows, kv_rows = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    attention = [
        spec.norm("attn_norm", "input_layernorm"),
        LayerTensor("attn_qkv.weight", "attention.query_key_value.weight", (q_rows + 2 * kv_rows, spec.hidden_size)),
        LayerTensor("attn_output.weight", "attention.dense.weight", (spec.hidden_size, q_rows)),
        spec.norm("attn_q_norm", "attention.query_layernorm", spec.head_dim),
        spec.norm("attn_k_norm", "attention.key_layernorm", spec.head_dim),
        spec.norm("ffn_norm", "post_attention_layernorm"),
    ]
    routed = spec.experts(n, rows)
    if config.flag("moe_router_enable_expert_bias", True):
        routed.append(LayerTensor("exp_probs_b.bias", "mlp.gate.expert_bias", (n,)))
    if shared:
        routed += spec.gated_mlp("mlp.shared_experts", shared * shared_rows, "_shexp")
    spec.add_draft_layers([*attention, *routed, spec.norm("layer_output_norm", "final_layernorm")], names=LAYER_NORM_NAMES)
    return spec.build(lambda i: [*attention, *(spec.gated_mlp() if i < dense else routed)], BAILING_NAMES)


def olmoe(config: Config, mla_layout: str) -> ModelSpec:
    """OLMoE: queries and keys normalised over all heads together, experts by softmax in every layer."""
    config.require("hidden_act", "silu", "this activation")
    spec, bias = DecoderSpec("olmoe", config), config.flag("attention_bias", False)
    n = spec.add_expert_counts("num_experts", spec.intermediate_size)
    spec.metadata["olmoe.expert_weights_norm"] = config.flag("norm_topk_prob", False)
    if config.get("clip_qkv") is not None:
        # The model's own code clamps normalised queries and keys, readers of GGUF those that are not yet.
        config.lose("clip_qkv is set: a GGUF has no key for limits of normalised queries and keys, so they are not limited")
    layer = [
        spec.norm("attn_norm", "input_layernorm"),
        *spec.attention(bias=bias, output_bias=bias),
        spec.norm("attn_q_norm", "self_attn.q_norm", spec.n_heads * spec.head_dim),
        spec.norm("attn_k_norm", "self_attn.k_norm", spec.n_kv_heads * spec.head_dim),
        spec.norm("ffn_norm", "post_attention_layernorm"),
        *spec.experts(n, spec.intermediate_size),
    ]
    return spec.build(layer, needs_output=True)


def exaone_moe(config: Config, mla_layout: str) -> ModelSpec:
    """K-EXAONE: normalised heads, local layers, of which alone queries and keys are rotated; experts by sigmoid plus bias."""
    config.require("hidden_act", "silu", "this activation")
    spec = DecoderSpec("exaone-moe", config)
    dense = dense_prefix(config, spec.n_layers, default=1)
    period = config.integer("sliding_window_pattern", 4, minimum=0) if config.get("layer_types") is None else 0
    is_local = spec.local_layers(lambda i: period > 0 and (i + 1) % period != 0)
    spec.add_sliding_window(is_local, default_period=4, always=config.get("sliding_window") is not None)
    rows, shared = config.integer("moe_intermediate_size"), config.integer("num_shared_experts", 1)
    n = _routed(spec, "num_experts", rows, dense, default_score="sigmoid")
    spec.add_uint32({"expert_shared_count": shared, "expert_shared_feed_forward_length": shared * rows})
    attention = [
        spec.norm("attn_norm", "input_layernorm"),
        *spec.attention(head_norms=unchanged),
        spec.norm("ffn_norm", "post_attention_layernorm"),
    ]
    drafts = config.count("num_nextn_predict_layers", 0, minimum=0)
    spec.add_draft_layers(
        [*attention, *spec.gated_mlp()],
        source=lambda number: f"mtp.layers.{number - spec.n_layers}",
        parts=lambda number: "mtp",
        names=QWEN_NAMES,
        prefixes=("mtp.",),
        metadata=spec.window_pattern([*is_local, *_local_drafts(config, is_local, drafts)], default_period=4),
    )
    spec.skipped_prefixes["mtp."] = "multi-token prediction layers"
    bias = LayerTensor("exp_probs_b.bias", "mlp.gate.e_score_correction_bias", (n,))
    other_bias = LayerTensor("exp_probs_b.bias", "mlp.e_score_correction_bias", (n,), alternative=bias)
    routed = [*spec.experts(n, rows), other_bias, *spec.gated_mlp("mlp.shared_experts", shared * rows, "_shexp")]
    return spec.build(lambda i: [*attention, *(spec.gated_mlp() if i < dense else routed)])


def _local_drafts(config: Config, is_local: list[bool], count: int) -> list[bool]:
    """For each draft layer whether its attention is local: from mtp_layer_types, or else as in the layer of its number."""
    types = config.get("mtp_layer_types") or ["sliding_attention" if local else "full_attention" for local in is_local]
    if not isinstance(types, list) or len(types) < count:
        raise config.error(f"mtp_layer_types is {types!r:.80}; a type for each of {count} draft layers is needed")
    return [t == "sliding_attention" for t in types[:count]]


def hy_v3(config: Config, mla_layout: str) -> ModelSpec:
    """Hunyuan 3 (Hy3): normalised heads; experts by sigmoid plus bias, and shared ones, after dense layers."""
    for key, supported, what in (
        ("hidden_act", "silu", "this activation"),
        ("mlp_bias", False, "biases in the feed-forward block"),
    ):
        config.require(key, supported, what)
    spec = DecoderSpec("hy_v3", config.with_defaults({"head_dim": 128, "rope_theta": 11158840.0}))
    dense = dense_prefix(config, spec.n_layers, default=1)
    rows, shared = config.integer("moe_intermediate_size"), config.integer("num_shared_experts", 1)
    n = spec.add_expert_counts("num_experts", rows, layers=spec.n_layers - dense)
    spec.add_uint32({"expert_shared_count": shared, "expert_shared_feed_forward_length": shared * rows})
    spec.add_uint32({"leading_dense_block_count": dense, "expert_gating_func": SIGMOID_GATING})
    spec.add_float32({"expert_weights_scale": config.number("router_scaling_factor", 2.826, positive=True)})
    spec.metadata["hy_v3.expert_weights_norm"] = True
    spec.skip_prediction_layers(config.count("num_nextn_predict_layers", 0, minimum=0))
    bias = config.flag("attention_bias", False)
    attention = [
        spec.norm("attn_norm", "input_layernorm"),
        *spec.attention(bias=bias, output_bias=bias, head_norms=unchanged),
        spec.norm("ffn_norm", "post_attention_layernorm"),
    ]
    routed = [
        *spec.experts(n, rows, router="mlp.router.gate"),
        LayerTensor("exp_probs_b", "mlp.expert_bias", (n,)),
        *spec.gated_mlp("mlp.shared_mlp", shared * rows, "_shexp"),
    ]
    return spec.build(lambda i: [*attention, *(spec.gated_mlp() if i < dense else routed)])


def dense_prefix(config: Config, layers: int, default: int) -> int:
    """How many layers at the beginning have no experts, from mlp_layer_types or else first_k_dense_replace. Raises FormatError
    for dense layers after sparse ones, and for more than there are."""
    types = config.get("mlp_layer_types")
    dense = types.count("dense") if isinstance(types, list) else config.integer("first_k_dense_replace", default, minimum=0)
    if isinstance(types, list) and types != ["dense"] * dense + ["sparse"] * (layers - dense):
        raise config.error(f"mlp_layer_types is {types!r:.80}; only dense layers before sparse ones can be converted")
    if dense > layers:
        raise config.error(f"first_k_dense_replace is {dense}, of {layers} layers")
    return dense


def granitemoe(config: Config, mla_layout: str) -> ModelSpec:
    """Granite 3 MoE: as Granite 3, with experts, the rows of whose gate and up are in one stack, and perhaps a shared one."""
    config.require("hidden_act", "silu", "this activation")
    spec = DecoderSpec("granitemoe", config)
    spec.add_float32({name: config.number(key, 1.0, positive=True) for name, key in GRANITE_FACTORS.items()})
    n, rows, hidden_size = spec.add_expert_counts("num_local_experts", layers=0), spec.intermediate_size, spec.hidden_size
    bias, experts = config.flag("attention_bias", False), "block_sparse_moe"
    shared_rows, shared = config.integer("shared_intermediate_size", 0, minimum=0), []
    if shared_rows:
        spec.add_uint32({"expert_shared_feed_forward_length": shared_rows})
        gate_up, shape = "shared_mlp.input_linear.weight", (2 * shared_rows, hidden_size)
        shared = [
            LayerTensor("ffn_gate_shexp.weight", gate_up, shape, select_rows(0, shared_rows)),
            LayerTensor("ffn_up_shexp.weight", gate_up, shape, select_rows(shared_rows, shared_rows)),
            LayerTensor("ffn_down_shexp.weight", "shared_mlp.output_linear.weight", (hidden_size, shared_rows)),
        ]
    layer = [
        spec.norm("attn_norm", "input_layernorm"),
        *spec.attention(permute=True, bias=bias, output_bias=bias),
        spec.norm("ffn_norm", "post_attention_layernorm"),
        LayerTensor("ffn_gate_inp.weight", f"{experts}.router.layer.weight", (n, hidden_size)),
        LayerTensor("ffn_gate_exps.weight", f"{experts}.input_linear.weight", (n, 2 * rows, hidden_size), expert_half(0)),
        LayerTensor("ffn_up_exps.weight", f"{experts}.input_linear.weight", (n, 2 * rows, hidden_size), expert_half(1)),
        LayerTensor("ffn_down_exps.weight", f"{experts}.output_linear.weight", (n, hidden_size, rows), expert_rows()),
        *shared,
    ]
    return spec.build(layer, CheckpointNames())


def _routed(spec: DecoderSpec, n_key: str, rows: int, dense: int, default_score: str) -> int:
    """Adds the metadata of experts after `dense` dense layers: counts, groups, how scores become weights. Returns their
    number."""
    config, name = spec.config, spec.architecture
    if dense > spec.n_layers:
        raise config.error(f"first_k_dense_replace is {dense}, of {spec.n_layers} layers")
    score = config.get("score_function", default_score)
    if score not in GATINGS:
        raise config.error(f"score_function is {score!r:.60}; known are {', '.join(GATINGS)}")
    n = spec.add_expert_counts(n_key, rows, layers=spec.n_layers - dense)
    groups, used_groups = config.integer("n_group", 1), config.integer("topk_group", 1)
    if n % groups or used_groups > groups:
        raise config.error(f"{used_groups} of {groups} groups (topk_group, n_group) cannot be taken of {n} experts")
    spec.add_uint32({"leading_dense_block_count": dense, "expert_gating_func": GATINGS[score]})
    spec.add_uint32({"expert_group_count": groups, "expert_group_used_count": used_groups})
    spec.add_float32({"expert_weights_scale": config.number("routed_scaling_factor", 1.0, positive=True)})
    spec.metadata[f"{name}.expert_weights_norm"] = config.flag("norm_topk_prob", True)
    return n
