"""Granite 3: a Llama with factors for embeddings, residuals and scores, and a divisor of the logits."""

from __future__ import annotations

from ..checkpoint import Description
from ..config import Config
from .decoder_spec import Outline

# key in the GGUF -> key of config.json
FACTORS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


def granite(config: Config, mla_layout: str) -> Description:
    """Hyper-parameters and tensors. Raises FormatError for what config.json says that cannot be converted."""
    config.expect("hidden_act", "silu", "this activation")
    outline = Outline("granite", config)
    outline.real({name: config.real(key, 1.0, positive=True) for name, key in FACTORS.items()})
    bias = config.flag("attention_bias", False)
    layer = [
        outline.norm("attn_norm", "input_layernorm"),
        *outline.attention(pairs=True, bias=bias, output_bias=bias),
        outline.norm("ffn_norm", "post_attention_layernorm"),
        *outline.gated(bias=config.flag("mlp_bias", False)),
    ]
    return outline.describe(layer)
