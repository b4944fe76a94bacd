"""Gemma 1 to 3, EmbeddingGemma: norms that multiply by 1 + weight, from Gemma 2 on also after every block, local layers between
global ones.

All raise FormatError for settings that cannot be converted.
"""

from __future__ import annotations

from dataclasses import replace

from ..config import Config
from ..model_spec import ModelSpec
from ..tensor_transforms import Transform, add_one
from .decoder_spec import CheckpointNames, DecoderSpec, LayerTensor
from .encoders.pooling import dense_tensors, pooling_keys

# Defaults of the models' own code, for what config.json may leave out; Gemma 3's multimodal checkpoints leave out most.
GEMMA_DEFAULTS = {"tie_word_embeddings": True, "head_dim": 256}
GEMMA2_DEFAULTS = {"tie_word_embeddings": True, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0}
GEMMA2_DEFAULTS |= {"final_logit_softcapping": 30.0, "sliding_window": 4096}
GEMMA3_DEFAULTS = {
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
SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
NO_CAP = 1e6  # which changes scores and logits by less than float32 rounds them
GLOBAL_THETA = 1e6
GEMMA3_SKIPPED_PREFIXES = {
    "vision_tower.": "vision tower",
    "model.vision_tower.": "vision tower",
    "multi_modal_projector.": "projector of images",
    "model.multi_modal_projector.": "projector of images",
}
GEMMA3_RENAMED_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}


def gemma(config: Config, mla_layout: str) -> ModelSpec:
    """Gemma 1. Its GELU is the tanh form, whatever older files call it."""
    config = config.with_defaults(GEMMA_DEFAULTS)
    for key in ("hidden_act", "hidden_activation"):
        if config.get(key) not in (None, "gelu", "gelu_pytorch_tanh"):
            raise config.error(f"{key} is {config.get(key)!r:.60}: this activation cannot be converted, only GELU")
    config.require("use_bidirectional_attention", False, "attention to later tokens")
    spec = DecoderSpec("gemma", config)
    bias = config.flag("attention_bias", False)
    layer = [
        spec.norm("attn_norm", "input_layernorm", transform=add_one),
        *spec.attention(bias=bias, output_bias=bias),
        spec.norm("ffn_norm", "post_attention_layernorm", transform=add_one),
        *spec.gated_mlp(),
    ]
    return spec.build(layer, norm_transform=add_one)


def gemma2(config: Config, mla_layout: str) -> ModelSpec:
    """Gemma 2: local and global layers alternate; attention scores and logits have soft caps."""
    # Readers put in a soft cap of their own where a file has none.
    uncapped = {key: NO_CAP for key in SOFT_CAPS if key in config.values and config.get(key) is None}
    config = config.with_values(uncapped).with_defaults(GEMMA2_DEFAULTS)
    _require_supported(config)
    spec = DecoderSpec("gemma2", config)
    spec.add_sliding_window(spec.local_layers(lambda i: (i + 1) % 2 != 0), default_period=2)
    for key in SOFT_CAPS:
        spec.add_float32({key: config.number(key, positive=True)})
    _add_attention_scale(spec)
    return spec.build(_layer(spec, None), norm_transform=add_one)


def gemma3(config: Config, mla_layout: str) -> ModelSpec:
    """The text model of Gemma3ForCausalLM and Gemma3ForConditionalGeneration: five local layers to each global one, which have
    different rotary embeddings."""
    is_multimodal = config.get("text_config") is not None
    text = (config.section("text_config") if is_multimodal else config).with_defaults(GEMMA3_DEFAULTS)
    _require_supported(text)
    text.require("use_bidirectional_attention", False, "attention to later tokens")
    spec = _gemma3_spec("gemma3", text)
    if is_multimodal:
        spec.skipped_prefixes |= GEMMA3_SKIPPED_PREFIXES
        spec.renamed_prefixes |= GEMMA3_RENAMED_PREFIXES
    return spec.build(_layer(spec, add_one), norm_transform=add_one)


