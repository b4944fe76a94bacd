"""Phi 3, 3.5 and 4: q, k and v in one matrix, gate and up in another, LongRoPE with factors for short and for long texts."""

from __future__ import annotations

from ..checkpoint import Description
from ..config import Config
from ..metadata import LONGROPE
from .decoder_spec import Outline, Part

KINDS = LONGROPE | {"yarn": "longrope"}  # as the first files call it


def phi3(config: Config, mla_layout: str) -> Description:
    """Hyper-parameters and tensors. Raises FormatError for what config.json says that cannot be converted."""
    config.expect("hidden_act", "silu", "this activation")
    config.expect("attention_bias", False, "biases in the attention")
    outline = Outline("phi3", config, rope_kinds=KINDS)
    size = config.integer("sliding_window") if config.get("sliding_window") is not None else None
    if size is not None and size < config.integer("max_position_embeddings"):
        outline.window([True] * outline.layers)
        outline.notes.append(f"llama.cpp does not use the sliding window of {size} tokens in this architecture")
    q, kv = outline.heads * outline.head, outline.heads_kv * outline.head
    hidden, inner = outline.hidden, outline.inner
    layer = [
        outline.norm("attn_norm", "input_layernorm"),
        Part("attn_qkv.weight", "self_attn.qkv_proj.weight", (q + 2 * kv, hidden)),
        Part("attn_output.weight", "self_attn.o_proj.weight", (hidden, q)),
        outline.norm("ffn_norm", "post_attention_layernorm"),
        Part("ffn_up.weight", "mlp.gate_up_proj.weight", (2 * inner, hidden)),
        Part("ffn_down.weight", "mlp.down_proj.weight", (hidden, inner)),
    ]
    return outline.describe(layer)
