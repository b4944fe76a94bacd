"""Configurations that are legal in an architecture and rare in its published models, or unheard of: biases, windows, groups,
dense layers among experts, LongRoPE, ties, other orders of rotated elements."""

from .common import PLAIN, TIED, WINDOW
from .decoders import DEEPSEEK, DOTS, ERNIE_MOE, EXPERTS, GEMMA2, GEMMA3, GPT_OSS, GRANITE, OLMO3, OLMOE, V3, WHOLE

BIASED = {"attention_bias": True}
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64}
LONG |= {"short_factor": [1.0 + 0.05 * i for i in range(8)], "long_factor": [1.5 + 0.7 * i for i in range(8)]}
LONG = {"rope_parameters": LONG}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 56}
AFMOE = WINDOW | EXPERTS | {"head_dim": 24, "mup_enabled": True, "rope_parameters": PLAIN}
GLOBAL = {"layer_types": ["full_attention"] * 3}
LOCAL = {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}

CASES = {
    "llama-long": ("Llama", LONG),
    "mistral-long": ("Mistral", WHOLE | LONG),
    "granite-long": ("Granite", TIED | GRANITE | LONG),
    "qwen2-long": ("Qwen2", LONG),
    "qwen2moe-window": ("Qwen2Moe", SHARED | WINDOW | {"use_sliding_window": True, "max_window_layers": 1}),
    "qwen2moe-dense": ("Qwen2Moe", SHARED | {"decoder_sparse_step": 2}),
    "qwen3moe-dense": ("Qwen3Moe", EXPERTS | {"head_dim": 24, "mlp_only_layers": [1]}),
    "gemma-biases": ("Gemma", TIED | BIASED | {"head_dim": 24}),
    "gemma2-biases": ("Gemma2", TIED | GEMMA2 | BIASED),
    "gemma2-uncapped": ("Gemma2", TIED | GEMMA2 | {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3-capped": ("Gemma3", TIED | GEMMA3 | {"final_logit_softcapping": 3.0}),
    "gemma3-biases": ("Gemma3", TIED | GEMMA3 | BIASED),
    "olmo-biases": ("Olmo", BIASED),
    "olmo3-biases": ("Olmo3", OLMO3 | BIASED),
    "olmoe-biases": ("Olmoe", OLMOE | BIASED | {"num_key_value_heads": 4}),
    "ernie4_5-biases": ("Ernie4_5", TIED | {"head_dim": 24, "use_bias": True}),
    "ernie4_5-moe-biases": ("Ernie4_5_Moe", ERNIE_MOE | {"use_bias": True}),
    "seed-oss-biases": ("SeedOss", {"head_dim": 24, "attention_out_bias": True, "mlp_bias": True}),
    "v2-biases": ("DeepseekV2", DEEPSEEK | BIASED | {"q_lora_rank": None, "mlp_bias": True}),
    "v3-biases": ("DeepseekV3", DEEPSEEK | V3 | BIASED | {"rope_interleave": False}),
    "v3-halves": ("DeepseekV3", DEEPSEEK | V3 | {"rope_interleave": False}, "mainline"),
    "v3-tied": ("DeepseekV3", DEEPSEEK | V3 | TIED, "mainline"),
    "v3-unshared": ("DeepseekV3", DEEPSEEK | V3 | {"n_shared_experts": 0}),
    "dots1-groups": ("Dots1", DOTS | {"n_group": 4, "topk_group": 2}),
    "dots1-window": ("Dots1", DOTS | WINDOW | LOCAL | TIED | {"n_shared_experts": 0}),
    "smollm3-rotated": ("SmolLM3", TIED | {"num_hidden_layers": 5, "no_rope_layers": [1] * 5, "rope_parameters": PLAIN}),
    "smollm3-window": ("SmolLM3", TIED | WINDOW | {"num_hidden_layers": 5, "use_sliding_window": True}),
    "gpt-oss-limit": ("GptOss", GPT_OSS | {"swiglu_limit": 0.5}),
    "cohere2-global": ("Cohere2", TIED | WINDOW | GLOBAL | {"logit_scale": 0.5}),
    "exaone4-global": ("Exaone4", WINDOW | GLOBAL),
    "afmoe-global": ("Afmoe", AFMOE | GLOBAL),
}

BEYOND_LLAMA_CPP = {
    "exaone4-global": "windows in models of 64 layers only",
    "v2-biases": "not in this layout",
    "v3-biases": "not in this layout",
    "v3-unshared": "not in this layout",
    "qwen2-long": "no factors of LongRoPE in this architecture",
    "qwen2moe-window": "no windows in this architecture",
    "qwen2moe-dense": "experts in every layer",
    "qwen3moe-dense": "experts in every layer",
    "dots1-window": "no windows in this architecture",
    "smollm3-window": "no windows in this architecture",
    "gpt-oss-limit": "one limit of the activation",
    **dict.fromkeys(
        ("gemma-biases", "gemma2-biases", "gemma3-biases", "olmo-biases", "olmo3-biases"), "no biases of attention"
    ),
    **dict.fromkeys(("olmoe-biases", "ernie4_5-biases", "ernie4_5-moe-biases", "seed-oss-biases"), "not all of the biases"),
    **dict.fromkeys(("cohere2-global", "afmoe-global"), "a window in some layer"),
}
COARSE_IN_LLAMA_CPP = dict.fromkeys(("gemma2-uncapped", "gemma3-capped"), 5e-3)
