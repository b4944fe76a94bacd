"""LFM2 and LFM2 MoE: short convolutions with two gates, and a few layers of attention."""

from __future__ import annotations

from ...config import Config
from ...model_spec import ModelSpec
from ...tensor_transforms import unchanged
from ..decoder_spec import SIGMOID_GATING, CheckpointNames, DecoderSpec, LayerTensor, expert_stacks, linear
from .layers import add_key_value_heads, attention_layers

ATTENTION = {part: f"self_attn.{part}_proj" for part in "qkv"} | {"output": "self_attn.out_proj"}
FEED_FORWARD = {"gate": "w1", "down": "w2", "up": "w3"}
EXPERTS = {part: f"feed_forward.experts.{{}}.{name}" for part, name in FEED_FORWARD.items()}
NAMES = CheckpointNames(norm="model.embedding_norm.weight")
_RMS_NORM = ("attention.layer_norm_rms_epsilon", "norm_eps")
_DEFAULTS = {"rope_theta": 1e6, "tie_word_embeddings": True}


def lfm2(config: Config, mla_layout: str) -> ModelSpec:
    """LFM2. Raises FormatError for settings that cannot be converted."""
    spec = _spec("lfm2", config)
    rows = _rows(spec.config)
    spec.add_uint32({"feed_forward_length": rows})
    block = _dense(spec, rows)
    return _build(spec, lambda layer: block)


def lfm2moe(config: Config, mla_layout: str) -> ModelSpec:
    """LFM2 MoE: experts by sigmoid plus bias after the first layers."""
    spec = _spec("lfm2moe", config)
    config, dense = spec.config, spec.config.integer("num_dense_layers", 2, minimum=0)
    rows = config.integer("moe_intermediate_size")
    n = spec.add_expert_counts("num_experts", rows, layers=0)
    spec.add_uint32({"leading_dense_block_count": dense, "expert_gating_func": SIGMOID_GATING})
    spec.add_float32({"expert_weights_scale": config.number("routed_scaling_factor", 1.0, positive=True)})
    spec.metadata["lfm2moe.expert_weights_norm"] = config.flag("norm_topk_prob", True)
    if not config.flag("norm_topk_prob", True) or not config.flag("use_expert_bias", True):
        spec.notes.append("llama.cpp reads this architecture with a bias of the router and with weights that sum to one only")
    experts = [
        LayerTensor("ffn_gate_inp.weight", "feed_forward.gate.weight", (n, spec.hidden_size)),
        *expert_stacks(n, rows, spec.hidden_size, EXPERTS),
    ]
    if config.flag("use_expert_bias", True):
        experts.append(LayerTensor("exp_probs_b.bias", "feed_forward.expert_bias", (n,)))
    block = _dense(spec, spec.intermediate_size)
    return _build(spec, lambda layer: block if layer < dense else experts)


def _spec(architecture: str, config: Config) -> DecoderSpec:
    config.require("conv_bias", False, "a model with biases")
    config = config.with_defaults(_DEFAULTS)
    for ours, first in (("intermediate_size", "block_ff_dim"), ("tie_word_embeddings", "tie_embedding")):
        if config.get(first) is not None:
            config = config.with_values({ours: config.get(first)})
    spec = DecoderSpec(architecture, config, norm=_RMS_NORM)
    spec.add_uint32({"shortconv.l_cache": config.integer("conv_L_cache", 3, minimum=2)})
    return spec


def _rows(config: Config) -> int:
    """Rows of gate and up: two thirds of intermediate_size times a factor, up to a multiple, unless this is switched off."""
    rows = config.integer("intermediate_size")
    if not config.flag("block_auto_adjust_ff_dim", True):
        return rows
    rows = int(config.number("block_ffn_dim_multiplier", 1.0, positive=True) * int(2 * rows / 3))
    multiple = config.integer("block_multiple_of", 256)
    return -(-rows // multiple) * multiple


def _dense(spec: DecoderSpec, rows: int) -> list[LayerTensor]:
    shapes = {"gate": (rows, spec.hidden_size), "up": (rows, spec.hidden_size), "down": (spec.hidden_size, rows)}
    return [t for part, shape in shapes.items() for t in linear(f"ffn_{part}", f"feed_forward.{FEED_FORWARD[part]}", shape)]


def _build(spec: DecoderSpec, feed_forward) -> ModelSpec:
    """feed_forward: layer number -> the tensors of its feed-forward block."""
    config, n = spec.config, spec.hidden_size
    listed = config.get("full_attn_idxs")
    chosen = range(spec.n_layers) if listed is None else listed
    types = config.get("layer_types") or ["full_attention" if i in chosen else "conv" for i in range(spec.n_layers)]
    is_attention = attention_layers(spec, types)
    add_key_value_heads(spec, is_attention)
    kernel = config.integer("conv_L_cache", 3)
    convolution = [
        *linear("shortconv.in_proj", "conv.in_proj", (3 * n, n)),
        LayerTensor("shortconv.conv.weight", "conv.conv.weight", (n, 1, kernel)),
        *linear("shortconv.out_proj", "conv.out_proj", (n, n)),
    ]
    attention = spec.attention(ATTENTION)
    attention += [spec.norm(f"attn_{p}_norm", f"self_attn.{p}_layernorm", spec.head_dim, unchanged) for p in "qk"]

    def layer(number: int) -> list[LayerTensor]:
        return [
            spec.norm("attn_norm", "operator_norm"),
            *(attention if is_attention[number] else convolution),
            spec.norm("ffn_norm", "ffn_norm"),
            *feed_forward(number),
        ]

    return spec.build(layer, NAMES, output_norm="token_embd_norm")
