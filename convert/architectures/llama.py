"""Llama 2 and 3 and models with the same layers (TinyLlama, InternLM 3, ...), Mistral, Ministral, Mixtral, Baichuan."""

from __future__ import annotations

import numpy as np

from ...formats import SourceTensor
from ..config import Config
from ..model_spec import ModelSpec
from ..quantization.stored_weights import StoredWeight
from ..tensor_transforms import Changed, as_divided, interleave_halves, select_rows, unchanged
from .decoder_spec import DecoderSpec, LayerTensor, linear

MIXTRAL_EXPERTS = {"gate": "block_sparse_moe.experts.{}.w1", "up": "block_sparse_moe.experts.{}.w3"}
MIXTRAL_EXPERTS |= {"down": "block_sparse_moe.experts.{}.w2"}

BAICHUAN2_VOCABULARY = 125696

MINISTRAL3_ROPE = {"type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384}
MINISTRAL3_ROPE |= {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
MINISTRAL3_DEFAULTS = {"head_dim": 128, "rope_parameters": MINISTRAL3_ROPE}


def llama(config: Config, mla_layout: str) -> ModelSpec:
    """Llama. Raises FormatError for settings that cannot be converted."""
    bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    spec = _spec(config)
    attention = spec.attention(permute=True, bias=bias, output_bias=bias)
    return spec.build(_layer(spec, attention, spec.gated_mlp(bias=mlp_bias)))


def internlm3(config: Config, mla_layout: str) -> ModelSpec:
    """As `llama`; the published files have other keys for biases."""
    return llama(config.with_defaults({"attention_bias": config.get("qkv_bias"), "mlp_bias": config.get("bias")}), mla_layout)


def mistral(config: Config, mla_layout: str) -> ModelSpec:
    """Mistral and Ministral: as `llama`; the attention of every layer, or of those that layer_types names, is limited to
    `sliding_window` tokens, if that is set."""
    spec = _spec(config)
    _add_window(spec)
    return spec.build(_layer(spec, spec.attention(permute=True), spec.gated_mlp()))


def ministral3(config: Config, mla_layout: str) -> ModelSpec:
    """Ministral 3: as `mistral`; the scores of queries grow with their position (llama_4_scaling_beta)."""
    config.require("hidden_act", "silu", "this activation")
    config = config.with_defaults(MINISTRAL3_DEFAULTS)
    spec = DecoderSpec("mistral3", config)
    settings = spec.rope.settings
    beta = settings.number("llama_4_scaling_beta", 0.0)
    if beta:
        spec.add_float32({"attention.temperature_scale": beta})
        spec.add_uint32({"rope.scaling.original_context_length": settings.integer("original_max_position_embeddings")})
    if spec.rope.scaling == "yarn" and settings.number("mscale_all_dim", 0.0):
        # Other than DeepSeek's, this architecture's multiplier is mscale_all_dim itself.
        spec.add_float32({"rope.scaling.yarn_log_multiplier": settings.number("mscale_all_dim")})
    _add_window(spec)
    return spec.build(_layer(spec, spec.attention(permute=True), spec.gated_mlp()))


def baichuan(config: Config, mla_layout: str) -> ModelSpec:
    """Baichuan 1 and 2: queries, keys and values in one matrix; 13B has linear biases instead of a rotary embedding. Baichuan 2
    divides the rows of its output by their lengths."""
    config.require("hidden_act", "silu", "this activation")
    config = config.with_defaults({"max_position_embeddings": config.integer("model_max_length", 4096)})
    spec = DecoderSpec("baichuan", config)
    size = spec.hidden_size

    def halves(rows: np.ndarray) -> np.ndarray:
        return interleave_halves(rows, spec.head_dim)

    layer = [spec.norm("attn_norm", "input_layernorm")]
    for number, (part, order) in enumerate((("q", halves), ("k", halves), ("v", None))):
        rows = select_rows(number * size, size, order)
        layer += linear(f"attn_{part}", "self_attn.W_pack", (3 * size, size), transform=rows)
    layer += linear("attn_output", "self_attn.o_proj", (size, size))
    layer += [spec.norm("ffn_norm", "post_attention_layernorm"), *spec.gated_mlp()]
    return spec.build(
        layer,
        head_transform=Changed(_unit_rows, unchanged, as_divided) if spec.vocab_size == BAICHUAN2_VOCABULARY else unchanged,
    )


def mixtral(config: Config, mla_layout: str) -> ModelSpec:
    """As `mistral`, with experts in every layer."""
    spec = _spec(config)
    _add_window(spec)
    n = spec.add_expert_counts("num_local_experts")
    experts = spec.experts(n, spec.intermediate_size, MIXTRAL_EXPERTS, "block_sparse_moe.gate")
    return spec.build(_layer(spec, spec.attention(permute=True), experts))


def _spec(config: Config) -> DecoderSpec:
    config.require("hidden_act", "silu", "this activation")
    return DecoderSpec("llama", config)


def _layer(spec: DecoderSpec, attention: list[LayerTensor], feed_forward: list[LayerTensor]) -> list[LayerTensor]:
    return [
        spec.norm("attn_norm", "input_layernorm"),
        *attention,
        spec.norm("ffn_norm", "post_attention_layernorm"),
        *feed_forward,
    ]


def _add_window(spec: DecoderSpec) -> None:
    size = spec.config.get("sliding_window")
    if size is not None:
        is_local = spec.local_layers(lambda i: True)
        spec.add_sliding_window(is_local)
        if any(is_local) and size < spec.config.integer("max_position_embeddings"):
            spec.notes.append(f"llama.cpp does not know of the sliding window of {size} tokens in this architecture")


def _unit_rows(name: str, weights: list[StoredWeight]) -> SourceTensor:
    """A matrix whose rows are divided by their lengths."""
    weight = weights[0]

    def read(start: int, stop: int) -> np.ndarray:
        rows = weight.read(slice(start, stop))
        return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.float32(1e-12))

    return SourceTensor(name, (weight.columns, weight.rows), weight.source_type, read)
