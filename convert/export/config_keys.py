"""Keys of a config.json, and where a GGUF says their values.

A key has candidates, the likeliest first: numbers under one of several metadata keys (NUMBERS), words (CHOICES), and what a
function of `Facts` makes (DERIVED). Which of them is right is decided by converting: `find_config`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

from .facts import Facts, part_of, plain, shortest
from .layer_kinds import LAYER_KINDS
from .rope_settings import rope_parameters

NULL = object()  # a key that is there and null, where that is not the same as none

# keys of config.json -> metadata keys without the architecture
_SAME_NUMBERS: dict[str, str] = {
    "hidden_size d_model n_embd n_embed": "embedding_length",
    "num_attention_heads n_head n_heads": "attention.head_count",
    "num_heads": "ssm.time_step_rank attention.head_count",
    "num_key_value_heads num_kv_heads n_head_kv kv_n_heads swa_num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings max_seq_len n_positions seq_length model_max_length n_ctx": "context_length",
    "intermediate_size": "feed_forward_length expert_feed_forward_length",
    "ffn_hidden_size": "feed_forward_length expert_feed_forward_length",
    "n_inner intermediate_size_mlp dense_intermediate_size prefix_dense_intermediate_size": "feed_forward_length",
    "moe_intermediate_size expert_ffn_hidden_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size share_expert_dim": "expert_shared_feed_forward_length",
    "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "rms_norm_eps mixer_rms_eps": "attention.layer_norm_rms_epsilon",
    "norm_eps layer_norm_eps layer_norm_epsilon norm_epsilon": "attention.layer_norm_epsilon attention.layer_norm_rms_epsilon",
    "layernorm_epsilon rms_norm_epsilon": "attention.layer_norm_rms_epsilon attention.layer_norm_epsilon",
    "num_experts num_local_experts n_routed_experts moe_num_experts": "expert_count",
    "num_experts_per_tok num_experts_per_token moe_k moe_topk moe_top_k top_k_experts": "expert_used_count",
    "n_shared_experts num_shared_experts num_shared_expert moe_num_shared_experts": "expert_shared_count",
    "n_group num_expert_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "routed_scaling_factor moe_routed_scaling_factor moe_router_scaling_factor": "expert_weights_scale",
    "route_scale router_scaling_factor": "expert_weights_scale",
    "first_k_dense_replace num_dense_layers moe_layer_start_index": "leading_dense_block_count",
    "moe_layer_interval": "interleave_moe_layer_step",
    "interleave_moe_layer_step": "interleave_moe_layer_step",
    "router_jitter_noise": "expert_router_jitter",
    "moe_router_logit_softcapping": "router_logit_softcapping",
    "zero_expert_num": "expert_zero_count",
    "moe_latent_size": "moe_latent_size",
    "head_dim": "kda.head_dim attention.key_length attention.key_length_swa attention.key_length_mla",
    "global_head_dim": "attention.key_length",
    "v_head_dim": "attention.value_length_mla attention.value_length",
    "kv_lora_rank": "attention.kv_lora_rank",
    "q_lora_rank": "attention.q_lora_rank",
    "o_lora_rank": "attention.output_lora_rank",
    "o_groups": "attention.output_group_count",
    "qk_rope_head_dim": "rope.dimension_count",
    "clip_qkv": "attention.clamp_kqv",
    "attention_value_scale": "attention.value_scale",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier scale_emb": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling logit_scale output_multiplier": "logit_scale",
    "attention_chunk_size": "attention.sliding_window",
    "attn_scale": "attention.temperature_scale",
    "floor_scale": "attention.temperature_length",
    "full_attention_interval": "full_attention_interval",
    "conv_L_cache": "shortconv.l_cache",
    "conv_kernel linear_conv_kernel_dim mamba_d_conv": "ssm.conv_kernel",
    "state_size ssm_state_size mamba_d_state linear_key_head_dim": "ssm.state_size",
    "n_groups mamba_n_groups linear_num_key_heads": "ssm.group_count",
    "time_step_rank mamba_dt_rank mamba_num_heads mamba_n_heads linear_num_value_heads": "ssm.time_step_rank",
    "mamba_d_ssm": "ssm.inner_size",
    "linear_num_heads": "attention.head_count",
    "linear_head_dim": "kda.head_dim",
    "short_conv_kernel_size": "ssm.conv_kernel",
    "kda_lower_bound gate_lower_bound": "kda.gate_lower_bound",
    "attn_res_block_size": "attn_res.block_size",
    "activation_situ_beta": "activation.situ_beta",
    "activation_situ_linear_beta": "activation.situ_linear_beta",
    "routed_expert_hidden_size": "expert_latent_length",
    "mhc_num_stream": "mhc_num_stream",
    "mhc_recur_norm": "mhc_recur_norm",
    "param_sink_number": "param_sink_number",
    "index_n_heads indexer_n_heads": "attention.indexer.head_count",
    "index_head_dim indexer_head_dim": "attention.indexer.key_length",
    "index_topk indexer_budget index_topk_blocks": "attention.indexer.top_k",
    "index_block_size": "attention.indexer.block_size",
    "index_local_blocks": "attention.indexer.local_blocks",
    "hc_count hc_mult": "hyper_connection.count",
    "hc_lowrank": "hyper_connection.low_rank",
    "hc_sinkhorn_iters": "hyper_connection.sinkhorn_iterations",
    "hc_eps": "hyper_connection.epsilon",
    "hidden_size_per_layer_input": "embedding_length_per_layer_input",
    "ngram_size": "ple.ngram_size",
    "heads_per_ngram": "ple.heads_per_ngram",
    "ple_conv_kernel_size": "ple.conv_kernel",
    "num_kv_shared_layers": "attention.shared_kv_layers",
    "altup_active_idx": "altup.active_idx",
    "altup_num_inputs": "altup.num_inputs",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "swiglu_limit": "swiglu_clamp_exp swiglu_clamp_shexp",
    "rope_theta": "rope.freq_base",
    "rotary_dim": "rope.dimension_count",
    "num_nextn_predict_layers": "nextn_predict_layers",
    "local_attention": "attention.sliding_window",
    "global_attn_every_n_layers": "attention.sliding_window_pattern",
    "eos_token_id": "ple.eos_token_id",
}
NUMBERS: dict[str, tuple[str, ...]] = {key: tuple(v.split()) for keys, v in _SAME_NUMBERS.items() for key in keys.split()}
NUMBERS |= {key: (key,) for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_parallel_residual")}

# words and switches that only the tensors or other keys show, the default of the conversion first where it is None
CHOICES: dict[str, tuple[Any, ...]] = {
    "scoring_func": (None, "sigmoid", "softmax", "sqrtsoftplus", "noaux_tc"),
    "score_function": (None, "sigmoid", "softmax"),
    "score_func": (None, "sigmoid", "softmax"),
    "topk_method": (None, "noaux_tc", "group_limited_greedy", "greedy"),
    "expert_selection_fn": (None, "sigmoid", "softmax"),
    "position_embedding_type": (None, "rope", "nope"),
    "gating": (None, "per-head", "per-element"),
    "gating_types": (None,),
    "moe_normalize_expert_weights": (None, NULL),
    "attn_logit_softcapping": (None, NULL),
    "final_logit_softcapping": (None, NULL),
    "output_gate_type": (None, "sigmoid"),
    "use_bidirectional_attention": (None, True),
    "attn_temperature_tuning": (True, False),
    "block_auto_adjust_ff_dim": (False,),
    "tie_embedding": (None,),
    "sliding_window_pattern": (None, 6, 4, 3, 2, 5, 1),
    "global_attn_every_n_layers": (None, 4, 3, 2, 5, 6),
    "max_window_layers": (None, 0),
    "decoder_sparse_step": (None, 2, 3, 4),
    "num_ln_in_parallel_attn": (None, 2, 1),
    "attn_layer_period": (None, 8, 2, 3, 4, 5, 6, 7),
    "expert_layer_period": (None, 1, 2, 3, 4),
    "expert_layer_offset": (None, 0, 1, 2),
    "hidden_act": (None, "gelu_new"),
    "feed_forward_type": ("geglu",),
    "split_ngram_parts": (None, 1),
}


def _head_width(facts: Facts) -> list[Any]:
    """Numbers of each of a state space's heads."""
    inner, count = facts.key("ssm.inner_size"), facts.key("ssm.time_step_rank")
    return [inner // count] if inner and count else []


def _expansion(facts: Facts) -> list[Any]:
    """Numbers of a state space's heads for each of the hidden state's."""
    inner, size = facts.key("ssm.inner_size"), facts.key("embedding_length")
    if not inner or not size:
        return []
    return [inner // size] if inner % size == 0 else [None, inner / size]


def _nope(facts: Facts) -> list[Any]:
    """Elements of a head's key without rotary embedding (latent attention)."""
    length = facts.key("attention.key_length_mla") or facts.key("attention.key_length")
    rotated = facts.key("rope.dimension_count")
    return [length - rotated] if length and rotated else []


def _scalar_of_scale(facts: Facts) -> list[Any]:
    """query_pre_attn_scalar: scores are divided by its root; the width of heads where no scale is said."""
    scale = facts.key("attention.scale")
    if scale is None:
        return [facts.head_dim]
    exact = scale**-2
    return [round(exact) if abs(exact - round(exact)) < 1e-3 * exact else shortest(exact)]


def _depth_scale(facts: Facts) -> list[Any]:
    scale = facts.key("residual_scale")
    return [] if scale is None else [shortest(scale * math.sqrt(facts.n_layers))]


def _logit_base(facts: Facts) -> list[Any]:
    scale, size = facts.key("logit_scale"), facts.key("embedding_length")
    return [] if scale is None else [round(size * scale), round(size / scale)]


def _vocabulary(facts: Facts) -> list[Any]:
    rows = facts.rows("token_embd.weight")
    return [v for v in (facts.key("vocab_size"), rows) if v is not None]


def _layers(facts: Facts) -> list[Any]:
    return [facts.n_layers]


def _half_layers(facts: Facts) -> list[Any]:
    return [facts.n_layers // 2] if facts.architecture == "longcat-flash" else []


def _rotary_part(facts: Facts) -> list[Any]:
    dim, head = facts.key("rope.dimension_count"), facts.head_dim
    return [part_of(dim, head)] if dim and head and dim < head and not facts.key("attention.kv_lora_rank") else []


def _heads_of_layers(facts: Facts) -> list[Any]:
    heads = facts.key("attention.head_count")
    return [heads] if isinstance(heads, list) else []


def _compressed(facts: Facts) -> list[int]:
    ratios = facts.key("attention.compress_ratios")
    return sorted({r for r in ratios or () if r})


def _compress_rates(facts: Facts) -> list[Any]:
    rates = _compressed(facts)
    if not rates or facts.architecture != "deepseek4":
        return []
    kinds = ("compressed_sparse_attention", "heavily_compressed_attention")
    pairs = [(rates[0], rates[-1])] if len(rates) > 1 else [(rates[0], 128), (4, rates[0])]
    return [dict(zip(kinds, pair, strict=True)) for pair in pairs]


def _global_kv(facts: Facts) -> list[Any]:
    counts, pattern = facts.key("attention.head_count_kv"), facts.key("attention.sliding_window_pattern")
    if isinstance(counts, list) and isinstance(pattern, list):
        return sorted({n for n, local in zip(counts, pattern, strict=False) if not local})
    return []


def _local_kv(facts: Facts) -> list[Any]:
    counts, pattern = facts.key("attention.head_count_kv"), facts.key("attention.sliding_window_pattern")
    if isinstance(counts, list) and isinstance(pattern, list):
        return sorted({n for n, local in zip(counts, pattern, strict=False) if local and n})
    return []


def _global_layers(facts: Facts) -> list[Any]:
    """per_layer_config: heads of the layers without a window, where they are of another width (Gemma 4)."""
    pattern, width, local = (facts.key(f"attention.{k}") for k in ("sliding_window_pattern", "key_length", "key_length_swa"))
    if not isinstance(pattern, list) or not local or width == local:
        return []
    kv = _global_kv(facts)
    settings = {"head_dim": width} | ({"num_key_value_heads": kv[0]} if len(kv) == 1 else {})
    return [{str(i): settings for i in range(facts.n_layers) if not pattern[i]}]


def _alibi(facts: Facts) -> list[Any]:
    value = facts.key("attention.max_alibi_bias")
    return [] if value is None else [int(value) if value == int(value) else value]


def _laurel(facts: Facts) -> list[Any]:
    rows = facts.rows("blk.0.laurel_l.weight")
    return [] if rows is None else [rows]


def _token_types(facts: Facts) -> list[Any]:
    rows = facts.rows("token_types.weight")
    return [] if rows is None else [rows]


def _window(facts: Facts) -> list[Any]:
    return [size for size in facts.numbers("attention.sliding_window") if size]


def _experts(facts: Facts) -> list[Any]:
    """How many there are; without any, what a config may say instead of nothing."""
    return facts.numbers("expert_count") or [None, 0, 1]


def _shared_rows(facts: Facts) -> list[Any]:
    """Rows of gate and up of all shared experts together."""
    count, rows = facts.key("expert_shared_count"), facts.key("expert_feed_forward_length")
    found = facts.numbers("expert_shared_feed_forward_length")
    return [*found, *([count * rows] if count and rows else []), *facts.numbers("feed_forward_length"), 0]


def _heads_by_window(local: bool) -> Callable[[Facts], list[Any]]:
    """Heads of the layers with a window, or of those without, where they differ."""

    def heads(facts: Facts) -> list[Any]:
        counts, pattern = facts.key("attention.head_count"), facts.key("attention.sliding_window_pattern")
        found = facts.numbers("attention.head_count")
        if isinstance(counts, list) and isinstance(pattern, list):
            own = sorted({n for n, each in zip(counts, pattern, strict=False) if each == local})
            return [*own, *(n for n in found if n not in own)]
        return [] if local else found

    return heads


def _sparsity(facts: Facts) -> list[Any]:
    """Gemma 3n's part of a layer's activations that is 0, from the number of standard deviations beyond the mean."""
    scales = facts.key("activation_sparsity_scale")
    if not isinstance(scales, list):
        return []
    return [[0.0 if scale == -math.inf else round(NormalDist().cdf(scale), 6) for scale in scales]]


def _ngram_base(facts: Facts) -> list[Any]:
    """Numbers of rows are primes from the base on: the first of them gives the same."""
    sizes = facts.key("ple.head_vocab_sizes")
    return [sizes[0]] if sizes else []


def _ngram_width(facts: Facts) -> list[Any]:
    """Numbers of the embeddings of all heads together."""
    width, size, heads = (
        facts.key(key) for key in ("embedding_length_per_layer_input", "ple.ngram_size", "ple.heads_per_ngram")
    )
    return [width * (size - 1) * heads] if width and size and heads else []


def _ngram_multiple(facts: Facts) -> list[Any]:
    sizes, rows = facts.key("ple.head_vocab_sizes"), facts.rows("per_layer_token_embd.weight")
    if not sizes or rows is None:
        return []
    fitting = [m for m in (128, *(1 << n for n in range(12)), 48) if -(-sum(sizes) // m) * m == rows]
    return [*fitting, rows]


def _head_factor(facts: Facts) -> list[Any]:
    """The factor that a norm of queries has for weights."""
    weights = facts.values("blk.0.attn_q_norm.weight")
    return [] if weights is None else [plain(weights[0])]


def _swiglu_limits(part: str) -> Callable[[Facts], list[Any]]:
    """Limits of each layer, 0 for none."""

    def limits(facts: Facts) -> list[Any]:
        values = facts.key(f"swiglu_clamp_{part}")
        return [None, values] if isinstance(values, list) else []

    return limits


def _per_layer_vocabulary(facts: Facts) -> list[Any]:
    rows = facts.rows("per_layer_token_embd.weight")
    return [] if rows is None else [rows, *_vocabulary(facts)]


DERIVED: dict[str, Callable[[Facts], list[Any]]] = {
    **dict.fromkeys(("vocab_size",), _vocabulary),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), _layers),
    "num_layers": _half_layers,
    "rope_parameters": rope_parameters,
    "partial_rotary_factor": _rotary_part,
    "qk_nope_head_dim": _nope,
    "query_pre_attn_scalar": _scalar_of_scale,
    "scale_depth": _depth_scale,
    "dim_model_base": _logit_base,
    **dict.fromkeys(("mamba_head_dim", "mamba_d_head", "linear_value_head_dim"), _head_width),
    **dict.fromkeys(("expand", "mamba_expand"), _expansion),
    "num_attention_heads_per_layer": _heads_of_layers,
    "compress_rates": _compress_rates,
    "indexer_compress_ratio": lambda f: list(_compressed(f)),
    "num_global_key_value_heads": _global_kv,
    "per_layer_config": _global_layers,
    "alibi_bias_max": _alibi,
    "laurel_rank": _laurel,
    "sliding_window": _window,
    "type_vocab_size": _token_types,
    "num_experts": _experts,
    "num_local_experts": _experts,
    "shared_intermediate_size": _shared_rows,
    "num_attention_heads": _heads_by_window(False),
    "num_sliding_attention_heads": _heads_by_window(True),
    "activation_sparsity_pattern": _sparsity,
    "ngram_vocab_size_base": _ngram_base,
    "ple_embed_dim": _ngram_width,
    "make_ngram_vocab_size_divisible_by": _ngram_multiple,
    "qk_scale_factor": _head_factor,
    **dict.fromkeys(("swiglu_limits", "expert_swiglu_limit_list"), _swiglu_limits("exp")),
    **dict.fromkeys(("swiglu_limits_shared", "share_expert_swiglu_limit_list"), _swiglu_limits("shexp")),
    "vocab_size_per_layer_input": _per_layer_vocabulary,
    **LAYER_KINDS,
}
# keys with an object that is answered as the config is -> architectures whose config.json has it
NESTED = {**dict.fromkeys(("attn_config", "ffn_config"), ("dbrx", "mpt")), "linear_attn_config": ("kimi-k3",)}


def candidates(facts: Facts, key: str) -> list[Any]:
    """What the key can be, the likeliest first; none where nothing says it."""
    if key in DERIVED:
        found = DERIVED[key](facts)
        return [*found, None] if key.endswith("types") or key in LAYER_KINDS else found
    found = [value for suffix in NUMBERS.get(key, ()) for value in facts.numbers(suffix)]
    if key == "num_key_value_heads" and facts.key("attention.kv_lora_rank"):
        found = facts.numbers("attention.head_count")  # of a latent's heads; what the file says depends on the layout
    elif key in ("num_key_value_heads", "swa_num_key_value_heads"):
        found = [*_local_kv(facts), *_global_kv(facts), *found]
    if key == "head_dim" and not found and facts.key("attention.head_count") == 0:
        found = _head_width(facts)
    choices = CHOICES.get(key, ())
    merged = [*found, *choices]
    return [value for at, value in enumerate(merged) if not any(_same(value, earlier) for earlier in merged[:at])]


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and a == b)
