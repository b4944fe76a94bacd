"""SmolLM 3: a Llama whose every fourth layer has no positions."""

from __future__ import annotations

from ..checkpoint import Description
from ..config import Config
from .decoder_spec import Outline

PERIOD = 4  # which readers take for granted


def smollm3(config: Config, mla_layout: str) -> Description:
    """Hyper-parameters and tensors. Raises FormatError for what config.json says that cannot be converted."""
    config.expect("hidden_act", "silu", "this activation")
    config.expect("use_sliding_window", False, "a sliding window")
    outline = Outline("smollm3", config)
    rotated = [int((i + 1) % PERIOD != 0) for i in range(outline.layers)]
    config.expect("no_rope_layers", rotated, "rotation in other layers than three of four")
    if config.get("no_rope_layers") is None:
        config.expect("no_rope_layer_interval", PERIOD, "rotation in other layers than three of four")
    bias = config.flag("attention_bias", False)
    layer = [
        outline.norm("attn_norm", "input_layernorm"),
        *outline.attention(pairs=True, bias=bias, output_bias=bias),
        outline.norm("ffn_norm", "post_attention_layernorm"),
        *outline.gated(bias=config.flag("mlp_bias", False)),
    ]
    return outline.describe(layer, tied=True)
