"""Nemotron 3 and 4, Minitron: LayerNorm with weights counted from one, squared ReLU without a gate, partial rotation."""

from __future__ import annotations

from ..checkpoint import Description
from ..config import Config
from ..tensor_transforms import plus_one
from .decoder_spec import Outline, linear

LAYER_NORM = ("attention.layer_norm_epsilon", "norm_eps")
PART = {"partial_rotary_factor": 0.5}  # what the models' own code takes where config.json does not say


def nemotron(config: Config, mla_layout: str) -> Description:
    """Hyper-parameters and tensors. Raises FormatError for what config.json says that cannot be converted."""
    config.expect("hidden_act", "relu2", "this activation")
    config = config.over({"norm_eps": 1e-5})
    part = config.get("partial_rotary_factor", config.get("rope_percent", config.get("rope_percentage")))
    outline = Outline("nemotron", config, norm=LAYER_NORM, rope=config.over({"partial_rotary_factor": part} if part else PART))
    bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    layer = [
        *outline.layer_norm("attn_norm", "input_layernorm", plus_one),
        *outline.attention(bias=bias, output_bias=bias),
        *outline.layer_norm("ffn_norm", "post_attention_layernorm", plus_one),
        *linear("ffn_up", "mlp.up_proj", (outline.inner, outline.hidden), bias=mlp_bias),
        *linear("ffn_down", "mlp.down_proj", (outline.hidden, outline.inner), bias=mlp_bias),
    ]
    return outline.describe(layer, norm_edit=plus_one, norm_bias=True)
