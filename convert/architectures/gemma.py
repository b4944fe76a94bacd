"""Gemma 2 and 3: normalisation around every block, weights of norms counted from one, local layers between global ones."""

from __future__ import annotations

from ..checkpoint import Description
from ..config import Config
from ..tensor_transforms import Edit, plus_one
from .decoder_spec import Outline, Part

# What config.json may leave out, because the models' own code knows it. Gemma 3's multi-modal checkpoints leave out most.
GEMMA2 = {"tie_word_embeddings": True, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0}
GEMMA2 |= {"final_logit_softcapping": 30.0, "sliding_window": 4096}
GEMMA3 = {
    "tie_word_embeddings": True,
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "rope_local_base_freq": 10000.0,
}
GLOBAL_THETA = 1e6
TOWERS = {
    "vision_tower.": "vision tower",
    "model.vision_tower.": "vision tower",
    "multi_modal_projector.": "projector of images",
    "model.multi_modal_projector.": "projector of images",
}


def gemma2(config: Config, mla_layout: str) -> Description:
    """Local and global layers take turns; scores and logits are capped. Raises FormatError for what cannot be converted."""
    config = config.over(GEMMA2)
    _expect(config)
    outline = Outline("gemma2", config)
    outline.window(outline.layer_types(lambda i: (i + 1) % 2 != 0), period=2)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        outline.real({key: config.real(key, positive=True)})
    _scale(outline)
    return outline.describe(_layer(outline, None), norm_edit=plus_one)


def gemma3(config: Config, mla_layout: str) -> Description:
    """The text model of Gemma3ForCausalLM and Gemma3ForConditionalGeneration: five local layers to each global one, with rotary
    embeddings of their own. Raises FormatError for what cannot be converted.
    """
    text = (config.section("text_config") if config.get("text_config") is not None else config).over(GEMMA3)
    _expect(text)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        text.expect(key, None, "a soft cap")
    text.expect("use_bidirectional_attention", False, "attention to later tokens")
    rope, local_theta = _rope(text)
    outline = Outline("gemma3", text, rope=rope)
    period = text.integer("sliding_window_pattern")
    outline.window(outline.layer_types(lambda i: (i + 1) % period != 0), period=6)
    outline.real({"rope.freq_base_swa": local_theta})
    _scale(outline)
    if config.get("text_config") is not None:
        outline.left_out |= TOWERS
        outline.renamed |= {"language_model.model.": "model.", "language_model.lm_head.": "lm_head."}
        outline.renamed |= {"model.language_model.": "model."}
    return outline.describe(_layer(outline, plus_one), norm_edit=plus_one)


def _expect(config: Config) -> None:
    config.expect("hidden_activation", "gelu_pytorch_tanh", "this activation")
    config.expect("attention_bias", False, "biases in the attention")


def _rope(config: Config) -> tuple[Config, float]:
    """Where the global layers' rotary settings are, and the base of the local ones.

    Older files have rope_theta and rope_scaling for the former and rope_local_base_freq for the latter, newer ones a set of
    rope_parameters for each kind of layer.
    """
    both = config.get("rope_parameters")
    if not isinstance(both, dict) or not isinstance(both.get("full_attention"), dict):
        return config.over({"rope_theta": GLOBAL_THETA}), config.real("rope_local_base_freq", positive=True)
    local = Config(config.path, both.get("sliding_attention") or {})
    local.expect("rope_type", "default", "rotary scaling of local layers")
    rope = Config(config.path, {"rope_theta": GLOBAL_THETA, "rope_parameters": both["full_attention"]})
    return rope, local.real("rope_theta", config.real("rope_local_base_freq"), positive=True)


def _scale(outline: Outline) -> None:
    """Scores are divided by the root of query_pre_attn_scalar; said only where that is not the size of a head."""
    scalar = outline.config.real("query_pre_attn_scalar", positive=True)
    if scalar != outline.head:
        outline.real({"attention.scale": scalar**-0.5})
        outline.notes.append(f"llama.cpp knows of query_pre_attn_scalar {scalar:g} only in models of the published sizes")


def _layer(outline: Outline, head_norms: Edit | None) -> list[Part]:
    return [
        outline.norm("attn_norm", "input_layernorm", edit=plus_one),
        *outline.attention(head_norms=head_norms),
        outline.norm("post_attention_norm", "post_attention_layernorm", edit=plus_one),
        outline.norm("ffn_norm", "pre_feedforward_layernorm", edit=plus_one),
        *outline.gated(),
        outline.norm("post_ffw_norm", "post_feedforward_layernorm", edit=plus_one),
    ]
