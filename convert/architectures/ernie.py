"""ERNIE 4.5: dense, or with experts by softmax plus bias in every layer or every n-th; q and k rows are already interleaved.

Both functions raise FormatError for settings that cannot be converted.
"""

from __future__ import annotations

from ..config import Config
from ..draft_layers import UNNAMED
from ..model_spec import ModelSpec
from ..tensor_transforms import flatten
from .decoder_spec import DecoderSpec, LayerTensor

DEFAULTS = {"rope_theta": 500000.0}  # of the models' own code
PREDICTION_PREFIXES = ("model.mtp_block.", "model.mtp_emb_norm.", "model.mtp_hidden_norm.", "model.mtp_linear_proj.")


def ernie(config: Config, mla_layout: str) -> ModelSpec:
    """The dense models."""
    spec = _spec("ernie4_5", config)
    return spec.build(_layer(spec, spec.gated_mlp(bias=config.flag("use_bias", False))), tied=True)


def ernie_moe(config: Config, mla_layout: str) -> ModelSpec:
    """The mixtures of experts."""
    spec = _spec("ernie4_5-moe", config)
    n_layers, interval = spec.n_layers, config.integer("moe_layer_interval", 1)
    first = config.integer("moe_layer_start_index", 1, minimum=0)
    last = config.integer("moe_layer_end_index", -1, minimum=-1)
    if last not in (-1, n_layers - 1):
        raise config.error(
            f"moe_layer_end_index is {last}; only experts up to the last layer, {n_layers - 1}, can be converted"
        )
    if interval > 1:
        spec.notes.append("llama.cpp cannot read this architecture with experts in every n-th layer")
    rows, shared = config.integer("moe_intermediate_size"), config.integer("moe_num_shared_experts", 0, minimum=0)
    has_experts = [i >= first and (i + 1) % interval == 0 for i in range(n_layers)]
    experts = spec.add_expert_counts("moe_num_experts", rows, used_key="moe_k", layers=sum(has_experts))
    spec.add_uint32({"interleave_moe_layer_step": interval, "leading_dense_block_count": first, "expert_shared_count": shared})
    if shared:
        spec.add_uint32({"expert_shared_feed_forward_length": rows * shared})
    has_bias = config.flag("use_bias", False)
    bias = LayerTensor("exp_probs_b.bias", "mlp.moe_statics.e_score_correction_bias", (1, experts), flatten)
    routed = [
        *spec.experts(experts, rows),
        *([bias] if config.flag("moe_use_aux_free", True) else ()),
        *(spec.gated_mlp("mlp.shared_experts", rows * shared, "_shexp", bias=has_bias) if shared else ()),
    ]
    dense = spec.gated_mlp(bias=has_bias)
    return spec.build(lambda i: _layer(spec, routed if has_experts[i] else dense), tied=True, head_bias=has_bias)


def _spec(architecture: str, config: Config) -> DecoderSpec:
    config.require("hidden_act", "silu", "this activation")
    spec = DecoderSpec(architecture, config.with_defaults(DEFAULTS))
    spec.skipped_prefixes |= dict.fromkeys(PREDICTION_PREFIXES, UNNAMED)
    return spec


def _layer(spec: DecoderSpec, feed_forward: list[LayerTensor]) -> list[LayerTensor]:
    bias = spec.config.flag("use_bias", False)
    return [
        spec.norm("attn_norm", "input_layernorm"),
        *spec.attention(bias=bias, output_bias=bias),
        spec.norm("ffn_norm", "post_attention_layernorm"),
        *feed_forward,
    ]
