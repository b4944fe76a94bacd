"""model_type of a config.json, by which transformers chooses its classes, from the name in `architectures`."""

from __future__ import annotations

import re

# where it is not the name's words joined by underscores
_OTHERS = {
    "Qwen2VLTextModel": "qwen2_vl_text",
    "Qwen3VLTextModel": "qwen3_vl_text",
    "Qwen3VLMoeTextModel": "qwen3_vl_moe_text",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma3TextModel": "gemma3_text",
    "Gemma3nForCausalLM": "gemma3n_text",
    "Gemma4ForCausalLM": "gemma4_text",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
    "Qwen4ExpForCausalLM": "qwen4_exp_text",
    "Llama4ForCausalLM": "llama4_text",
    "MuseGlimmerForCausalLM": "muse_glimmer_text",
    "HunYuanDenseV1ForCausalLM": "hunyuan_v1_dense",
    "HunYuanMoEV1ForCausalLM": "hunyuan_v1_moe",
    "MiMoV2FlashForCausalLM": "mimo_v2_flash",
    "GraniteMoeForCausalLM": "granitemoe",
    "GraniteMoeSharedForCausalLM": "granitemoeshared",
    "GraniteMoeHybridForCausalLM": "granitemoehybrid",
    "HYV3ForCausalLM": "hy_v3",
    "InternLM3ForCausalLM": "internlm3",
    "MiniMaxM3VLForCausalLM": "minimax_m3_vl_text",
    "MiniCPM3ForCausalLM": "minicpm3",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "SmolLM3ForCausalLM": "smollm3",
    "GPTNeoXForCausalLM": "gpt_neox",
    "XLMRobertaModel": "xlm-roberta",
    "XLMRobertaForSequenceClassification": "xlm-roberta",
    "ModernBertModel": "modernbert",
    "StableLmForCausalLM": "stablelm",
    "ChatGLMModel": "chatglm",
    "BailingMoeV3ForCausalLM": "bailing_hybrid",
    "OpenPanguV2ForCausalLM": "openpangu_v2",
}
_ENDS = re.compile(r"(ForCausalLM|ForConditionalGeneration|ForMaskedLM|ForSequenceClassification|LMHeadModel|TextModel|Model)$")


def model_type(architecture: str) -> str:
    """'LlamaForCausalLM' -> 'llama'."""
    return _OTHERS.get(architecture) or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", _ENDS.sub("", architecture)).lower()
