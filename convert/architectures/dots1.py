"""dots.llm1 (rednote): normalised heads, experts chosen by sigmoid and bias behind a few dense layers."""

from __future__ import annotations

from ..checkpoint import Description
from ..config import Config
from ..tensor_transforms import plain
from .decoder_spec import Outline, Part

EXPERTS = {part: f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")}
SIGMOID = 2  # expert_gating_func


def dots1(config: Config, mla_layout: str) -> Description:
    """Hyper-parameters and tensors. Raises FormatError for what config.json says that cannot be converted."""
    for key, supported, what in (
        ("hidden_act", "silu", "this activation"),
        ("scoring_func", "noaux_tc", "this choice of experts"),
        ("n_group", 1, "experts in groups"),
        ("moe_layer_freq", 1, "experts in only some of the layers"),
    ):
        config.expect(key, supported, what)
    outline = Outline("dots1", config)
    if any(outline.layer_types(lambda i: False)):
        raise config.fail("layer_types has sliding_attention: windows in this architecture cannot be converted")
    dense = config.integer("first_k_dense_replace", 0, least=0)
    if dense > outline.layers:
        raise config.fail(f"first_k_dense_replace is {dense}, of {outline.layers} layers")
    inner, shared = config.integer("moe_intermediate_size"), config.integer("n_shared_experts", 0, least=0)
    n = outline.expert_counts("n_routed_experts", inner, layers=outline.layers - dense)
    outline.count({"leading_dense_block_count": dense, "expert_shared_count": shared, "expert_gating_func": SIGMOID})
    outline.real({"expert_weights_scale": config.real("routed_scaling_factor", 1.0, positive=True)})
    outline.metadata["dots1.expert_weights_norm"] = config.flag("norm_topk_prob", False)
    bias = config.flag("attention_bias", False)
    attention = [
        outline.norm("attn_norm", "input_layernorm"),
        *outline.attention(bias=bias, output_bias=bias, head_norms=plain),
        outline.norm("ffn_norm", "post_attention_layernorm"),
    ]
    routed = [
        *outline.routed(n, inner, EXPERTS),
        Part("exp_probs_b.bias", "mlp.gate.e_score_correction_bias", (n,)),
        *(outline.gated("mlp.shared_experts", inner * shared, "_shexp") if shared else ()),
    ]
    return outline.describe(lambda i: [*attention, *(outline.gated() if i < dense else routed)])
