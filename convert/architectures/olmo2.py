"""OLMo 2: norms behind the blocks instead of in front of them, queries and keys normalised over all heads together."""

from __future__ import annotations

from ..checkpoint import Description
from ..config import Config
from .decoder_spec import Outline


def olmo2(config: Config, mla_layout: str) -> Description:
    """Hyper-parameters and tensors. Raises FormatError for what config.json says that cannot be converted."""
    config.expect("hidden_act", "silu", "this activation")
    config.expect("attention_bias", False, "biases in the attention")
    outline = Outline("olmo2", config)
    layer = [
        *outline.attention(),
        outline.norm("attn_q_norm", "self_attn.q_norm", outline.heads * outline.head),
        outline.norm("attn_k_norm", "self_attn.k_norm", outline.heads_kv * outline.head),
        outline.norm("post_attention_norm", "post_attention_layernorm"),
        *outline.gated(),
        outline.norm("post_ffw_norm", "post_feedforward_layernorm"),
    ]
    return outline.describe(layer)
