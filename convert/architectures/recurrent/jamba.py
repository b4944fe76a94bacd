"""Jamba: Mamba with normalised steps and factors, every few layers attention without positions, every few layers experts."""

from __future__ import annotations

from ...config import Config
from ...model_spec import ModelSpec
from ..decoder_spec import CheckpointNames, DecoderSpec, LayerTensor
from .layers import add_key_value_heads
from .state_space import Mamba

NAMES = CheckpointNames(norm="model.final_layernorm.weight")
MAMBA = {"expand": "mamba_expand", "rank": "mamba_dt_rank", "size": "mamba_d_state", "kernel": "mamba_d_conv"}
EXPERTS = {part: f"feed_forward.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")}


def jamba(config: Config, mla_layout: str) -> ModelSpec:
    """Raises FormatError for settings that cannot be converted."""
    config.require("hidden_act", "silu", "this activation")
    config.require("mamba_proj_bias", False, "a model with biases")
    spec = DecoderSpec("jamba", config)
    is_attention = _periodic(spec, "attn_layer", 8, 4)
    has_experts = _periodic(spec, "expert_layer", 2, 1)
    add_key_value_heads(spec, is_attention)
    sizes = Mamba.of(config, spec.hidden_size, MAMBA)
    sizes.add_metadata(spec)
    n = config.integer("num_experts", 16)
    experts = []
    if n > 1 and any(has_experts):
        spec.add_expert_counts("num_experts", layers=sum(has_experts))
        experts = spec.experts(n, spec.intermediate_size, EXPERTS, "feed_forward.router")
    state_space = sizes.tensors(spec, "mamba", conv_bias=config.flag("mamba_conv_bias", True), norms=True)
    attention, dense = spec.attention(), spec.gated_mlp("feed_forward")

    def layer(number: int) -> list[LayerTensor]:
        return [
            spec.norm("attn_norm", "input_layernorm"),
            *(attention if is_attention[number] else state_space),
            spec.norm("ffn_norm", "pre_ff_layernorm"),
            *(experts if experts and has_experts[number] else dense),
        ]

    return spec.build(layer, NAMES)


def _periodic(spec: DecoderSpec, key: str, period: int, offset: int) -> list[bool]:
    """For each layer whether it is one of every KEY_period, the first of them KEY_offset."""
    period = spec.config.integer(f"{key}_period", period)
    offset = spec.config.integer(f"{key}_offset", offset, minimum=0)
    return [i % period == offset for i in range(spec.n_layers)]
