"""Models of 2026: Muse Glimmer, Gemma 4 with experts, Step-3.5, MiniMax-M3, DeepSeek-V4, Qwen 4 Exp."""

from .common import LLAMA3, PLAIN, TIED, WINDOW, YARN
from .decoders import DELTA_EXPERTS, DELTA_ODD, GEMMA4, GEMMA4_31B, HALF, MROPE

GEMMA4_MOE = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 40}
STEP_PATTERN = ["full_attention", "sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
STEP = WINDOW | {"num_hidden_layers": 5, "head_dim": 32, "layer_types": STEP_PATTERN, "n_routed_experts": 6}
STEP |= {
    "pad_token_id": 0,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "share_expert_dim": 48,
    "moe_router_scaling_factor": 2.5,
}
STEP |= {"mlp_layer_types": ["dense", "dense", "sparse", "sparse", "sparse"], "num_sliding_attention_heads": 6}
STEP |= {"rope_theta": [5e6, 1e4, 1e4, 5e6, 1e4], "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5, 1.0]}
STEP_LIMITS = {"swiglu_limits": [0, 0.4, 0, 0.3, 0.5], "swiglu_limits_shared": [0.4, 0, 0.5, 0, 0.2]}
STEP_LIMITS |= {"rope_parameters": {"full_attention": LLAMA3 | {"partial_rotary_factor": 0.5}}}
STEP_LIMITS["rope_parameters"]["sliding_attention"] = {"rope_type": "default", "rope_theta": 1e4}
M3 = {"head_dim": 32, "rotary_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 40}
M3 |= {"dense_intermediate_size": 96, "shared_intermediate_size": 40, "index_n_heads": 2, "index_head_dim": 32}
M3 |= {"index_block_size": 8, "index_topk_blocks": 3, "mlp_layer_types": ["dense", "sparse", "sparse"]}
M3 |= {"layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"]}
M3 |= {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}}
M3_ODD = {
    "index_n_heads": 1,
    "index_block_size": 5,
    "index_local_blocks": 2,
    "num_hidden_layers": 4,
    "shared_intermediate_size": 80,
}
M3_ODD |= {"layer_types": ["minimax_m3_sparse", "full_attention"] * 2, "mlp_layer_types": ["sparse"] * 4}
V4_ATTENTION = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
V4 = {"head_dim": 64, "num_key_value_heads": 1, "q_lora_rank": 24, "intermediate_size": 40, "n_routed_experts": 6}
V4 |= {"num_experts_per_tok": 2, "o_groups": 2, "o_lora_rank": 16, "index_n_heads": 16, "index_head_dim": 64}
V4 |= {"index_topk": 5, "sliding_window": 20, "partial_rotary_factor": 0.25, "swiglu_limit": 0.7, "num_hidden_layers": 4}
V4 |= {"layer_types": [*V4_ATTENTION, "compressed_sparse_attention"], "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"]}
V4_ODD = {"hc_mult": 3, "hc_sinkhorn_iters": 4, "hc_eps": 1e-3, "head_dim": 24, "index_head_dim": 20, "num_attention_heads": 6}
V4_ODD |= {"o_groups": 3, "index_topk": 4, "sliding_window": 9, "routed_scaling_factor": 0.7, "num_experts_per_tok": 3}
V4_ODD |= {"compress_rates": {V4_ATTENTION[1]: 3, V4_ATTENTION[2]: 7}, "compress_rope_theta": 50000.0, "rope_parameters": YARN}
V4_ODD |= {"layer_types": [V4_ATTENTION[at] for at in (2, 1, 1, 0)], "mlp_layer_types": ["moe"] * 4, "swiglu_limit": 10.0}
QWEN4 = DELTA_EXPERTS | {"rope_parameters": MROPE | {"partial_rotary_factor": 0.25}, "output_gate_type": "sigmoid"}
QWEN4 |= {"hc_lowrank": 24, "ple_layer_ids": [2], "heads_per_ngram": 2, "ngram_vocab_size_base": 50, "split_ngram_parts": 4}
QWEN4 |= {"make_ngram_vocab_size_divisible_by": 7, "indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 16}
QWEN4 |= {"indexer_budget": 20, "indexer_compress_ratio": 4}
# Odd: three streams, n-grams up to four tokens with a text's end among them, indexers in two layers, runs of five.
QWEN4_ODD = {key: value for key, value in DELTA_ODD.items() if key != "linear_value_head_dim"} | TIED
QWEN4_ODD |= {"hc_count": 3, "hc_lowrank": 10, "ngram_size": 4, "heads_per_ngram": 3, "ple_embed_dim": 36, "eos_token_id": 270}
QWEN4_ODD |= {"ple_conv_kernel_size": 3, "split_ngram_parts": 1, "rope_parameters": MROPE | HALF, "indexer_n_heads": 12}
QWEN4_ODD |= {"indexer_head_dim": 24, "indexer_budget": 15, "indexer_compress_ratio": 5, "ple_layer_ids": [4]}
QWEN4_ODD |= {"layer_types": ["indexed_attention", *["linear_attention"] * 3, "indexed_attention"], "num_experts_per_tok": 3}

LONGCAT = {"num_hidden_layers": 6, "num_key_value_heads": 4, "ffn_hidden_size": 96, "moe_topk": 4}
LONGCAT |= {"n_routed_experts": 6, "zero_expert_num": 3, "expert_ffn_hidden_size": 40, "routed_scaling_factor": 2.5}
LONGCAT |= {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24}
LONGCAT |= {"head_dim": 8, "intermediate_size": 96, "rope_parameters": PLAIN}
LONGCAT_ODD = {"num_hidden_layers": 2, "zero_expert_num": 5, "moe_topk": 3, "rope_parameters": YARN, "num_attention_heads": 6}
LONGCAT_ODD |= {"num_key_value_heads": 6, "n_routed_experts": 2}

MUSE = WINDOW | {"num_hidden_layers": 5, "head_dim": 24, "rope_parameters": PLAIN, "rms_norm_eps": 1e-4}
MUSE |= {"output_multiplier": 0.5}
MUSE_ODD = {"num_hidden_layers": 3, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}
MUSE_ODD |= {"layer_rope_theta": [0, 10000.0, 10000.0], "qk_scale_factor": 2.5, "output_multiplier": 0.7}
MUSE_ODD |= {"final_logit_softcapping": 3.0}

CASES = {
    "muse-glimmer": ("MuseGlimmerForConditionalGeneration", MUSE),
    "muse-glimmer-odd": ("MuseGlimmerForConditionalGeneration", MUSE | MUSE_ODD | TIED),
    "longcat-flash": ("LongcatFlash", LONGCAT),
    "longcat-flash-mainline": ("LongcatFlash", LONGCAT | {"zero_expert_num": 0}, "mainline"),
    "longcat-flash-odd": ("LongcatFlash", LONGCAT | LONGCAT_ODD, "legacy"),
    "deepseek4": ("DeepseekV4", V4),
    "deepseek4-odd": ("DeepseekV4", V4 | V4_ODD),
    "gemma4-moe": ("Gemma4", GEMMA4 | GEMMA4_31B | GEMMA4_MOE),
    "gemma4-moe-per-layer": ("Gemma4", GEMMA4 | GEMMA4_MOE | TIED | {"top_k_experts": 3, "num_kv_shared_layers": 2}),
    "minimax-m3": ("MiniMaxM3SparseForConditionalGeneration", M3, "mainline"),
    "minimax-m3-odd": ("MiniMaxM3SparseForConditionalGeneration", M3 | M3_ODD, "mainline"),
    "minimax-m3-ik": ("MiniMaxM3SparseForConditionalGeneration", M3 | {"index_topk_blocks": 20}),
    "qwen4exp": ("Qwen4Exp", QWEN4),
    "qwen4exp-odd": ("Qwen4Exp", QWEN4 | QWEN4_ODD),
    "qwen4exp-plain": ("Qwen4Exp", QWEN4 | {"ple_layer_ids": [], "indexer_budget": 200}),
    "step35": ("Step3p7ForConditionalGeneration", STEP),
    "step35-limits": ("Step3p7ForConditionalGeneration", STEP | STEP_LIMITS),
}
BEYOND_LLAMA_CPP = {
    **dict.fromkeys(("longcat-flash", "longcat-flash-mainline", "longcat-flash-odd"), "not this architecture"),
    "deepseek4-odd": "four streams, entries for 4 and 128 tokens alone",
    "minimax-m3-odd": "an indexer in every layer with experts",
    "minimax-m3-ik": "not in this layout",
}
COARSE_IN_LLAMA_CPP = dict.fromkeys(("gemma4-moe", "gemma4-moe-per-layer"), 5e-2)
# One selection of blocks for all heads, the best of any index head's: compared while all blocks are seen.
IN_LLAMA_CPP = {"minimax-m3": {"index_topk_blocks": 20}}
# All keys are seen: of those selected, it takes a few more where the last run has not as many tokens as it can have.
SEEN = {"rms_norm_eps": 1e-6, "indexer_budget": 200}
IN_LLAMA_CPP |= {"qwen4exp": SEEN, "qwen4exp-plain": SEEN}
IN_LLAMA_CPP |= {"qwen4exp-odd": SEEN | {"hidden_size": 72, "ple_embed_dim": None, "attention_bias": False}}
