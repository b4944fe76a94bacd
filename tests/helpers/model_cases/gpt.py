"""Decoders of the years before Llama: learned positions, linear biases, parallel blocks, fused queries, keys and values."""

from .common import PLAIN, TIED

HEADS = {"num_key_value_heads": None}  # as many as query heads
ODD_HEADS = {"hidden_size": 72, "num_attention_heads": 6}  # linear biases of a number that is no power of two
QUARTER = {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.25}}
HALF = {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}}
NEOX = TIED | {"tie_word_embeddings": False, "intermediate_size": 256}
FALCON = TIED | {"rope_parameters": PLAIN}
FALCON_NEW = FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}
MPT = TIED | {"max_seq_len": 512, "d_model": 64, "n_heads": 4, "n_layers": 3, "layer_norm_epsilon": 1e-5}
MPT_CLIP = {"attn_config": {"clip_qkv": 0.7}}  # transformers ignores alibi_bias_max
DBRX_EXPERTS = {"moe_num_experts": 6, "moe_top_k": 3, "ffn_hidden_size": 40}
DBRX = {"d_model": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": 512, "ffn_config": DBRX_EXPERTS}
DBRX |= {"attn_config": {"kv_n_heads": 2, "rope_theta": 500000.0, "clip_qkv": 8.0}}
DBRX |= {"rope_parameters": PLAIN | {"rope_theta": 500000.0}}
DBRX_ODD = ODD_HEADS | {"d_model": 72, "n_heads": 6, "attn_config": {"kv_n_heads": 1, "rope_theta": 500000.0, "clip_qkv": 0.7}}
DBRX_ODD |= {"ffn_config": DBRX_EXPERTS | {"moe_top_k": 1, "moe_normalize_expert_weights": None}}
STABLE = {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.25}}

CASES = {
    "gpt2": ("GPT2LMHeadModel", TIED),
    "gpt2-inner": ("GPT2LMHeadModel", TIED | {"n_inner": 112, "layer_norm_epsilon": 1e-6}),
    "gptneox": ("GPTNeoX", NEOX | QUARTER),
    "gptneox-sequential": ("GPTNeoX", NEOX | HALF | {"use_parallel_residual": False, "hidden_act": "gelu_new"}),
    "falcon": ("Falcon", FALCON),
    "falcon-40b": ("Falcon", FALCON_NEW),
    "falcon-11b": ("Falcon", FALCON_NEW | {"num_ln_in_parallel_attn": 1, "num_kv_heads": 1}),
    "falcon-heads": ("Falcon", FALCON | {"multi_query": False, "ffn_hidden_size": 112}),
    "bloom": ("Bloom", TIED),
    "bloom-odd": ("Bloom", TIED | ODD_HEADS),
    "mpt": ("Mpt", MPT),
    "mpt-clip": ("Mpt", MPT | MPT_CLIP | {"d_model": 72, "n_heads": 6}),
    "dbrx": ("Dbrx", DBRX),
    "dbrx-odd": ("Dbrx", DBRX | DBRX_ODD),
    "stablelm": ("StableLm", STABLE),
    "stablelm-12b": ("StableLm", STABLE | {"qk_layernorm": True, "use_parallel_residual": True}),
    "stablelm-biases": ("StableLm", TIED | HALF | {"use_qkv_bias": True}),
    "phi2": ("Phi", HALF),
    "phi2-grouped": ("Phi", {"num_key_value_heads": 4, "rope_parameters": PLAIN | {"partial_rotary_factor": 0.25}}),
    "glm": ("Glm", {"head_dim": 16, "attention_bias": True} | HALF),
    "glm-whole": (
        "Glm",
        TIED | {"head_dim": 24, "attention_bias": False, "rope_parameters": PLAIN | {"partial_rotary_factor": 1.0}},
    ),
}
BEYOND_LLAMA_CPP = {
    "dbrx-odd": "weights of experts are always normalised",
    "glm-whole": "heads of n_embd / n_head numbers",
}
# Its gelu is the tanh form of a table of f16, whatever the model's.
COARSE_IN_LLAMA_CPP = dict.fromkeys(CASES, 5e-3)
