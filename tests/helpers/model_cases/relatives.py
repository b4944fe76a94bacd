"""Relatives of Llama, dense and with experts: gates, chunks and windows, other norms and activations."""

from .common import LLAMA3, PLAIN, TIED, WINDOW, YARN

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
LOCAL_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}
PATTERN = ["full_attention", "sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
LLAMA4 = {"head_dim": 24, "intermediate_size_mlp": 80, "num_local_experts": 6, "num_hidden_layers": 5}
LLAMA4_CHUNKS = {"attention_chunk_size": 20, "floor_scale": 16, "attn_scale": 0.3}
HY = {"head_dim": 24, "num_shared_experts": 2, "rope_parameters": PLAIN}
SOLAR = {"head_dim": 24, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "rope_parameters": PLAIN}
LAGUNA_YARN = {"full_attention": YARN | {"partial_rotary_factor": 0.5}, "sliding_attention": PLAIN}
LAGUNA = {"head_dim": 32, "shared_expert_intermediate_size": 56, "moe_routed_scaling_factor": 2.5}
LAGUNA_LOCAL = WINDOW | {"num_hidden_layers": 5, "layer_types": PATTERN, "num_attention_heads_per_layer": [4, 6, 6, 4, 6]}
MELLUM = WINDOW | {"head_dim": 24, "num_hidden_layers": 5, "layer_types": PATTERN, "num_experts_per_tok": 2}
MELLUM |= {"num_local_experts": 6, "moe_intermediate_size": 40}
ONE_BASE = {"full_attention": YARN, "sliding_attention": PLAIN}
AFMOE = WINDOW | {"head_dim": 24, "num_hidden_layers": 5, "rope_parameters": PLAIN, "route_scale": 2.5}
COHERE_MOE = WINDOW | TIED | {"head_dim": 24, "num_hidden_layers": 6, "num_experts": 6, "logit_scale": 0.5}
COHERE_MOE |= {"prefix_dense_intermediate_size": 80}
SIGMOID = {"expert_selection_fn": "sigmoid", "num_shared_experts": 2, "rms_norm_eps": None}
GRANITE = {"embedding_multiplier": 3.0, "logits_scaling": 0.5, "residual_multiplier": 0.6, "attention_multiplier": 0.3}
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 512}
LONG |= {"short_factor": [1.0 + 0.05 * i for i in range(8)], "long_factor": [1.5 + 0.7 * i for i in range(8)]}
LONG |= {"short_mscale": 1.2, "long_mscale": 1.2}

GEMMA3N = TIED | WINDOW | {"head_dim": 24, "num_hidden_layers": 6, "vocab_size_per_layer_input": 200}
GEMMA3N |= {"hidden_size_per_layer_input": 16, "laurel_rank": 8, "num_kv_shared_layers": 0}
GEMMA3N |= {"layer_types": ["sliding_attention", "full_attention"] * 3, "rms_norm_eps": 1e-4}
GEMMA3N_ODD = {"altup_num_inputs": 3, "num_kv_shared_layers": 2, "intermediate_size": [96, 80, 96, 64, 96, 96]}
GEMMA3N_ODD |= {"activation_sparsity_pattern": [0.9, 0.0, 0.5, 0.95, 0.0, 0.7], "final_logit_softcapping": 5.0}

