"""Llama 2 and 3 and what is built like them (TinyLlama, ...), Mistral with its window, Mixtral with its experts."""

from __future__ import annotations

from ..checkpoint import Description
from ..config import Config
from .decoder_spec import Outline

MIXTRAL_EXPERTS = {"gate": "block_sparse_moe.experts.{}.w1", "up": "block_sparse_moe.experts.{}.w3"}
MIXTRAL_EXPERTS |= {"down": "block_sparse_moe.experts.{}.w2"}


def llama(config: Config, mla_layout: str) -> Description:
    """Hyper-parameters and tensors of a Llama. Raises FormatError for what config.json says that cannot be converted."""
    bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    outline = _outline(config)
    layer = [
        outline.norm("attn_norm", "input_layernorm"),
        *outline.attention(pairs=True, bias=bias, output_bias=bias),
        outline.norm("ffn_norm", "post_attention_layernorm"),
        *outline.gated(bias=mlp_bias),
    ]
    return outline.describe(layer)


def mistral(config: Config, mla_layout: str) -> Description:
    """As `llama`; every layer sees `sliding_window` tokens, where there is one."""
    outline = _outline(config)
    _window(outline)
    layer = [
        outline.norm("attn_norm", "input_layernorm"),
        *outline.attention(pairs=True),
        outline.norm("ffn_norm", "post_attention_layernorm"),
        *outline.gated(),
    ]
    return outline.describe(layer)


def mixtral(config: Config, mla_layout: str) -> Description:
    """As `mistral`, with experts in every layer."""
    outline = _outline(config)
    _window(outline)
    n = outline.expert_counts("num_local_experts")
    layer = [
        outline.norm("attn_norm", "input_layernorm"),
        *outline.attention(pairs=True),
        outline.norm("ffn_norm", "post_attention_layernorm"),
        *outline.routed(n, outline.inner, MIXTRAL_EXPERTS, "block_sparse_moe.gate"),
    ]
    return outline.describe(layer)


def _outline(config: Config) -> Outline:
    config.expect("hidden_act", "silu", "this activation")
    return Outline("llama", config)


def _window(outline: Outline) -> None:
    size = outline.config.get("sliding_window")
    if size is not None:
        outline.window([True] * outline.layers)
        if size < outline.config.integer("max_position_embeddings"):
            outline.notes.append(f"llama.cpp does not know of the sliding window of {size} tokens in this architecture")
