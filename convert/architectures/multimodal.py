"""Models that see or hear: their text model is converted, what stands around it is left out and said so."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

from ..checkpoint import Description
from ..config import Config

# model_type of text_config -> MODULE.FUNCTION of its text model
TEXT_MODELS = {
    "llama": "llama.llama",
    "mistral": "llama.mistral",
    "mixtral": "llama.mixtral",
    "qwen2": "qwen.qwen2",
    "qwen3": "qwen.qwen3",
    "qwen3_moe": "qwen.qwen3moe",
    "gemma2": "gemma.gemma2",
    "deepseek_v3": "deepseek.deepseek2",
    "kimi_k2": "deepseek.deepseek2",
    "glm4_moe": "glm4.glm4moe",
    "cohere2": "cohere.cohere2",
    "granite": "granite.granite",
}
# How the tensors' names begin, with and without `model.` in front -> what they are.
AROUND = {
    "vision_tower.": "vision tower",
    "vision_model.": "vision tower",
    "visual.": "vision tower",
    "audio_tower.": "audio tower",
    "multi_modal_projector.": "projector of images",
    "mm_projector.": "projector of images",
    "image_newline": "projector of images",
}
RENAMED = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}


def text_model(config: Config, mla_layout: str) -> Description:
    """The text model under text_config. Raises FormatError for one that is not known, or cannot be converted."""
    text = config.section("text_config")
    kind = text.get("model_type")
    if not isinstance(kind, str) or kind not in TEXT_MODELS:
        raise config.fail(f"text_config has model_type {kind!r:.60}; known are {', '.join(TEXT_MODELS)}")
    tied = config.get("tie_word_embeddings")
    # Some say only outside of text_config whether the output is tied to the embeddings.
    text = text.over({} if tied is None else {"tie_word_embeddings": tied})
    module, function = TEXT_MODELS[kind].split(".")
    description = getattr(import_module(f".{module}", __package__), function)(text, mla_layout)
    around = {prefix + name: what for name, what in AROUND.items() for prefix in ("", "model.")}
    return replace(description, left_out=description.left_out | around, renamed=description.renamed | RENAMED)