CASES = {
    "gemma3n": ("Gemma3n", GEMMA3N),
    "gemma3n-odd": ("Gemma3n", GEMMA3N | GEMMA3N_ODD),
    "llama4": ("Llama4", LLAMA4),
    "llama4-chunks": ("Llama4", LLAMA4 | LLAMA4_CHUNKS | {"interleave_moe_layer_step": 2, "num_experts_per_tok": 2}),
    "llama4-many": ("Llama4", LLAMA4 | {"num_local_experts": 128, "use_qk_norm": False, "rope_parameters": LLAMA3}),
    "llama4-biases": ("Llama4", LLAMA4 | LLAMA4_CHUNKS | {"attention_bias": True, "attn_temperature_tuning": False}),
    "phimoe": ("Phimoe", LOCAL_EXPERTS | {"router_jitter_noise": 0.2}),
    "phimoe-long": ("Phimoe", LOCAL_EXPERTS | {"attention_bias": True, "lm_head_bias": True, "rope_parameters": LONG}),
    "olmo": ("Olmo", {"rope_parameters": PLAIN}),
    "olmo-clamped": ("Olmo", TIED | {"clip_qkv": 0.7, "num_key_value_heads": 4}),
    "apertus": ("Apertus", {"rope_parameters": LLAMA3}),
    "apertus-biases": ("Apertus", TIED | {"attention_bias": True, "rope_parameters": PLAIN}),
    "hy-v3": ("HYV3", EXPERTS | HY),
    "hy-v3-dense": ("HYV3", EXPERTS | HY | TIED | {"mlp_layer_types": ["dense"] * 2 + ["sparse"], "num_shared_experts": 1}),
    "solar-open": ("SolarOpen", SOLAR),
    "solar-open-groups": ("SolarOpen", SOLAR | {"n_group": 3, "topk_group": 2, "norm_topk_prob": False, "n_shared_experts": 2}),
    "laguna": ("Laguna", EXPERTS | LAGUNA | LAGUNA_LOCAL | {"rope_parameters": LAGUNA_YARN}),
    "laguna-elements": ("Laguna", EXPERTS | LAGUNA | TIED | {"gating": "per-element", "moe_router_logit_softcapping": 2.0}),
    "mellum": ("Mellum", MELLUM | {"rope_parameters": ONE_BASE}),
    "mellum-dense": ("Mellum", MELLUM | {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse", "dense"]}),
    "afmoe": ("Afmoe", EXPERTS | AFMOE | {"mup_enabled": True}),
    "afmoe-unscaled": ("Afmoe", EXPERTS | AFMOE | TIED | {"num_dense_layers": 2, "global_attn_every_n_layers": 3}),
    "cohere2moe": ("Cohere2Moe", COHERE_MOE | {"first_k_dense_replace": 1}),
    "cohere2moe-shared": ("Cohere2Moe", COHERE_MOE | SIGMOID | {"num_key_value_heads": 4}, "mainline"),
    "granitemoe-shared": ("GraniteMoeShared", TIED | GRANITE | LOCAL_EXPERTS | {"shared_intermediate_size": 56}),
    "gemma": ("Gemma", TIED | {"head_dim": 24, "rope_parameters": PLAIN}),
    "gemma-gelu": ("Gemma", {"head_dim": 32, "hidden_act": "gelu", "num_key_value_heads": 1}),
    "jais2": ("Jais2", {"rope_parameters": PLAIN}),
    "jais2-plain": ("Jais2", TIED | {"head_dim": 24, "attention_bias": False, "mlp_bias": False}),
    "ministral": ("Ministral", WINDOW | {"head_dim": 24, "layer_types": PATTERN[:3]}),
    "ministral-short": ("Ministral", {"sliding_window": 600, "head_dim": 24}),
}

BEYOND_LLAMA_CPP = {
    "gemma3n": "sizes and layers of the published models only; deviations of n numbers are divided by n - 1",
    "gemma3n-odd": "sizes and layers of the published models only",
    "ministral": "no windows in this architecture",
    "llama4-chunks": "chunks of 8192 tokens only",
    "llama4-biases": "queries are always scaled by position",
    "phimoe": "RMS norms, other weights of experts",
    "phimoe-long": "RMS norms, other weights of experts",
    "mellum-dense": "experts in every layer",
    "afmoe-unscaled": "embeddings are always scaled, every fourth layer is global",
    "cohere2moe": "this architecture has another name in ik_llama.cpp",
    "gemma-gelu": "always a tied output",
    "jais2-plain": "biases everywhere",
}
COARSE_IN_LLAMA_CPP = {"gemma": 5e-3}  # its gelu comes from a table of f16
# It has neither a soft cap of the router nor a tied output.
IN_LLAMA_CPP = {"laguna-elements": {"moe_router_logit_softcapping": 0.0}, "apertus-biases": {"tie_word_embeddings": False}}
