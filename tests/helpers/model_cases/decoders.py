"""Transformers with attention in every layer, and the recurrent states of Qwen."""

from .common import COMMON, HALF, LINEAR, LLAMA3, PLAIN, TIED, WINDOW, YARN

GEMMA2 = WINDOW | {"head_dim": 24, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 24}
GEMMA3 = WINDOW | {"head_dim": 24, "num_hidden_layers": 7, "query_pre_attn_scalar": 24}
OTHER_PATTERN = ["full_attention", *["sliding_attention"] * 3, "full_attention", *["sliding_attention"] * 2]
GEMMA3_ROPE = {"full_attention": LINEAR | {"rope_theta": 1e6}, "sliding_attention": PLAIN}
GEMMA4 = TIED | WINDOW | {"head_dim": 24, "global_head_dim": 32, "hidden_size_per_layer_input": 16, "num_hidden_layers": 6}
GEMMA4 |= {"vocab_size_per_layer_input": 288, "layer_types": ["sliding_attention", "full_attention"] * 3}
GEMMA4_31B = {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
GEMMA4_31B |= {"final_logit_softcapping": 5.0, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}
TEXT = COMMON | TIED | GEMMA3 | {"rope_parameters": GEMMA3_ROPE}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
DEEPSEEK = {"num_key_value_heads": 4, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "kv_lora_rank": 32}
DEEPSEEK |= {"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "n_routed_experts": 8}
DEEPSEEK |= {"num_experts_per_tok": 2, "topk_group": 2, "n_shared_experts": 2}
DEEPSEEK |= {"rms_norm_eps": 1e-6}  # what the latents' norms have whatever is said here
V3 = {"q_lora_rank": 32, "n_group": 4, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}
V2_GROUPS = {"q_lora_rank": 32, "n_group": 4, "topk_method": "group_limited_greedy", "routed_scaling_factor": 4.0}
KIMI = {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 48, "n_group": 1, "topk_group": 1}
KIMI |= {"n_shared_experts": 1, "routed_scaling_factor": 2.827}
KIMI_ROPE = YARN | {"rope_theta": 50000.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
GLM = {"head_dim": 32, "moe_intermediate_size": 40, "n_routed_experts": 8, "num_experts_per_tok": 3, "first_k_dense_replace": 1}
GLM |= {"use_qk_norm": True, "attention_bias": True, "rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}}
GLM_GROUPS = {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 2, "n_shared_experts": 2, "norm_topk_prob": False}
GLM_GROUPS |= {"use_qk_norm": False, "attention_bias": False, "routed_scaling_factor": 2.5}
FLASH = {key: value for key, value in DEEPSEEK.items() if key not in ("first_k_dense_replace", "topk_group")}
FLASH |= {"q_lora_rank": 48, "v_head_dim": 40, "n_shared_experts": 1, "routed_scaling_factor": 1.8, "rope_parameters": PLAIN}
MISTRAL4 = {key: value for key, value in DEEPSEEK.items() if key != "topk_group"} | {"q_lora_rank": 48, "n_shared_experts": 1}
MISTRAL4_ROPE = YARN | {"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.3}
MISTRAL4_ROPE |= {"mscale": 1.0, "mscale_all_dim": 1.0}
V32 = DEEPSEEK | V3 | {"index_topk": 24, "index_n_heads": 16, "index_head_dim": 128, "n_shared_experts": 1}
GPT_OSS = WINDOW | {"head_dim": 32, "num_local_experts": 6, "num_experts_per_tok": 3}
GPT_OSS_ROPE = YARN | {"rope_theta": 150000.0, "factor": 32.0}
ERNIE_MOE = {"moe_intermediate_size": 40, "moe_num_experts": 8, "moe_k": 3, "moe_num_shared_experts": 2}
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64}
LONG |= {"short_factor": [1.0 + 0.05 * i for i in range(8)], "long_factor": [1.5 + 0.7 * i for i in range(8)]}
WHOLE_HEAD = {"partial_rotary_factor": 1.0}
MINISTRAL = {"head_dim": 24}
MINISTRAL_ROPE = YARN | {"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.3}
MINISTRAL_ROPE |= {"mscale": 1.0, "mscale_all_dim": 1.0}
WHOLE = {"sliding_window": None}
GRANITE = {"embedding_multiplier": 3.0, "logits_scaling": 0.5, "residual_multiplier": 0.6, "attention_multiplier": 0.3}
DOTS = {"moe_intermediate_size": 40, "n_routed_experts": 8, "num_experts_per_tok": 3, "first_k_dense_replace": 1} | WHOLE
DOTS |= {"num_key_value_heads": 4, "n_shared_experts": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
MINIMAX = {"head_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 3, "rope_parameters": PLAIN | HALF}
MINICPM = {"num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 48, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16}
MINICPM |= TIED | {"v_head_dim": 20, "dim_model_base": 32, "rms_norm_eps": 1e-6}
EXAONE4 = WINDOW | {"num_hidden_layers": 5, "sliding_window_pattern": 4}
DELTA = {"head_dim": 32, "num_hidden_layers": 5, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
DELTA |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
DELTA |= {"rms_norm_eps": 1e-3}  # less, and results near zero would be scaled up with their rounding errors
DELTA_EXPERTS = DELTA | EXPERTS | {"shared_expert_intermediate_size": 56}
# Odd sizes: a convolution of three tokens, three value heads for each key head, values wider than keys.
DELTA_ODD = {"linear_conv_kernel_dim": 3, "linear_num_value_heads": 6, "linear_value_head_dim": 24, "attention_bias": True}
DELTA_ODD |= {"layer_types": ["full_attention", *["linear_attention"] * 3, "full_attention"]}
MROPE = PLAIN | {"rope_theta": 1e6, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
MIMO = WINDOW | {"head_dim": 24, "v_head_dim": 16, "num_key_value_heads": 1, "num_hidden_layers": 5, "n_routed_experts": 8}
MIMO |= {"num_experts_per_tok": 2, "moe_intermediate_size": 40}
MIMO_GROUPS = {"n_group": 4, "topk_group": 2, "attention_value_scale": None, "routed_scaling_factor": 2.5}
MIMO_GROUPS |= {"layer_types": OTHER_PATTERN[2:], "mlp_layer_types": ["sparse", "dense", "sparse", "sparse", "dense"]}
OLMO3 = WINDOW | {"num_hidden_layers": 5}
OLMOE = {"num_experts": 6, "num_experts_per_tok": 2}
EXAONE_MOE = WINDOW | {"num_hidden_layers": 5, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
EXAONE_MOE |= {"num_shared_experts": 2, "rope_parameters": PLAIN}
ALPHA = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0}

# case -> (class of transformers without ForCausalLM, config besides COMMON[, MLA layout])
CASES = {
    "llama": ("Llama", {"rope_parameters": PLAIN}),
    "llama-biases": ("Llama", TIED | {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "llama-linear": ("Llama", {"rope_parameters": LINEAR}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-yarn-untruncated": ("Llama", {"rope_parameters": YARN | {"truncate": False}}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "llama-yarn-factor": ("Llama", {"rope_parameters": YARN | {"attention_factor": 0.8, "beta_fast": 16.0}}),
    "llama-yarn-magnitude": ("Llama", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.3}}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 24}),
    "mistral-window": ("Mistral", WINDOW),
    "ministral3": ("Ministral3", MINISTRAL | {"rope_parameters": MINISTRAL_ROPE}),
    "ministral3-window": ("Ministral3", TIED | WINDOW | {"rope_parameters": MINISTRAL_ROPE | {"mscale_all_dim": 0.7}}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "mixtral-window": ("Mixtral", WINDOW | {"num_local_experts": 5, "num_experts_per_tok": 3}),
    "qwen2": ("Qwen2", {"rope_parameters": PLAIN}),
    "qwen2-window": ("Qwen2", TIED | WINDOW | {"use_sliding_window": True, "max_window_layers": 1}),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": YARN | {"rope_theta": 1e6}}),
    "qwen2moe": ("Qwen2Moe", EXPERTS | {"shared_expert_intermediate_size": 56, "norm_topk_prob": False}),
    "qwen3": ("Qwen3", {"head_dim": 24, "rope_parameters": PLAIN | {"rope_theta": 1e6}}),
    "qwen3-yarn-tied": ("Qwen3", TIED | {"rope_parameters": YARN}),
    "qwen3moe": ("Qwen3Moe", EXPERTS | {"head_dim": 24, "norm_topk_prob": True}),
    "qwen3moe-unnormalised": ("Qwen3Moe", EXPERTS | {"norm_topk_prob": False}),
    "qwen3next": ("Qwen3Next", DELTA_EXPERTS),
    "qwen3next-odd": ("Qwen3Next", DELTA_EXPERTS | DELTA_ODD | {"norm_topk_prob": False}),
    "qwen3next-dense": ("Qwen3Next", DELTA_EXPERTS | {"mlp_only_layers": [1], "decoder_sparse_step": 2}),
    "qwen35": ("Qwen3_5", DELTA | {"rope_parameters": MROPE | {"partial_rotary_factor": 0.25}}),
    "qwen35-odd": ("Qwen3_5", TIED | DELTA | DELTA_ODD | {"rope_parameters": MROPE | HALF}),
    "qwen35-one": ("Qwen3_5", DELTA | {"linear_num_value_heads": 2, "full_attention_interval": 2}),
    "qwen35moe": ("Qwen3_5Moe", DELTA_EXPERTS | {"rope_parameters": MROPE | {"partial_rotary_factor": 0.25}}),
    "gemma2": ("Gemma2", TIED | GEMMA2),
    "gemma2-scale": ("Gemma2", TIED | GEMMA2 | {"query_pre_attn_scalar": 64, "final_logit_softcapping": 30.0}),
    "gemma3": ("Gemma3", TIED | GEMMA3 | {"rope_parameters": GEMMA3_ROPE}),
    "gemma3-pattern": ("Gemma3", TIED | GEMMA3 | {"layer_types": OTHER_PATTERN, "query_pre_attn_scalar": 16}),
    "gemma4": ("Gemma4", GEMMA4 | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}),
    "gemma4-dense": ("Gemma4", GEMMA4 | GEMMA4_31B),
    "v2-lite": ("DeepseekV2", DEEPSEEK | {"q_lora_rank": None}),
    "v2-groups": ("DeepseekV2", DEEPSEEK | V2_GROUPS, "mainline"),
    "v3": ("DeepseekV3", DEEPSEEK | V3),
    "v3-mainline": ("DeepseekV3", DEEPSEEK | V3, "mainline"),
    "v3-legacy": ("DeepseekV3", DEEPSEEK | V3, "legacy"),
    "kimi-k2": ("DeepseekV3", DEEPSEEK | KIMI | {"rope_parameters": KIMI_ROPE}),
    "mistral4": ("Mistral4", MISTRAL4 | {"rope_parameters": MISTRAL4_ROPE}, "mainline"),
    "mistral4-dense": ("Mistral4", MISTRAL4 | {"first_k_dense_replace": 2, "rope_parameters": MISTRAL4_ROPE}),
    "deepseek32": ("DeepseekV32", V32, "mainline"),
    "deepseek32-ik": ("DeepseekV32", V32 | {"index_topk": 512}),
    "glm-dsa": ("GlmMoeDsa", V32 | {"n_group": 1, "topk_group": 1, "rope_parameters": PLAIN}, "mainline"),
    "glm-dsa-shared": ("GlmMoeDsa", V32 | {"num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"]}),
    "glm4": ("Glm4", {"head_dim": 32, "attention_bias": True, "rope_parameters": PLAIN | HALF}),
    "glm4-whole": ("Glm4", TIED | {"head_dim": 24, "attention_bias": False, "rope_parameters": PLAIN | WHOLE_HEAD}),
    "glm4moe": ("Glm4Moe", GLM),
    "glm4moe-groups": ("Glm4Moe", GLM | GLM_GROUPS),
    "glm4-moe-lite": ("Glm4MoeLite", FLASH, "mainline"),
    "glm4-moe-lite-ik": ("Glm4MoeLite", FLASH | {"n_group": 4, "topk_group": 2, "mlp_layer_types": ["dense"] * 2 + ["sparse"]}),
    "gpt-oss": ("GptOss", GPT_OSS | {"rope_parameters": GPT_OSS_ROPE | {"truncate": False}}),
    "gpt-oss-rounded": ("GptOss", GPT_OSS | {"rope_parameters": GPT_OSS_ROPE | {"truncate": True}}),
    "gpt-oss-pattern": ("GptOss", GPT_OSS | {"layer_types": OTHER_PATTERN[:3], "rope_parameters": PLAIN}),
    "ernie4_5": ("Ernie4_5", TIED | {"head_dim": 24}),
    "ernie4_5-moe": ("Ernie4_5_Moe", TIED | ERNIE_MOE),
    "ernie4_5-moe-interval": ("Ernie4_5_Moe", ERNIE_MOE | {"moe_layer_interval": 2, "moe_num_shared_experts": 0}),
    "hunyuan-dense": ("HunYuanDenseV1", TIED | {"head_dim": 24, "rope_parameters": ALPHA}),
    "phi3": ("Phi3", WHOLE | {"original_max_position_embeddings": 512}),
    "phi3-window": ("Phi3", WINDOW | {"original_max_position_embeddings": 512}),
    "phi3-long": ("Phi3", WHOLE | {"original_max_position_embeddings": 64, "rope_parameters": LONG}),
    "phi3-partial": ("Phi3", WHOLE | {"original_max_position_embeddings": 512, "rope_parameters": PLAIN | HALF}),
    "starcoder2": ("Starcoder2", {"sliding_window": None}),
    "starcoder2-window": ("Starcoder2", TIED | WINDOW | {"use_bias": False}),
    "command-r": ("Cohere", TIED | {"logit_scale": 0.5, "rope_parameters": PLAIN}),
    "command-r-plus": ("Cohere", TIED | {"use_qk_norm": True, "logit_scale": 0.5}),
    "cohere2": ("Cohere2", TIED | WINDOW | {"num_hidden_layers": 5, "logit_scale": 0.5, "rope_parameters": PLAIN}),
    "olmo2": ("Olmo2", {"rope_parameters": PLAIN}),
    "olmo3": ("Olmo3", OLMO3 | {"rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN}}),
    "mimo2": ("MiMoV2Flash", MIMO),
    "mimo2-groups": ("MiMoV2Flash", MIMO | MIMO_GROUPS),
    "olmoe": ("Olmoe", OLMOE | {"num_key_value_heads": 4, "rope_parameters": PLAIN}),
    "olmoe-normalised": ("Olmoe", TIED | OLMOE | {"norm_topk_prob": True}),
    "arcee": ("Arcee", {"rope_parameters": YARN}),
    "arcee-biases": ("Arcee", TIED | {"head_dim": 24, "attention_bias": True, "mlp_bias": True}),
    "granitemoe": ("GraniteMoe", TIED | GRANITE | {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "exaone-moe": ("ExaoneMoe", EXAONE_MOE),
    "exaone-moe-groups": ("ExaoneMoe", EXAONE_MOE | {"n_group": 4, "topk_group": 2, "mlp_layer_types": ["sparse"] * 5}),
    "granite": ("Granite", TIED | GRANITE | {"rope_parameters": PLAIN}),
    "minicpm3": ("MiniCPM3", MINICPM | {"rope_parameters": PLAIN}),
    "minicpm3-long": ("MiniCPM3", MINICPM | {"scale_emb": 3.0, "scale_depth": 0.9, "rope_parameters": LONG}),
    "minimax-m2": ("MiniMaxM2", MINIMAX),
    "exaone4": ("Exaone4", EXAONE4 | {"rope_parameters": PLAIN}),
    "exaone4-whole": ("Exaone4", WHOLE | {"rope_parameters": LLAMA3, "layer_types": ["full_attention"] * 3}),
    "nemotron": ("Nemotron", {"rope_parameters": PLAIN | HALF}),
    "smollm3": ("SmolLM3", TIED | {"num_hidden_layers": 5, "rope_parameters": PLAIN}),
    "seed-oss": ("SeedOss", {"head_dim": 24, "rope_parameters": PLAIN | {"rope_theta": 1e7}}),
    "dots1": ("Dots1", DOTS | {"rope_parameters": PLAIN}),
    "hunyuan-moe": ("HunYuanMoEV1", {"head_dim": 32, "num_experts": 6, "moe_topk": 3, "rope_parameters": ALPHA}),
}  # fmt: skip


# What llama.cpp does otherwise, or not at all.
BEYOND_LLAMA_CPP = {
    "mistral-window": "no windows in this architecture",
    "mixtral-window": "no windows in this architecture",
    "llama-yarn-untruncated": "the ramp is always of whole pairs",
    "ministral3-window": "no windows in this architecture",
    "qwen2-window": "no windows in this architecture",
    "phi3-window": "no windows in this architecture",
    "command-r-plus": "heads are normalised in models of 64 layers only",
    "exaone4": "windows in models of 64 layers only",
    "minicpm3": "the published model's factors only",
    "minicpm3-long": "the published model's factors only",
    "starcoder2-window": "no windows in this architecture",
    "qwen3moe-unnormalised": "weights of experts always sum to one",
    "qwen3next-dense": "experts in every layer",
    "qwen3next-odd": "every fourth layer has attention, weights of experts always sum to one, no biases",
    "qwen35-odd": "no biases, values of the size of keys only",
    "gemma2-scale": "another scale of the scores in models of the published sizes only",
    "gemma3-pattern": "one pattern, and one scale of the scores",
    "mimo2-groups": "experts are not limited to groups",
    "olmoe-normalised": "as many key heads as query heads",
    "arcee-biases": "no biases in this architecture",
    "v2-groups": "experts are not limited to groups",
    "v2-lite": "not in this layout",
    "v3": "not in this layout",
    "kimi-k2": "not in this layout",
    "mistral4-dense": "not in this layout",
    "deepseek32-ik": "not in this layout",
    "glm-dsa-shared": "not in this layout",
    "glm4-moe-lite-ik": "not in this layout",
    "gpt-oss": "yarn's ramp begins and ends at whole pairs",
    "ernie4_5-moe-interval": "experts in every layer behind the first ones",
}
# Its gelu comes from a table of f16; Gemma 4's scores, which have no factor, and norms of values make more of such differences.
COARSE_IN_LLAMA_CPP = dict.fromkeys(("gemma2", "gemma3", "starcoder2"), 5e-3) | {"gemma4": 1e-2, "gemma4-dense": 5e-2}
# It divides queries and keys by at least the norms' epsilon, which is 1e-6 in all published models; rounding errors of results
# near zero are then scaled up.
IN_LLAMA_CPP = {case: {"rms_norm_eps": 1e-6} for case in ("qwen3next", "qwen35", "qwen35-one", "qwen35moe")}
COARSE_IN_LLAMA_CPP |= dict.fromkeys(IN_LLAMA_CPP, 5e-3)
