"""GLM-4.5 and 4.6: part of each head is rotated, experts chosen by sigmoid and bias behind a few dense layers."""

from __future__ import annotations

from ..checkpoint import Description
from ..config import Config
from ..tensor_transforms import plain
from .decoder_spec import Outline, Part

EXPERTS = {part: f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")}
SIGMOID = 2  # expert_gating_func
PART = {"partial_rotary_factor": 0.5}  # what the models' own code takes where config.json does not say


def glm4moe(config: Config, mla_layout: str) -> Description:
    """Hyper-parameters and tensors. Raises FormatError for what config.json says that cannot be converted.

    The layers for multi-token prediction behind the last one are left out, and block_count is that of the others.
    """
    config.expect("hidden_act", "silu", "this activation")
    outline = Outline("glm4moe", config, rope=config.over(PART))
    dense = config.integer("first_k_dense_replace", 1, least=0)
    if dense > outline.layers:
        raise config.fail(f"first_k_dense_replace is {dense}, of {outline.layers} layers")
    inner, shared = config.integer("moe_intermediate_size"), config.integer("n_shared_experts", 1, least=0)
    experts = outline.expert_counts("n_routed_experts", inner, layers=outline.layers - dense)
    outline.count({"leading_dense_block_count": dense, "expert_shared_count": shared, "expert_gating_func": SIGMOID})
    _groups(outline, experts)
    outline.real({"expert_weights_scale": config.real("routed_scaling_factor", 1.0, positive=True)})
    outline.metadata["glm4moe.expert_weights_norm"] = config.flag("norm_topk_prob", True)
    for i in range(config.count("num_nextn_predict_layers", 0, least=0)):
        number = outline.layers + i
        outline.left_out[f"model.layers.{number}."] = f"multi-token prediction layer {number}"

    head_norms = plain if config.flag("use_qk_norm", False) else None
    attention = [
        outline.norm("attn_norm", "input_layernorm"),
        *outline.attention(bias=config.flag("attention_bias", False), head_norms=head_norms),
        outline.norm("post_attention_norm", "post_attention_layernorm"),
    ]
    routed = [
        *outline.routed(experts, inner, EXPERTS),
        Part("exp_probs_b.bias", "mlp.gate.e_score_correction_bias", (experts,)),
        *(outline.gated("mlp.shared_experts", inner * shared, "_shexp") if shared else ()),
    ]
    return outline.describe(lambda i: [*attention, *(outline.gated() if i < dense else routed)])


def _groups(outline: Outline, experts: int) -> None:
    """Experts in groups, of which a token uses only some."""
    config = outline.config
    groups, used = config.integer("n_group", 1), config.integer("topk_group", 1)
    if experts % groups or used > groups:
        raise config.fail(f"{used} of {groups} groups (topk_group, n_group) cannot be taken of {experts} experts")
    if groups > 1:
        outline.count({"expert_group_count": groups, "expert_group_used_count": used})
