"""MiniCPM 3: DeepSeek's latent attention in dense layers, factors for embeddings, residuals and logits, LongRoPE."""

from __future__ import annotations

from ..checkpoint import Description
from ..config import Config
from ..metadata import LONGROPE
from .decoder_spec import Outline, Part
from .deepseek import Attention, attention_tensors, latent_attention

ARCHITECTURE = "minicpm3"
PREFIX = "self_attn"
USUAL = (12.0, 1.4, 256)  # scale_emb, scale_depth, dim_model_base, which llama.cpp takes for granted


def minicpm3(config: Config, mla_layout: str) -> Description:
    """Hyper-parameters and tensors; there is one layout of the attention, with kv_b whole. Raises FormatError."""
    config.expect("hidden_act", "silu", "this activation")
    config.expect("attention_bias", False, "biases in the attention")
    rank = config.integer("qk_rope_head_dim")
    heads, hidden = config.integer("num_attention_heads"), config.integer("hidden_size")
    values = config.over({"v_head_dim": hidden // heads, "num_key_value_heads": heads})
    attention = latent_attention(values)
    # The outline's heads are those that are rotated: all of them.
    outline = Outline(ARCHITECTURE, values.over({}).replaced({"head_dim": rank}), rope_kinds=LONGROPE)
    for key in ("attention.key_length", "attention.value_length"):
        del outline.metadata[f"{ARCHITECTURE}.{key}"]
    outline.count({"attention.key_length": attention.nope + attention.rope, "attention.value_length": attention.value})
    outline.count({"attention.q_lora_rank": attention.q_rank, "attention.kv_lora_rank": attention.kv_rank})
    _factors(outline)
    layer = [
        outline.norm("attn_norm", "input_layernorm"),
        *_attention(attention, hidden),
        outline.norm("ffn_norm", "post_attention_layernorm"),
        *outline.gated(),
    ]
    return outline.describe(layer, tied=True)


def _factors(outline: Outline) -> None:
    """What embeddings, residuals and logits are multiplied by."""
    config, layers = outline.config, outline.layers
    embedding = config.real("scale_emb", USUAL[0], positive=True)
    depth = config.real("scale_depth", USUAL[1], positive=True)
    base = config.integer("dim_model_base", int(USUAL[2]))
    outline.real({"embedding_scale": embedding, "residual_scale": depth / layers**0.5, "logit_scale": base / outline.hidden})
    if (embedding, depth, base) != USUAL:
        outline.notes.append("llama.cpp knows only the published factors of embeddings, residuals and logits")


def _attention(a: Attention, hidden: int) -> list[Part]:
    return [
        Part(w.name.removeprefix("."), PREFIX + w.sources[0], w.shape, w.edit)
        for w in attention_tensors(a, "legacy", hidden, "", "")
    ]
