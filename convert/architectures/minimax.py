"""MiniMax M2: experts by sigmoid and bias in every layer, queries and keys normalised over all heads, partial rotation."""

from __future__ import annotations

from ..checkpoint import Description
from ..config import Config
from .decoder_spec import Outline, Part
from .llama import MIXTRAL_EXPERTS

SIGMOID = 2  # expert_gating_func


def minimax_m2(config: Config, mla_layout: str) -> Description:
    """Hyper-parameters and tensors. Raises FormatError for what config.json says that cannot be converted."""
    config.expect("hidden_act", "silu", "this activation")
    config.expect("scoring_func", "sigmoid", "this choice of experts")
    config.expect("shared_intermediate_size", 0, "a shared expert")
    config.expect("qk_norm_type", "per_layer", "this normalisation of queries and keys")
    head, rotary = config.integer("head_dim", 128), config.get("rotary_dim")
    rope = config.over({"rope_theta": 5e6})
    if rotary is not None:
        rope = rope.over({"partial_rotary_factor": config.integer("rotary_dim") / head})
    outline = Outline("minimax-m2", config.over({"head_dim": head}), rope=rope)
    n = outline.expert_counts("num_local_experts", outline.inner)
    outline.count({"expert_gating_func": SIGMOID})
    for i in range(config.count("num_mtp_modules", 0, least=0) * config.integer("mtp_transformer_layers", 1)):
        number = outline.layers + i
        outline.left_out[f"model.layers.{number}."] = f"multi-token prediction layer {number}"
    layer = [
        outline.norm("attn_norm", "input_layernorm"),
        *outline.attention(),
        outline.norm("attn_q_norm", "self_attn.q_norm", outline.heads * outline.head),
        outline.norm("attn_k_norm", "self_attn.k_norm", outline.heads_kv * outline.head),
        outline.norm("ffn_norm", "post_attention_layernorm"),
        *outline.routed(n, outline.inner, MIXTRAL_EXPERTS, "block_sparse_moe.gate"),
        Part("exp_probs_b.bias", "block_sparse_moe.e_score_correction_bias", (n,)),
    ]
    return outline.describe(layer)
