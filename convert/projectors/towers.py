"""The checkpoints whose towers can be converted."""

from __future__ import annotations

from . import audio, vision
from .tower import Tower

# name in config.json's `architectures` -> its towers
TOWERS: dict[str, tuple[Tower, ...]] = {
    "Qwen2VLForConditionalGeneration": (vision.QWEN2VL,),
    "Qwen2_5_VLForConditionalGeneration": (vision.QWEN25VL,),
    **dict.fromkeys(("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"), (vision.QWEN3VL,)),
    **dict.fromkeys(("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"), (vision.QWEN3VL,)),
    **dict.fromkeys(("Glm4vForConditionalGeneration", "Glm4vMoeForConditionalGeneration"), (vision.GLM4V,)),
    "Gemma3ForConditionalGeneration": (vision.GEMMA3,),
    "Gemma4ForConditionalGeneration": (vision.GEMMA4V, audio.GEMMA4A),
    **dict.fromkeys(("Mistral3ForConditionalGeneration", "LlavaForConditionalGeneration"), (vision.MISTRAL3,)),
    "InternVLChatModel": (vision.INTERNVL_CHAT,),
    "InternVLForConditionalGeneration": (vision.INTERNVL,),
    "KimiVLForConditionalGeneration": (vision.KIMIVL,),
    **dict.fromkeys(("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"), (vision.KIMIK25,)),
    **dict.fromkeys(("Qwen2_5OmniModel", "Qwen2_5OmniForConditionalGeneration"), (vision.QWEN25O, audio.QWEN25O)),
    "Qwen2AudioForConditionalGeneration": (audio.QWEN2A,),
    "UltravoxModel": (audio.ULTRAVOX,),
    "VoxtralForConditionalGeneration": (audio.VOXTRAL,),
}


def towers_of(projectors: set[str]) -> list[Tower]:
    """The towers of these projector types."""
    return [tower for towers in TOWERS.values() for tower in towers if tower.projector in projectors]
