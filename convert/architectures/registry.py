"""The architectures that can be converted: which function makes the `ModelSpec` of a config.json.

Adding one: a function (config, mla_layout) -> ModelSpec in a module of this folder, and a line here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from difflib import get_close_matches
from importlib import import_module

from ...formats import PlanError
from ..config import Config
from ..model_spec import ModelSpec
from .relatives import relatives

PAGE = "docs/adding/architecture.md"

# name in config.json's `architectures` -> MODULE.FUNCTION of this folder, or FOLDER.MODULE.FUNCTION
ARCHITECTURES = {
    "LlamaForCausalLM": "llama.llama",
    "MistralForCausalLM": "llama.mistral",
    "Ministral3ForCausalLM": "llama.ministral3",
    "MixtralForCausalLM": "llama.mixtral",
    "Qwen2ForCausalLM": "qwen.qwen2",
    "Qwen2MoeForCausalLM": "qwen.qwen2moe",
    "Qwen3ForCausalLM": "qwen.qwen3",
    "Qwen3MoeForCausalLM": "qwen.qwen3moe",
    "Qwen2VLTextModel": "qwen.qwen2vl",
    "Qwen3VLTextModel": "qwen.qwen3vl",
    "Qwen3VLMoeTextModel": "qwen.qwen3vlmoe",
    "Gemma2ForCausalLM": "gemma.gemma2",
    "Gemma3ForCausalLM": "gemma.gemma3",
    "Gemma3ForConditionalGeneration": "gemma.gemma3",
    "Gemma3nForCausalLM": "local_attention.gemma3n.gemma3n",
    "Gemma3nForConditionalGeneration": "local_attention.gemma3n.gemma3n",
    "Gemma4ForCausalLM": "gemma4.gemma4",
    "Gemma4ForConditionalGeneration": "gemma4.gemma4",
    "DeepseekV2ForCausalLM": "latent_attention.deepseek.deepseek2",
    "DeepseekV3ForCausalLM": "latent_attention.deepseek.deepseek2",
    "DeepseekV32ForCausalLM": "latent_attention.deepseek.deepseek32",
    "DeepseekV4ForCausalLM": "latent_attention.deepseek4.deepseek4",
    "OpenPanguV2ForCausalLM": "latent_attention.openpangu.openpangu",
    "GlmMoeDsaForCausalLM": "latent_attention.deepseek.glm_dsa",
    "Mistral4ForCausalLM": "latent_attention.deepseek.mistral4",
    "Glm4ForCausalLM": "llama_variants.glm4",
    "Glm4MoeForCausalLM": "experts.mixtures.glm4moe",
    "Glm4MoeLiteForCausalLM": "latent_attention.deepseek.glm4_moe_lite",
    "GptOssForCausalLM": "experts.gpt_oss.gpt_oss",
    "Ernie4_5ForCausalLM": "ernie.ernie",
    "Ernie4_5_ForCausalLM": "ernie.ernie",
    "Ernie4_5_MoeForCausalLM": "ernie.ernie_moe",
    "HunYuanDenseV1ForCausalLM": "hunyuan.hunyuan_dense",
    "HunYuanMoEV1ForCausalLM": "hunyuan.hunyuan_moe",
    "Phi3ForCausalLM": "llama_variants.phi3",
    "Starcoder2ForCausalLM": "layer_norm.starcoder2",
    "CohereForCausalLM": "layer_norm.command_r",
    "Cohere2ForCausalLM": "layer_norm.cohere2",
    "Olmo2ForCausalLM": "llama_variants.olmo2",
    "Olmo3ForCausalLM": "llama_variants.olmo3",
    "MiMoV2FlashForCausalLM": "experts.mimo2.mimo2",
    "OlmoeForCausalLM": "experts.mixture_variants.olmoe",
    "ArceeForCausalLM": "llama_variants.arcee",
    "GraniteMoeForCausalLM": "experts.mixture_variants.granitemoe",
    "ExaoneMoeForCausalLM": "experts.mixture_variants.exaone_moe",
    "ExaoneMoEForCausalLM": "experts.mixture_variants.exaone_moe",
    "BailingMoeV2ForCausalLM": "experts.mixture_variants.bailing2",
    "InternLM3ForCausalLM": "llama.internlm3",
    "MinistralForCausalLM": "llama.mistral",
    "OlmoForCausalLM": "llama_variants.olmo",
    "OLMoForCausalLM": "llama_variants.olmo",
    "ApertusForCausalLM": "llama_variants.apertus",
    "GemmaForCausalLM": "gemma.gemma",
    "Jais2ForCausalLM": "layer_norm.jais2",
    "PhimoeForCausalLM": "layer_norm.phimoe",
    "PhiMoEForCausalLM": "layer_norm.phimoe",
    "SolarOpenForCausalLM": "experts.mixtures.solar_open",
    "HYV3ForCausalLM": "experts.mixture_variants.hy_v3",
    "GraniteMoeSharedForCausalLM": "experts.mixture_variants.granitemoe",
    "Llama4ForCausalLM": "local_attention.llama4.llama4",
    "LagunaForCausalLM": "local_attention.mixtures.laguna",
    "MellumForCausalLM": "local_attention.mixtures.mellum",
    "AfmoeForCausalLM": "local_attention.mixtures.afmoe",
    "MuseGlimmerForCausalLM": "local_attention.muse_glimmer.muse_glimmer",
    "Cohere2MoeForCausalLM": "local_attention.mixtures.cohere2moe",
    "GraniteForCausalLM": "llama_variants.granite",
    "Step3p5ForCausalLM": "local_attention.step35.step35",
    "Step3p7ForConditionalGeneration": "multimodal.text_model",
    "MiniMaxM3VLForCausalLM": "experts.minimax_m3.minimax_m3",
    "MiniMaxM3SparseForCausalLM": "experts.minimax_m3.minimax_m3",
    "MiniMaxM3SparseForConditionalGeneration": "multimodal.text_model",
    "MiniCPM3ForCausalLM": "latent_attention.minicpm3.minicpm3",
    "MiniMaxM2ForCausalLM": "experts.mixtures.minimax_m2",
    "ExaoneForCausalLM": "exaone.exaone",
    "Exaone4ForCausalLM": "exaone.exaone4",
    "NemotronForCausalLM": "layer_norm.nemotron",
    "SmolLM3ForCausalLM": "llama_variants.smollm3",
    "SeedOssForCausalLM": "llama_variants.seed_oss",
    "BailingMoeForCausalLM": "experts.mixtures.bailing",
    "Dots1ForCausalLM": "experts.mixtures.dots1",
    "GPT2LMHeadModel": "gpt.gpt2.gpt2",
    "GPTNeoXForCausalLM": "gpt.fused_attention.gptneox",
    "FalconForCausalLM": "gpt.fused_attention.falcon",
    "BloomForCausalLM": "gpt.fused_attention.bloom",
    "MptForCausalLM": "gpt.fused_attention.mpt",
    "MPTForCausalLM": "gpt.fused_attention.mpt",
    "DbrxForCausalLM": "gpt.dbrx.dbrx",
    "LongcatFlashForCausalLM": "latent_attention.longcat_flash.longcat_flash",
    **dict.fromkeys(("BertModel", "BertForMaskedLM", "BertForSequenceClassification"), "encoders.bert.bert"),
    **dict.fromkeys(("RobertaModel", "RobertaForMaskedLM", "RobertaForSequenceClassification"), "encoders.bert.bert"),
    **dict.fromkeys(("XLMRobertaModel", "XLMRobertaForMaskedLM", "XLMRobertaForSequenceClassification"), "encoders.bert.bert"),
    **dict.fromkeys(("CamembertModel", "CamembertForMaskedLM"), "encoders.bert.bert"),
    **dict.fromkeys(("NomicBertModel", "NomicBertForMaskedLM"), "encoders.bert.nomic"),
    **dict.fromkeys(("JinaBertModel", "JinaBertForMaskedLM"), "encoders.bert.jina2"),
    **dict.fromkeys(("JinaEmbeddingsV3Model", "JinaEmbeddingsV3ForMaskedLM"), "encoders.bert.jina3"),
    **dict.fromkeys(("ModernBertModel", "ModernBertForMaskedLM"), "encoders.modern_bert.modern_bert"),
    "Gemma3TextModel": "gemma.gemma_embedding",
    "Qwen3Model": "qwen.qwen3",
    "StableLmForCausalLM": "layer_norm.stablelm",
    "PhiForCausalLM": "layer_norm.phi2",
    "GlmForCausalLM": "glm.glm",
    "ChatGLMModel": "glm.chatglm",
    "ChatGLMForConditionalGeneration": "glm.chatglm",
    "BaichuanForCausalLM": "llama.baichuan",
    "BaiChuanForCausalLM": "llama.baichuan",
    "Qwen3NextForCausalLM": "qwen3next.qwen3next",
    "Qwen3_5ForCausalLM": "qwen3next.qwen35",
    "Qwen3_5MoeForCausalLM": "qwen3next.qwen35moe",
    "Qwen4ExpForCausalLM": "qwen4exp.qwen4exp",
    "Qwen4ExpForConditionalGeneration": "multimodal.text_model",
    "Lfm2ForCausalLM": "recurrent.lfm2.lfm2",
    "LFM2ForCausalLM": "recurrent.lfm2.lfm2",
    "Lfm2MoeForCausalLM": "recurrent.lfm2.lfm2moe",
    "MambaForCausalLM": "recurrent.mamba.mamba",
    "FalconMambaForCausalLM": "recurrent.mamba.falcon_mamba",
    "Mamba2ForCausalLM": "recurrent.mamba.mamba2",
    "GraniteMoeHybridForCausalLM": "recurrent.granite_hybrid.granite_hybrid",
    "NemotronHForCausalLM": "recurrent.nemotron_h.nemotron_h",
    "FalconH1ForCausalLM": "recurrent.falcon_h1.falcon_h1",
    "JambaForCausalLM": "recurrent.jamba.jamba",
    "KimiLinearForCausalLM": "recurrent.kimi_linear.kimi_linear",
    **dict.fromkeys(("BailingHybridForCausalLM", "BailingMoeV3ForCausalLM"), "recurrent.ling3.ling3"),
    "Qwen3_5ForConditionalGeneration": "multimodal.text_model",
    "Qwen3_5MoeForConditionalGeneration": "multimodal.text_model",
    "Llama4ForConditionalGeneration": "multimodal.text_model",
    "LlavaForConditionalGeneration": "multimodal.text_model",
    "LlavaNextForConditionalGeneration": "multimodal.text_model",
    "Mistral3ForConditionalGeneration": "multimodal.text_model",
    "KimiVLForConditionalGeneration": "multimodal.text_model",
    "KimiK25ForConditionalGeneration": "multimodal.text_model",
    "Kimi_K25ForConditionalGeneration": "multimodal.text_model",
    "InternVLForConditionalGeneration": "multimodal.text_model",
    "InternVLChatModel": "multimodal.text_model",
    "VoxtralForConditionalGeneration": "multimodal.text_model",
    "Qwen2AudioForConditionalGeneration": "multimodal.text_model",
    "Qwen2VLForConditionalGeneration": "multimodal.text_model",
    "Qwen2_5_VLForConditionalGeneration": "multimodal.text_model",
    "Qwen2_5OmniModel": "multimodal.text_model",
    "Qwen2_5OmniForConditionalGeneration": "multimodal.text_model",
    "Qwen3VLForConditionalGeneration": "multimodal.text_model",
    "Exaone4_5_ForConditionalGeneration": "multimodal.text_model",
    "Qwen3VLMoeForConditionalGeneration": "multimodal.text_model",
    "MuseGlimmerForConditionalGeneration": "multimodal.text_model",
    "KimiK3ForConditionalGeneration": "multimodal.text_model",
}
# model_type of text_config in multimodal models -> architecture of the text model
TEXT_MODELS = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_5_omni_text"), "Qwen2VLTextModel"),
    "qwen3_vl_text": "Qwen3VLTextModel",
    "qwen3_vl_moe_text": "Qwen3VLMoeTextModel",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen4_exp_text": "Qwen4ExpForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "granite": "GraniteForCausalLM",
    **dict.fromkeys(("exaone4", "exaone4_5_text"), "Exaone4ForCausalLM"),
    "step3p5": "Step3p5ForCausalLM",
    "minimax_m3_vl_text": "MiniMaxM3VLForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "muse_glimmer_text": "MuseGlimmerForCausalLM",
    "kimi_linear": "KimiLinearForCausalLM",
}


def architecture_function(name: str) -> Callable[[Config, str], ModelSpec]:
    """The function (config, mla_layout) -> ModelSpec of a key of ARCHITECTURES; its module is imported now."""
    module, _, function = ARCHITECTURES[name].rpartition(".")
    return getattr(import_module(f".{module}", __package__), function)


def model_spec(
    config: Config, mla_layout: str, architecture: str | None = None, stored: Collection[str] | None = None
) -> ModelSpec:
    """What converting a checkpoint with this config.json amounts to; mla_layout: see `deepseek`.

    architecture: a key of ARCHITECTURES, to convert the checkpoint as if config.json named it; stored: names of the
    checkpoint's tensors, by which the nearest of an unknown architecture are found.

    Raises FormatError for an unknown architecture, naming the nearest, and for settings that cannot be converted; PlanError for
    an unknown `architecture`.
    """
    names = config.get("architectures")
    own = names[0] if isinstance(names, list) and names else None
    own = own if isinstance(own, str) else None
    if architecture is None and own in ARCHITECTURES:
        return architecture_function(own)(config, mla_layout)
    if architecture is None:
        if own is None:
            raise config.error(f"no architecture is named; --architecture NAME sets one (see {PAGE})")
        raise config.error(f"unsupported architecture {own}; {_nearest(config, mla_layout, stored)}; {PAGE} says how")
    if architecture not in ARCHITECTURES:
        near = nearest_name(architecture, ARCHITECTURES)
        raise PlanError(f"--architecture {architecture} is not known; the nearest known name is {near}")
    model = architecture_function(architecture)(config.with_values({"architectures": [architecture]}), mla_layout)
    note = f"converted as {architecture}, as asked; config.json names {own or 'no architecture'}"
    return replace(model, notes=[*model.notes, note]) if own != architecture else model


def _nearest(config: Config, mla_layout: str, stored: Collection[str] | None) -> str:
    """What an unknown architecture is like, and that another can be tried."""
    if stored is None:
        return "its checkpoint may fit a relative, which --architecture NAME tries"
    near = relatives(config, stored, ARCHITECTURES, lambda name, tried: architecture_function(name)(tried, mla_layout))
    if not near:
        return "no known one suits its config.json and has most of its tensors, so it has to be added"
    return f"the nearest by its tensors: {', '.join(map(str, near))}. --architecture NAME tries one, or add it"


def nearest_name(name: str, known: Iterable[str]) -> str:
    """The known name that is most like this one, endings such as ForCausalLM apart."""
    stems = {_stem(text): text for text in reversed([*known])}  # of names with the same stem the first
    return stems[get_close_matches(_stem(name), stems, 1, 0)[0]]


def _stem(name: str) -> str:
    return re.sub(r"For(CausalLM|ConditionalGeneration)$|TextModel$|[^A-Za-z0-9]", "", name).lower()
