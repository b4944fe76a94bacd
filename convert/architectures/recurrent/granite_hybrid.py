"""Granite 4: Mamba-2 and attention, experts with a shared one, or dense."""

from __future__ import annotations

from ...config import Config
from ...expert_transforms import expert_half, expert_rows
from ...model_spec import ModelSpec
from ...tensor_transforms import select_rows
from ..decoder_spec import DecoderSpec, LayerTensor, linear
from ..llama_variants import GRANITE_FACTORS
from .layers import add_key_value_heads, attention_layers
from .state_space import Mamba2

MAMBA2 = {"heads": "mamba_n_heads", "width": "mamba_d_head", "groups": "mamba_n_groups", "size": "mamba_d_state"}
MAMBA2 |= {"kernel": "mamba_d_conv"}
_DEFAULTS = {"mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2}
_CONTEXT = 1 << 20  # what llama.cpp's converter writes where nothing is rotated


def granite_hybrid(config: Config, mla_layout: str) -> ModelSpec:
    """Granite 4, whose name in GGUF is granite or granitemoe where all layers are attention.

    Raises FormatError for settings that cannot be converted.
    """
    config.require("hidden_act", "silu", "this activation")
    config = config.with_defaults(_DEFAULTS)
    types, n_layers = config.get("layer_types"), config.integer("num_hidden_layers")
    types = ["mamba"] * n_layers if types is None else types
    is_hybrid = not isinstance(types, list) or any("attention" not in str(t) or "linear" in str(t) for t in types)
    has_experts = config.integer("num_local_experts", 8, minimum=0) > 0
    plain = "granitemoe" if has_experts else "granite"
    shared_rows = config.integer("shared_intermediate_size", 1024)
    keys = None if has_experts else {"feed_forward_length": "shared_intermediate_size"}
    spec = DecoderSpec("granitehybrid" if is_hybrid else plain, config, keys=keys)
    is_attention = attention_layers(spec, types)
    rotates = config.get("position_embedding_type") == "rope"
    if not is_hybrid and not rotates:
        raise config.error("attention without positions in all layers cannot be converted for this architecture")
    spec.add_float32({name: config.number(key, 1.0, positive=True) for name, key in GRANITE_FACTORS.items()})
    state_space = []
    if is_hybrid:
        add_key_value_heads(spec, is_attention)
        spec.metadata["granitehybrid.rope.scaling.finetuned"] = rotates
        if not rotates:
            spec.add_uint32({"context_length": _CONTEXT})
        config.require("mamba_proj_bias", False, "a model with biases in its state spaces")
        sizes = Mamba2.of(config, MAMBA2, config.integer("mamba_expand") * spec.hidden_size)
        sizes.add_metadata(spec)
        state_space = sizes.tensors(spec, "mamba", conv_bias=config.flag("mamba_conv_bias", True))
    feed_forward = _shared(spec, shared_rows, "_shexp" if has_experts else "")
    if has_experts:
        spec.add_uint32({"expert_shared_feed_forward_length": shared_rows})
        feed_forward += _experts(spec)
    bias = config.flag("attention_bias", False)
    attention = spec.attention(permute=True, bias=bias, output_bias=bias)

    def layer(number: int) -> list[LayerTensor]:
        return [
            spec.norm("attn_norm", "input_layernorm"),
            *(attention if is_attention[number] else state_space),
            spec.norm("ffn_norm", "post_attention_layernorm"),
            *feed_forward,
        ]

    return spec.build(layer)


def _shared(spec: DecoderSpec, rows: int, suffix: str) -> list[LayerTensor]:
    """The block that every token goes through; the rows of its gate and up are in one matrix."""
    joined, source = (2 * rows, spec.hidden_size), "shared_mlp.input_linear.weight"
    return [
        LayerTensor(f"ffn_gate{suffix}.weight", source, joined, select_rows(0, rows)),
        LayerTensor(f"ffn_up{suffix}.weight", source, joined, select_rows(rows, rows)),
        *linear(f"ffn_down{suffix}", "shared_mlp.output_linear", (spec.hidden_size, rows)),
    ]


def _experts(spec: DecoderSpec) -> list[LayerTensor]:
    n, rows, size = spec.add_expert_counts("num_local_experts", layers=0), spec.intermediate_size, spec.hidden_size
    source = "block_sparse_moe"
    return [
        LayerTensor("ffn_gate_inp.weight", f"{source}.router.layer.weight", (n, size)),
        LayerTensor("ffn_gate_exps.weight", f"{source}.input_linear.weight", (n, 2 * rows, size), expert_half(0)),
        LayerTensor("ffn_up_exps.weight", f"{source}.input_linear.weight", (n, 2 * rows, size), expert_half(1)),
        LayerTensor("ffn_down_exps.weight", f"{source}.output_linear.weight", (n, size, rows), expert_rows()),
    ]
