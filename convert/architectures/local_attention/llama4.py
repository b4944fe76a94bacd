"""Llama 4: local layers attend within chunks and are rotated, global ones are not; experts and a shared one."""

from __future__ import annotations

import numpy as np

from ...config import Config
from ...expert_transforms import stack_experts, transposed_expert_half, transposed_expert_rows
from ...model_spec import ModelSpec
from ..decoder_spec import SIGMOID_GATING, DecoderSpec, LayerTensor

PERIOD = 4  # every fourth layer is global; llama.cpp assumes that
CHUNK, TEMPERATURE = 8192, 0.1  # llama.cpp knows no others
EXPERTS_WITHOUT_HEAD_NORMS = 128  # of Maverick, from which readers know whether queries and keys are normalised
DEFAULTS = {
    "head_dim": 128,
    "rope_theta": 500000.0,
    "intermediate_size_mlp": 16384,
    "attention_chunk_size": CHUNK,
    "floor_scale": CHUNK,
    "attn_scale": TEMPERATURE,
}


def llama4(config: Config, mla_layout: str) -> ModelSpec:
    """Raises FormatError for settings that cannot be converted."""
    config = config.with_defaults(DEFAULTS)
    config.require("hidden_act", "silu", "this activation")
    spec = DecoderSpec("llama4", config, keys={"feed_forward_length": "intermediate_size_mlp"})
    rotates = [int((i + 1) % PERIOD != 0) for i in range(spec.n_layers)]
    if config.get("no_rope_layers"):
        config.require("no_rope_layers", rotates, "rotation in other layers than three of four")
    else:
        config.require("no_rope_layer_interval", PERIOD, "rotation in other layers than three of four")
    kinds = ["chunked_attention" if each else "full_attention" for each in rotates]
    config.require("layer_types", kinds, "chunks in other layers than those that are rotated")
    rows, step = config.integer("intermediate_size"), config.integer("interleave_moe_layer_step", 1)
    with_experts = list(range(step - 1, spec.n_layers, step))
    config.require("moe_layers", with_experts, "experts in other layers than every interleave_moe_layer_step-th")
    n = spec.add_expert_counts("num_local_experts", rows, layers=0)
    config.require("use_qk_norm", n != EXPERTS_WITHOUT_HEAD_NORMS, f"this normalisation of heads with {n} experts")
    spec.add_uint32({"interleave_moe_layer_step": step, "expert_gating_func": SIGMOID_GATING, "expert_shared_count": 1})
    chunk, floor = config.integer("attention_chunk_size"), config.integer("floor_scale")
    scale = config.number("attn_scale") if config.flag("attn_temperature_tuning", True) else 0.0
    if (chunk, floor, np.float32(scale)) != (CHUNK, CHUNK, np.float32(TEMPERATURE)):
        spec.add_uint32({"attention.sliding_window": chunk, "attention.temperature_length": floor})
        spec.add_float32({"attention.temperature_scale": scale})
        spec.notes.append(
            f"llama.cpp knows only of chunks of {CHUNK} tokens and of attn_scale {TEMPERATURE} in this architecture"
        )
    bias = config.flag("attention_bias", False)
    attention = [
        spec.norm("attn_norm", "input_layernorm"),
        *spec.attention(bias=bias, output_bias=bias),
        spec.norm("ffn_norm", "post_attention_layernorm"),
    ]
    dense = spec.gated_mlp("feed_forward", spec.intermediate_size)
    routed = [
        LayerTensor("ffn_gate_inp.weight", "feed_forward.router.weight", (n, spec.hidden_size)),
        *_experts(n, rows, spec.hidden_size),
        *spec.gated_mlp("feed_forward.shared_expert", rows, "_shexp"),
    ]
    return spec.build(lambda i: [*attention, *(routed if i in with_experts else dense)])


def _experts(n: int, rows: int, hidden_size: int) -> list[LayerTensor]:
    """The stacks, whose matrices the checkpoint has transposed; quantised ones have experts one by one."""
    tensors = []
    for part, source, shape, transform in (
        ("gate", "gate_up_proj", (n, hidden_size, 2 * rows), transposed_expert_half(0)),
        ("up", "gate_up_proj", (n, hidden_size, 2 * rows), transposed_expert_half(1)),
        ("down", "down_proj", (n, rows, hidden_size), transposed_expert_rows()),
    ):
        one = (hidden_size, rows) if part == "down" else (rows, hidden_size)
        name = f"ffn_{part}_exps.weight"
        single = LayerTensor(name, f"feed_forward.experts.{{}}.{part}_proj.weight", one, stack_experts, n)
        tensors.append(LayerTensor(name, f"feed_forward.experts.{source}", shape, transform, alternative=single))
    return tensors
