"""Vision and audio models: the text model is converted; encoders and projectors are left out, and notes say so."""

from __future__ import annotations

from dataclasses import replace

from ..config import Config
from ..model_spec import ModelSpec
from .registry import TEXT_MODELS, architecture_function

# prefix of tensor names, also with `model.` in front -> what these tensors are
SKIPPED_PREFIXES = {
    "vision_tower.": "vision tower",
    "vision_model.": "vision tower",
    "visual.": "vision tower",
    "audio_tower.": "audio tower",
    "mlp1.": "projector of images",
    "thinker.visual.": "vision tower",
    "thinker.audio_tower.": "audio tower",
    "talker.": "model that speaks",
    "token2wav.": "model that speaks",
    "multi_modal_projector.": "projector of images",
    "vit_large_projector.": "projector of images",
    "patch_merge_mlp.": "projector of images",
    "mm_projector.": "projector of images",
    "vision_adapter.": "projector of images",
    "vision_projection.": "projector of images",
    "image_newline": "projector of images",
}
RENAMED_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "thinker.model.": "model.",
    "thinker.lm_head.": "lm_head.",
}


def text_model(config: Config, mla_layout: str) -> ModelSpec:
    """The text model under text_config (InternVL: llm_config), or among the other settings (Qwen 2 VL's first files). Raises
    FormatError for one that is unknown or cannot be converted."""
    outer = config.section("thinker_config") if config.get("thinker_config") is not None else config
    key = next((key for key in ("text_config", "llm_config") if outer.get(key) is not None), None)
    text = outer.section(key) if key is not None else outer
    model_type = text.get("model_type")
    if not isinstance(model_type, str) or model_type not in TEXT_MODELS:
        raise config.error(f"text_config has model_type {model_type!r:.60}; known are {', '.join(TEXT_MODELS)}")
    name = TEXT_MODELS[model_type]
    values = {"architectures": [name], "vision_config": config.get("vision_config")}
    tied = config.get("tie_word_embeddings")  # some files say it only outside of text_config
    if tied is not None:
        values["tie_word_embeddings"] = text.get("tie_word_embeddings", tied) and tied
    model = architecture_function(name)(text.with_values(values), mla_layout)
    skipped = {prefix + name: what for name, what in SKIPPED_PREFIXES.items() for prefix in ("", "model.")}
    return replace(
        model,
        skipped_prefixes=model.skipped_prefixes | skipped,
        renamed_prefixes=model.renamed_prefixes | RENAMED_PREFIXES,
    )
