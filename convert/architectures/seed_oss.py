"""Seed-OSS: biases on q, k and v, heads wider than the model divided by their number."""

from __future__ import annotations

from ..checkpoint import Description
from ..config import Config
from .decoder_spec import Outline


def seed_oss(config: Config, mla_layout: str) -> Description:
    """Hyper-parameters and tensors. Raises FormatError for what config.json says that cannot be converted."""
    config.expect("hidden_act", "silu", "this activation")
    config.expect("mlp_bias", False, "biases in the feed-forward block")
    outline = Outline("seed_oss", config.over({"head_dim": 128}))
    bias, output_bias = config.flag("attention_bias", True), config.flag("attention_out_bias", False)
    layer = [
        outline.norm("attn_norm", "input_layernorm"),
        *outline.attention(bias=bias, output_bias=output_bias),
        outline.norm("post_attention_norm", "post_attention_layernorm"),
        *outline.gated(),
    ]
    return outline.describe(layer)
