"""Mixtures of experts with a router by sigmoid or softmax: GLM-4.5, Solar Open, dots.llm1, MiniMax M2, Ling.

All raise FormatError for settings that cannot be converted. MiniMax M2's layers for multi-token prediction are left out.
"""

from __future__ import annotations

import numpy as np

from ...config import Config
from ...draft_layers import UNNAMED
from ...model_spec import ModelSpec
from ...tensor_transforms import Transform, interleave_halves, select_rows, unchanged, unit_columns
from ..decoder_spec import SIGMOID_GATING, CheckpointNames, DecoderSpec, LayerTensor
from ..llama import MIXTRAL_EXPERTS

GLM4_ROPE_FRACTION = {"partial_rotary_factor": 0.5}  # the default of the model's own code
HEAD_EPSILON = 1e-7  # that Ling adds to the lengths of its output's columns
BAILING_NAMES = CheckpointNames(embedding="model.word_embeddings.weight")


def glm4moe(config: Config, mla_layout: str) -> ModelSpec:
    """GLM-4.5 and 4.6: part of each head is rotated; experts, chosen by sigmoid plus bias, after a few dense layers."""
    config.require("hidden_act", "silu", "this activation")
    spec = DecoderSpec("glm4moe", config, rope=config.with_defaults(GLM4_ROPE_FRACTION))
    dense = _dense_layers(spec, default=1)
    rows, shared = config.integer("moe_intermediate_size"), config.integer("n_shared_experts", 1, minimum=0)
    experts = spec.add_expert_counts("n_routed_experts", rows, layers=spec.n_layers - dense)
    spec.add_uint32({"leading_dense_block_count": dense, "expert_shared_count": shared, "expert_gating_func": SIGMOID_GATING})
    _add_groups(spec, experts)
    spec.add_float32({"expert_weights_scale": config.number("routed_scaling_factor", 1.0, positive=True)})
    spec.metadata["glm4moe.expert_weights_norm"] = config.flag("norm_topk_prob", True)
    head_norms = unchanged if config.flag("use_qk_norm", False) else None
    attention = [
        spec.norm("attn_norm", "input_layernorm"),
        *spec.attention(bias=config.flag("attention_bias", False), head_norms=head_norms),
        spec.norm("post_attention_norm", "post_attention_layernorm"),
    ]
    routed = [*_biased_experts(spec, experts, rows), *_shared_experts(spec, rows * shared)]
    spec.add_draft_layers([*attention, *routed])
    return spec.build(lambda i: [*attention, *(spec.gated_mlp() if i < dense else routed)])


def solar_open(config: Config, mla_layout: str) -> ModelSpec:
    """Solar Open: as GLM-4.5, under whose name llama.cpp has it, with experts in every layer and whole heads rotated."""
    defaults = {"partial_rotary_factor": 1.0, "head_dim": 128, "rope_theta": 1e6, "use_qk_norm": False}
    defaults |= {"intermediate_size": config.integer("moe_intermediate_size"), "first_k_dense_replace": 0}
    return glm4moe(config.with_defaults(defaults), mla_layout)


def dots1(config: Config, mla_layout: str) -> ModelSpec:
    """dots.llm1 (rednote): normalised heads; experts, chosen by sigmoid plus bias, after a few dense layers."""
    for key, supported, what in (
        ("hidden_act", "silu", "this activation"),
        ("scoring_func", "noaux_tc", "this choice of experts"),
        ("moe_layer_freq", 1, "experts in only some of the layers"),
    ):
        config.require(key, supported, what)
    spec = DecoderSpec("dots1", config)
    is_local = spec.local_layers(lambda i: False)
    spec.add_sliding_window(is_local)
    if any(is_local):
        spec.notes.append("llama.cpp does not know of the sliding window in this architecture")
    dense = _dense_layers(spec, default=0)
    rows, shared = config.integer("moe_intermediate_size"), config.integer("n_shared_experts", 0, minimum=0)
    experts = spec.add_expert_counts("n_routed_experts", rows, layers=spec.n_layers - dense)
    spec.add_uint32({"leading_dense_block_count": dense, "expert_shared_count": shared, "expert_gating_func": SIGMOID_GATING})
    _add_groups(spec, experts)
    spec.add_float32({"expert_weights_scale": config.number("routed_scaling_factor", 1.0, positive=True)})
    spec.metadata["dots1.expert_weights_norm"] = config.flag("norm_topk_prob", False)
    bias = config.flag("attention_bias", False)
    attention = [
        spec.norm("attn_norm", "input_layernorm"),
        *spec.attention(bias=bias, output_bias=bias, head_norms=unchanged),
        spec.norm("ffn_norm", "post_attention_layernorm"),
    ]
    routed = [*_biased_experts(spec, experts, rows), *_shared_experts(spec, rows * shared)]
    return spec.build(lambda i: [*attention, *(spec.gated_mlp() if i < dense else routed)], needs_output=True)


