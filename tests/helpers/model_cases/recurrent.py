"""State space models, short convolutions and delta attention, with and without layers of attention."""

from .common import PLAIN, TIED, YARN

TYPES = {"layer_types": ["conv", "full_attention", "conv", "conv"], "num_hidden_layers": 4}
LFM2 = TYPES | {"norm_eps": 1e-5, "block_multiple_of": 32}
# Odd sizes: a convolution of four tokens, a feed-forward block as wide as said, attention first.
LFM2_ODD = {"conv_L_cache": 4, "block_auto_adjust_ff_dim": False, "layer_types": ["full_attention", "conv", "conv", "conv"]}
LFM2_MOE = TYPES | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "num_dense_layers": 1}
LFM2_MOE_ODD = {"num_dense_layers": 2, "use_expert_bias": False, "norm_topk_prob": False, "routed_scaling_factor": 2.5}
MAMBA2 = {"num_heads": 8, "head_dim": 16, "n_groups": 1, "state_size": 16, "layer_norm_epsilon": 1e-5}
MAMBA2_ODD = {"n_groups": 2, "num_heads": 6, "head_dim": 32, "expand": 3, "state_size": 10, "conv_kernel": 3}
MAMBA = {"state_size": 16, "layer_norm_epsilon": 1e-5, "intermediate_size": 128}
MAMBA_ODD = {"state_size": 6, "time_step_rank": 7, "conv_kernel": 3, "use_conv_bias": False}
HYBRID = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"]}
GRANITE = HYBRID | {"mamba_n_heads": 8, "mamba_d_state": 16, "num_local_experts": 6, "num_experts_per_tok": 2}
GRANITE |= {"shared_intermediate_size": 48, "embedding_multiplier": 3.0, "logits_scaling": 0.5, "residual_multiplier": 0.6}
GRANITE |= {"attention_multiplier": 0.3}
GRANITE_ODD = {"num_local_experts": 0, "position_embedding_type": "rope", "mamba_n_groups": 2, "mamba_d_state": 10}
GRANITE_ODD |= {"mamba_d_conv": 3, "mamba_conv_bias": False, "layer_types": ["full_attention", *["linear_attention"] * 3]}
GRANITE_PLAIN = {"layer_types": ["full_attention"] * 4, "position_embedding_type": "rope"}
NEMOTRON = {"head_dim": 24, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 16}
NEMOTRON |= {"layer_norm_epsilon": 1e-5, "time_step_min": 1e-9}
NEMOTRON |= {"layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"]}
NEMOTRON_ODD = {"mlp_bias": True, "n_groups": 2, "mamba_head_dim": 12, "use_conv_bias": False, "conv_kernel": 3}
NEMOTRON_ODD |= {"layers_block_type": ["full_attention", "mlp", "mlp", "linear_attention"]}
NEMOTRON_MOE = {"layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "moe"]}
NEMOTRON_MOE |= {"moe_intermediate_size": 40, "moe_shared_expert_intermediate_size": 56, "n_routed_experts": 6}
NEMOTRON_LATENT = {"moe_latent_size": 32, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
FALCON = {"mamba_d_ssm": 96, "mamba_n_heads": 8, "mamba_d_state": 16, "num_hidden_layers": 4, "mamba_norm_before_gate": False}
FALCON |= {"embedding_multiplier": 2.5, "lm_head_multiplier": 0.6, "key_multiplier": 0.7, "attention_in_multiplier": 1.2}
FALCON |= {"attention_out_multiplier": 0.8, "ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.9}
FALCON |= {"mlp_multipliers": [0.8, 1.4], "ssm_multipliers": [0.9, 1.1, 0.7, 1.2, 0.6]}
FALCON_ODD = {"mamba_rms_norm": True, "mamba_n_groups": 2, "mamba_d_ssm": None, "mamba_d_conv": 3, "mamba_conv_bias": False}
JAMBA = {"num_hidden_layers": 4, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 4, "mamba_d_state": 8}
JAMBA_ODD = {"num_experts": 1, "mamba_dt_rank": 7, "mamba_d_conv": 3, "mamba_conv_bias": False, "mamba_d_state": 5}
KIMI = HYBRID | {"num_key_value_heads": 4, "linear_num_heads": 4, "linear_head_dim": 16, "moe_intermediate_size": 40}
KIMI |= {"kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 20, "num_experts": 6}
KIMI |= {"num_experts_per_token": 2, "num_shared_experts": 1, "rms_norm_eps": 1e-6, "routed_scaling_factor": 2.446}
KIMI_ODD = {"linear_conv_kernel_dim": 3, "linear_head_dim": 24, "num_experts": 8, "num_expert_group": 4, "topk_group": 2}
KIMI_ODD |= {"num_shared_experts": 2, "moe_renormalize": False, "mlp_layer_types": ["dense", "dense", "sparse", "sparse"]}
LING = {"num_hidden_layers": 4, "layer_group_size": 2, "first_k_dense_replace": 1, "head_dim": 16, "kda_lower_bound": -4.0}
LING |= {"kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 20, "moe_intermediate_size": 40}
LING |= {"num_local_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "num_key_value_heads": 4}
LING |= {"rope_parameters": PLAIN, "num_mtp_layers": 0}
LING_ODD = {"num_hidden_layers": 5, "layer_group_size": 3, "q_lora_rank": 24, "short_conv_kernel_size": 3, "n_group": 1}
LING_ODD |= {"topk_group": 1, "norm_topk_prob": False, "first_k_dense_replace": 2, "num_experts_per_tok": 3}

CASES = {
    "lfm2": ("Lfm2", TIED | LFM2 | {"rope_parameters": PLAIN | {"rope_theta": 1e6}}),
    "lfm2-odd": ("Lfm2", LFM2 | LFM2_ODD),
    "lfm2moe": ("Lfm2Moe", TIED | LFM2_MOE),
    "lfm2moe-odd": ("Lfm2Moe", LFM2_MOE | LFM2_MOE_ODD),
    "mamba": ("Mamba", TIED | MAMBA),
    "mamba-odd": ("Mamba", MAMBA | MAMBA_ODD),
    "falcon-mamba": ("FalconMamba", MAMBA | {"mixer_rms_eps": 1e-5}),
    "mamba2": ("Mamba2", MAMBA2),
    "mamba2-odd": ("Mamba2", TIED | MAMBA2 | MAMBA2_ODD),
    "granitehybrid": ("GraniteMoeHybrid", GRANITE),
    "granitehybrid-odd": ("GraniteMoeHybrid", TIED | GRANITE | GRANITE_ODD),
    "granitehybrid-plain": ("GraniteMoeHybrid", GRANITE | GRANITE_PLAIN),
    "nemotron-h": ("NemotronH", NEMOTRON),
    "nemotron-h-odd": ("NemotronH", NEMOTRON | NEMOTRON_ODD),
    "nemotron-h-moe": ("NemotronH", NEMOTRON | NEMOTRON_MOE),
    "nemotron-h-latent": ("NemotronH", NEMOTRON | NEMOTRON_MOE | NEMOTRON_LATENT),
    "falcon-h1": ("FalconH1", FALCON),
    "falcon-h1-odd": ("FalconH1", TIED | FALCON | FALCON_ODD | {"rope_parameters": YARN}),
    "jamba": ("Jamba", JAMBA),
    "jamba-odd": ("Jamba", TIED | JAMBA | JAMBA_ODD),
    "kimi-linear": ("KimiLinear", KIMI),
    "kimi-linear-odd": ("KimiLinear", KIMI | KIMI_ODD),
    "ling3": ("BailingHybrid", LING),
    "ling3-odd": ("BailingHybrid", LING | LING_ODD),
}
NO_BIAS = "convolutions have biases"
BEYOND_LLAMA_CPP = {
    **dict.fromkeys(("mamba-odd", "granitehybrid-odd", "jamba-odd", "nemotron-h-odd", "falcon-h1-odd"), NO_BIAS),
    "kimi-linear-odd": "experts are not limited to groups, weights always sum to one",
    "lfm2moe-odd": "weights of experts always sum to one, with a bias of the router",
}