def gemma_embedding(config: Config, mla_layout: str) -> ModelSpec:
    """EmbeddingGemma: Gemma 3 whose tokens see later ones too, without a head; two dense layers after the pooling."""
    config = config.with_defaults(GEMMA3_DEFAULTS)
    _require_supported(config)
    if not config.flag("use_bidirectional_attention", False):
        raise config.error("use_bidirectional_attention is not set: a Gemma3TextModel is converted as an embedding model only")
    spec = _gemma3_spec("gemma-embedding", config)
    spec.metadata["gemma-embedding.attention.causal"] = False
    spec.metadata |= pooling_keys("gemma-embedding", config, "mean", spec.notes)
    dense, keys = dense_tensors("gemma-embedding", config)
    spec.metadata |= keys
    names = CheckpointNames("layers.{}", "embed_tokens.weight", "norm.weight")
    spec.renamed_prefixes["model."] = ""
    model = spec.build(_layer(spec, add_one), names, norm_transform=add_one)
    return replace(model, tensors=[*model.tensors, *dense])


def _gemma3_spec(architecture: str, config: Config) -> DecoderSpec:
    global_rope, local_theta = _rope_settings(config)
    spec = DecoderSpec(architecture, config, rope=global_rope)
    period = config.integer("sliding_window_pattern")
    spec.add_sliding_window(spec.local_layers(lambda i: (i + 1) % period != 0), default_period=6)
    spec.add_float32({"rope.freq_base_swa": local_theta})
    if config.get("final_logit_softcapping") is not None:
        spec.add_float32({"final_logit_softcapping": config.number("final_logit_softcapping", positive=True)})
    if config.get("attn_logit_softcapping") is not None:
        spec.notes.append("attn_logit_softcapping is left out, as Gemma 3's own code does not use it")
    _add_attention_scale(spec)
    return spec


def _require_supported(config: Config) -> None:
    if config.get("hidden_activation") == "gelu":
        config.lose("hidden_activation is 'gelu': readers of GGUF compute the tanh form of it")
    else:
        config.require("hidden_activation", "gelu_pytorch_tanh", "this activation")


def _rope_settings(config: Config) -> tuple[Config, float]:
    """(the config with the global layers' rotary settings, theta of the local layers).

    Older files have rope_theta and rope_scaling for the former and rope_local_base_freq for the latter, newer ones a set of
    rope_parameters for each type of layer.
    """
    parameters = config.get("rope_parameters")
    if not isinstance(parameters, dict) or not isinstance(parameters.get("full_attention"), dict):
        return config.with_defaults({"rope_theta": GLOBAL_THETA}), config.number("rope_local_base_freq", positive=True)
    local = config.part(parameters.get("sliding_attention") or {})
    local.require("rope_type", "default", "rotary scaling of local layers")
    global_rope = config.part({"rope_theta": GLOBAL_THETA, "rope_parameters": parameters["full_attention"]})
    return global_rope, local.number("rope_theta", config.number("rope_local_base_freq"), positive=True)


def _add_attention_scale(spec: DecoderSpec) -> None:
    """Scores are divided by the root of query_pre_attn_scalar; that is written only if it differs from head_dim."""
    scalar = spec.config.number("query_pre_attn_scalar", positive=True)
    if scalar != spec.head_dim:
        spec.add_float32({"attention.scale": scalar**-0.5})
        spec.notes.append(f"llama.cpp knows of query_pre_attn_scalar {scalar:g} only in models of the published sizes")


def _layer(spec: DecoderSpec, head_norms: Transform | None) -> list[LayerTensor]:
    bias = spec.config.flag("attention_bias", False)
    return [
        spec.norm("attn_norm", "input_layernorm", transform=add_one),
        *spec.attention(bias=bias, output_bias=bias, head_norms=head_norms),
        spec.norm("post_attention_norm", "post_attention_layernorm", transform=add_one),
        spec.norm("ffn_norm", "pre_feedforward_layernorm", transform=add_one),
        *spec.gated_mlp(),
        spec.norm("post_ffw_norm", "post_feedforward_layernorm", transform=add_one),
    ]