def minimax_m2(config: Config, mla_layout: str) -> ModelSpec:
    """MiniMax M2: experts by sigmoid plus bias in every layer, q and k normalised over all heads, partial rotation."""
    config.require("hidden_act", "silu", "this activation")
    config.require("scoring_func", "sigmoid", "this choice of experts")
    config.require("shared_intermediate_size", 0, "a shared expert")
    config.require("qk_norm_type", "per_layer", "this normalisation of queries and keys")
    head_dim = config.integer("head_dim", 128)
    rope = config.with_defaults({"rope_theta": 5e6})
    if config.get("rotary_dim") is not None:
        rope = rope.with_defaults({"partial_rotary_factor": config.integer("rotary_dim") / head_dim})
    spec = DecoderSpec("minimax-m2", config.with_defaults({"head_dim": head_dim}), rope=rope)
    n = spec.add_expert_counts("num_local_experts", spec.intermediate_size)
    spec.add_uint32({"expert_gating_func": SIGMOID_GATING})
    modules = config.count("num_mtp_modules", 0, minimum=0)
    spec.skip_prediction_layers(modules * config.integer("mtp_transformer_layers", 1), UNNAMED)
    layer = [
        spec.norm("attn_norm", "input_layernorm"),
        *spec.attention(),
        spec.norm("attn_q_norm", "self_attn.q_norm", spec.n_heads * spec.head_dim),
        spec.norm("attn_k_norm", "self_attn.k_norm", spec.n_kv_heads * spec.head_dim),
        spec.norm("ffn_norm", "post_attention_layernorm"),
        *spec.experts(n, spec.intermediate_size, MIXTRAL_EXPERTS, "block_sparse_moe.gate"),
        LayerTensor("exp_probs_b.bias", "block_sparse_moe.e_score_correction_bias", (n,)),
    ]
    return spec.build(layer, needs_output=True)


def bailing(config: Config, mla_layout: str) -> ModelSpec:
    """Ling and Bailing (inclusionAI): a Llama's attention from one matrix, experts by softmax and shared ones."""
    for key, supported, what in (
        ("hidden_act", "silu", "this activation"),
        ("use_bias", False, "a model with biases"),
        ("use_qkv_bias", False, "a model with biases"),
        ("norm_softmax", False, "logits with normalised rows of the output"),
        ("multi_gate", False, "several routers"),
        ("first_k_dense_replace", 0, "dense layers"),
        ("score_function", "softmax", "this choice of experts"),
    ):
        config.require(key, supported, what)
    spec = DecoderSpec("bailingmoe", config)
    if spec.rotary_dim != spec.head_dim:
        raise config.error("rotating a part of each head cannot be converted for this architecture")
    rows, shared = config.integer("moe_intermediate_size"), config.integer("num_shared_experts", 0, minimum=0)
    n = spec.add_expert_counts("num_experts", rows)
    spec.add_uint32({"leading_dense_block_count": 0, "expert_shared_count": shared})
    spec.add_float32({"expert_weights_scale": 1.0})
    spec.metadata["bailingmoe.expert_weights_norm"] = config.flag("norm_topk_prob", True)
    layer = [
        spec.norm("attn_norm", "input_layernorm"),
        *_bailing_attention(spec),
        spec.norm("ffn_norm", "post_attention_layernorm"),
        *spec.experts(n, rows),
        *_shared_experts(spec, rows * shared),
    ]
    divide = config.flag("norm_head", False)
    return spec.build(layer, BAILING_NAMES, head_transform=unit_columns(HEAD_EPSILON) if divide else unchanged)


def _bailing_attention(spec: DecoderSpec) -> list[LayerTensor]:
    q_rows, kv_rows = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    shape = (q_rows + 2 * kv_rows, spec.hidden_size)

    def permuted(rows: np.ndarray) -> np.ndarray:
        return interleave_halves(rows, spec.head_dim)

    transforms: dict[str, Transform] = {
        "q": select_rows(0, q_rows, permuted),
        "k": select_rows(q_rows, kv_rows, permuted),
        "v": select_rows(q_rows + kv_rows, kv_rows),
    }
    source = "attention.query_key_value.weight"
    return [
        *(LayerTensor(f"attn_{p}.weight", source, shape, transform) for p, transform in transforms.items()),
        LayerTensor("attn_output.weight", "attention.dense.weight", (spec.hidden_size, q_rows)),
    ]


def _dense_layers(spec: DecoderSpec, default: int) -> int:
    """How many layers at the beginning have no experts. Raises FormatError for more than there are."""
    dense = spec.config.integer("first_k_dense_replace", default, minimum=0)
    if dense > spec.n_layers:
        raise spec.config.error(f"first_k_dense_replace is {dense}, of {spec.n_layers} layers")
    return dense


def _add_groups(spec: DecoderSpec, experts: int) -> None:
    """Adds the metadata of groups, of which some are chosen before their experts. Raises FormatError for impossible ones."""
    groups, used_groups = spec.config.integer("n_group", 1), spec.config.integer("topk_group", 1)
    if experts % groups or used_groups > groups:
        raise spec.config.error(f"{used_groups} of {groups} groups (topk_group, n_group) cannot be taken of {experts} experts")
    if groups > 1:
        spec.add_uint32({"expert_group_count": groups, "expert_group_used_count": used_groups})


def _biased_experts(spec: DecoderSpec, n: int, rows: int) -> list[LayerTensor]:
    """n experts, and the bias that is added to their scores when they are chosen."""
    return [*spec.experts(n, rows), LayerTensor("exp_probs_b.bias", "mlp.gate.e_score_correction_bias", (n,))]


def _shared_experts(spec: DecoderSpec, rows: int) -> list[LayerTensor]:
    """The experts that every token uses, as one block with `rows` rows of gate and up; none for 0 rows."""
    return spec.gated_mlp("mlp.shared_experts", rows, "_shexp") if rows else []
