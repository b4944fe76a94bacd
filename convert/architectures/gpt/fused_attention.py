"""Decoders whose attention has one matrix for queries, keys and values: GPT-NeoX and Pythia, Falcon, BLOOM, MPT.

All functions raise FormatError for settings that cannot be converted.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...config import Config
from ...model_spec import ModelSpec, TensorSpec
from ...tensor_transforms import Transform, select_rows
from ..decoder_spec import CheckpointNames, DecoderSpec, LayerTensor, linear

EPSILON = "attention.layer_norm_epsilon"
GELUS = {"gelu": "gelu_erf", "gelu_new": "gelu", "gelu_fast": "gelu", "gelu_pytorch_tanh": "gelu"}  # config.json -> runtime
NEOX_NAMES = CheckpointNames(
    "gpt_neox.layers.{}", "gpt_neox.embed_in.weight", "gpt_neox.final_layer_norm.weight", "embed_out.weight"
)
FALCON_NAMES = CheckpointNames("transformer.h.{}", "transformer.word_embeddings.weight", "transformer.ln_f.weight")
MPT_NAMES = CheckpointNames("transformer.blocks.{}", "transformer.wte.weight", "transformer.norm_f.weight")
BLOOM_NAMES = CheckpointNames("h.{}", "word_embeddings.weight", "ln_f.weight", "word_embeddings.weight")


def gptneox(config: Config, mla_layout: str) -> ModelSpec:
    """GPT-NeoX-20B, Pythia: attention and feed-forward block in parallel, each after a norm of its own."""
    config = config.with_defaults({"layer_norm_eps": 1e-5, "rope_theta": config.number("rotary_emb_base", 10000.0)})
    config.require("attention_bias", True, "attention without biases")
    rope = config.with_defaults({"partial_rotary_factor": config.number("rotary_pct", 0.25)})
    spec = DecoderSpec("gptneox", _every_head_has_keys(config), norm=(EPSILON, "layer_norm_eps"), rope=rope)
    spec.metadata["gptneox.use_parallel_residual"] = config.flag("use_parallel_residual", True)
    activation = config.get("hidden_act", "gelu")
    if activation not in GELUS:
        raise config.error(f"hidden_act is {activation!r}: this activation cannot be converted; {', '.join(GELUS)} can")
    if GELUS[activation] != "gelu_erf":
        spec.metadata["gptneox.hidden_activation"] = GELUS[activation]
    layer = [
        *spec.layer_norm("attn_norm", "input_layernorm"),
        *_attention(spec, "attention", bias=True),
        *spec.layer_norm("ffn_norm", "post_attention_layernorm"),
        *_feed_forward(spec, bias=True),
    ]
    return spec.build(layer, NEOX_NAMES, norm_bias=True)


def falcon(config: Config, mla_layout: str) -> ModelSpec:
    """Falcon 7B, 11B, 40B, 180B: attention and feed-forward block in parallel, after one norm or each after its own."""
    config = _renamed(config, num_attention_heads="n_head", num_hidden_layers="n_layer", num_kv_heads="n_head_kv")
    config = config.with_defaults({"layer_norm_epsilon": 1e-5, "max_position_embeddings": 2048})
    config = config.with_defaults({"ffn_hidden_size": 4 * config.integer("hidden_size")})
    config.require("alibi", False, "attention with linear biases in this architecture")
    config.require("bias", False, "biases in this architecture")
    config.require("activation", "gelu", "this activation")
    is_new = config.flag("new_decoder_architecture", False)
    if not is_new:
        config.require("parallel_attn", True, "a feed-forward block after the attention in this architecture")
    heads = config.integer("num_attention_heads")
    own_keys = is_new or not config.flag("multi_query", True)
    config = config.with_values({"num_key_value_heads": config.integer("num_kv_heads", heads) if own_keys else 1})
    spec = DecoderSpec("falcon", config, norm=(EPSILON, "layer_norm_epsilon"), keys={"feed_forward_length": "ffn_hidden_size"})
    has_two = is_new and config.integer("num_ln_in_parallel_attn", 2) == 2
    norms = {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"} if has_two else {"attn_norm": "input_layernorm"}
    layer = [tensor for name, source in norms.items() for tensor in spec.layer_norm(name, source)]
    layer += [*_attention(spec, "self_attention", bias=False), *_feed_forward(spec, bias=False)]
    return spec.build(layer, FALCON_NAMES, norm_bias=True, tied=True)


def bloom(config: Config, mla_layout: str) -> ModelSpec:
    """BLOOM: linear biases instead of positions, a norm of the embeddings."""
    config = _renamed(config, hidden_size="n_embed", num_attention_heads="n_head", num_hidden_layers="n_layer")
    config = config.with_defaults({"layer_norm_epsilon": 1e-5, "max_position_embeddings": config.get("seq_length", 2048)})
    config.require("apply_residual_connection_post_layernorm", False, "residuals of normalised inputs")
    config = config.with_values({"intermediate_size": 4 * config.integer("hidden_size"), "tie_word_embeddings": False})
    spec = DecoderSpec("bloom", _every_head_has_keys(config), norm=(EPSILON, "layer_norm_epsilon"))
    layer = [
        *spec.layer_norm("attn_norm", "input_layernorm"),
        *_attention(spec, "self_attention", bias=True),
        *spec.layer_norm("ffn_norm", "post_attention_layernorm"),
        *_feed_forward(spec, bias=True),
    ]
    spec.renamed_prefixes["transformer."] = ""
    spec.skipped_prefixes["lm_head."] = "output tied to the embeddings"
    model = spec.build(layer, BLOOM_NAMES, norm_bias=True)
    norm = [
        TensorSpec(f"token_embd_norm.{part}", (f"word_embeddings_layernorm.{part}",), (spec.hidden_size,))
        for part in ("weight", "bias")
    ]
    return replace(model, tensors=[*model.tensors, *norm])


def mpt(config: Config, mla_layout: str) -> ModelSpec:
    """MPT: linear biases instead of positions, norms without bias; queries, keys and values may be limited (clip_qkv)."""
    config = _renamed(
        config,
        hidden_size="d_model",
        num_attention_heads="n_heads",
        num_hidden_layers="n_layers",
        max_position_embeddings="max_seq_len",
    )
    config = config.with_defaults({"layer_norm_epsilon": 1e-5})
    config.require("no_bias", True, "biases in this architecture")
    config.require("expansion_ratio", 4, "this width of the feed-forward block")
    config.require("logit_scale", None, "a factor of the logits")
    attention = config.section("attn_config") if config.get("attn_config") else config.part({})
    for key, value, what in (
        ("alibi", True, "attention without linear biases"),
        ("attn_type", "multihead_attention", "this attention"),
        ("qk_ln", False, "a norm of queries and keys"),
        ("prefix_lm", False, "attention to later tokens of a prefix"),
        ("softmax_scale", None, "this factor of the scores"),
    ):
        attention.require(key, value, what)
    config = config.with_values({"intermediate_size": 4 * config.integer("hidden_size")})
    spec = DecoderSpec("mpt", _every_head_has_keys(config), norm=(EPSILON, "layer_norm_epsilon"))
    spec.add_float32({"attention.max_alibi_bias": attention.number("alibi_bias_max", 8.0, positive=True)})
    if attention.get("clip_qkv") is not None:
        spec.add_float32({"attention.clamp_kqv": attention.number("clip_qkv", positive=True)})
    size = spec.hidden_size
    layer = [
        spec.norm("attn_norm", "norm_1"),
        *linear("attn_qkv", "attn.Wqkv", (3 * size, size)),
        *linear("attn_output", "attn.out_proj", (size, size)),
        spec.norm("ffn_norm", "norm_2"),
        *linear("ffn_up", "ffn.up_proj", (4 * size, size)),
        *linear("ffn_down", "ffn.down_proj", (size, 4 * size)),
    ]
    return spec.build(layer, MPT_NAMES, tied=True)


def _renamed(config: Config, **names: str) -> Config:
    """The config with keys under their usual names, where it has them under older ones."""
    return config.with_defaults({key: config.get(old) for key, old in names.items() if config.get(old) is not None})


def _every_head_has_keys(config: Config) -> Config:
    return config.with_values({"num_key_value_heads": config.integer("num_attention_heads")})


def _attention(spec: DecoderSpec, source: str, *, bias: bool) -> list[LayerTensor]:
    """attn_qkv and attn_output from SOURCE.query_key_value and SOURCE.dense."""
    rows = (spec.n_heads + 2 * spec.n_kv_heads) * spec.head_dim
    by_part = _parts_of_groups(spec.n_heads, spec.n_kv_heads, spec.head_dim)
    return [
        *linear("attn_qkv", f"{source}.query_key_value", (rows, spec.hidden_size), bias=bias, transform=by_part),
        *linear("attn_output", f"{source}.dense", (spec.hidden_size, spec.hidden_size), bias=bias),
    ]


def _feed_forward(spec: DecoderSpec, *, bias: bool) -> list[LayerTensor]:
    rows, size = spec.intermediate_size, spec.hidden_size
    up, down = (rows, size), (size, rows)
    return [
        *linear("ffn_up", "mlp.dense_h_to_4h", up, bias=bias),
        *linear("ffn_down", "mlp.dense_4h_to_h", down, bias=bias),
    ]


def _parts_of_groups(n_heads: int, n_kv_heads: int, head_dim: int) -> Transform:
    """Rows in groups, one for each key head (its queries, the key, the value), as all queries, all keys, all values."""
    group = n_heads // n_kv_heads

    def order(rows: np.ndarray) -> np.ndarray:
        head, element = np.divmod(rows, head_dim)
        other = head - n_heads  # keys, then values
        queries = head // group * (group + 2) + head % group
        others = other % n_kv_heads * (group + 2) + group + other // n_kv_heads
        return np.where(other < 0, queries, others) * head_dim + element

    return select_rows(0, (n_heads + 2 * n_kv_heads) * head_dim, order)
