"""StarCoder 2: LayerNorm, biases everywhere, a feed-forward block without a gate."""

from __future__ import annotations

from ..checkpoint import Description
from ..config import Config
from .decoder_spec import Outline, linear

LAYER_NORM = ("attention.layer_norm_epsilon", "norm_epsilon")


def starcoder2(config: Config, mla_layout: str) -> Description:
    """Hyper-parameters and tensors. Raises FormatError for what config.json says that cannot be converted."""
    config = config.over({"norm_epsilon": 1e-5})
    config.expect("hidden_act", "gelu_pytorch_tanh", "this activation")
    outline = Outline("starcoder2", config, norm=LAYER_NORM)
    size = config.get("sliding_window")
    if size is not None and size < config.integer("max_position_embeddings"):
        outline.window([True] * outline.layers)
        outline.notes.append(f"llama.cpp does not know of the sliding window of {size} tokens in this architecture")
    bias = config.flag("use_bias", True)
    layer = [
        *outline.layer_norm("attn_norm", "input_layernorm"),
        *outline.attention(bias=bias, output_bias=bias),
        *outline.layer_norm("ffn_norm", "post_attention_layernorm"),
        *linear("ffn_up", "mlp.c_fc", (outline.inner, outline.hidden), bias=bias),
        *linear("ffn_down", "mlp.c_proj", (outline.hidden, outline.inner), bias=bias),
    ]
    return outline.describe(layer, norm_bias=True, tied=True)
