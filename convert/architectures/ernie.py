"""ERNIE 4.5: neighbouring pairs are rotated; dense, or experts chosen by softmax and bias in every layer or every so many."""

from __future__ import annotations

from ..checkpoint import Description
from ..config import Config
from ..tensor_transforms import flattened
from .decoder_spec import Outline, Part

EXPERTS = {part: f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")}
THETA = {"rope_theta": 500000.0}  # what the models' own code takes where config.json does not say
PREDICTION = ("model.mtp_block.", "model.mtp_emb_norm.", "model.mtp_hidden_norm.", "model.mtp_linear_proj.")


def ernie(config: Config, mla_layout: str) -> Description:
    """The dense models. Raises FormatError for what config.json says that cannot be converted."""
    outline = _outline("ernie4_5", config)
    return outline.describe(_layer(outline, outline.gated()), tied=True)


def ernie_moe(config: Config, mla_layout: str) -> Description:
    """The mixtures of experts. Raises FormatError for what config.json says that cannot be converted."""
    outline = _outline("ernie4_5-moe", config)
    layers, interval = outline.layers, config.integer("moe_layer_interval", 1)
    first = config.integer("moe_layer_start_index", 1, least=0)
    last = config.integer("moe_layer_end_index", -1, least=-1)
    if last not in (-1, layers - 1):
        raise config.fail(f"moe_layer_end_index is {last}; only experts up to the last layer, {layers - 1}, can be converted")
    if interval > 1:
        outline.notes.append("llama.cpp cannot read this architecture with experts in every so many layers")
    inner, shared = config.integer("moe_intermediate_size"), config.integer("moe_num_shared_experts", 0, least=0)
    routed_layers = sum(i >= first and (i + 1) % interval == 0 for i in range(layers))
    experts = outline.expert_counts("moe_num_experts", inner, used="moe_k", layers=routed_layers)
    outline.count({"interleave_moe_layer_step": interval, "leading_dense_block_count": first, "expert_shared_count": shared})
    if shared:
        outline.count({"expert_shared_feed_forward_length": inner * shared})
    outline.left_out |= dict.fromkeys(PREDICTION, "multi-token prediction")
    bias = Part("exp_probs_b.bias", "mlp.moe_statics.e_score_correction_bias", (1, experts), flattened)
    routed = [
        *outline.routed(experts, inner, EXPERTS),
        *([bias] if config.flag("moe_use_aux_free", True) else ()),
        *(outline.gated("mlp.shared_experts", inner * shared, "_shexp") if shared else ()),
    ]

    def layer(i: int) -> list[Part]:
        return _layer(outline, routed if i >= first and (i + 1) % interval == 0 else outline.gated())

    return outline.describe(layer, tied=True)


def _outline(architecture: str, config: Config) -> Outline:
    config.expect("hidden_act", "silu", "this activation")
    config.expect("use_bias", False, "a model with biases")
    return Outline(architecture, config.over(THETA))


def _layer(outline: Outline, feed_forward: list[Part]) -> list[Part]:
    return [
        outline.norm("attn_norm", "input_layernorm"),
        *outline.attention(),
        outline.norm("ffn_norm", "post_attention_layernorm"),
        *feed_forward,
    ]
