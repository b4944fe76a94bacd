"""gpt-oss: attention sinks, every other layer local, biases everywhere, experts in MXFP4 (or, fine-tuned, in bf16).

Experts are stacked and fused in the checkpoint. In MXFP4, gate_up_proj_blocks and _scales are [experts, interleaved rows of
gate and up, blocks of 32 columns, ...]; in other types gate_up_proj is [experts, columns, interleaved rows of gate and up].
"""

from __future__ import annotations

from ...config import Config
from ...expert_transforms import expert_rows, transposed_expert_rows
from ...model_spec import ModelSpec
from ...tensor_transforms import Transform, select_columns
from ..decoder_spec import DecoderSpec, LayerTensor, linear

ARCHITECTURE = "gpt-oss"
MXFP4_BLOCK = 32  # elements
SWISH_LIMIT = 7.0  # of the activation in all published models
DEFAULTS = {"head_dim": 64, "attention_bias": True, "sliding_window": 128, "rope_theta": 150000.0}


def gpt_oss(config: Config, mla_layout: str) -> ModelSpec:
    """gpt-oss 20 B and 120 B. Raises FormatError for settings that cannot be converted."""
    config = config.with_defaults(DEFAULTS)
    for key, supported, what in (
        ("hidden_act", "silu", "this activation"),
        ("swiglu_alpha", 1.702, "this steepness of the activation"),
    ):
        config.require(key, supported, what)
    spec = DecoderSpec(ARCHITECTURE, config)
    experts = spec.add_expert_counts("num_local_experts", spec.intermediate_size, layers=0)
    spec.add_sliding_window(spec.local_layers(lambda i: i % 2 == 0), default_period=2)
    if spec.rope.scaling == "yarn" and spec.rope.settings.flag("truncate", True):
        # The published models do not round the ends of yarn's ramp, and say so; readers assume that.
        spec.metadata[f"{ARCHITECTURE}.rope.scaling.yarn_truncate"] = True
    add_swish_limit(spec)
    bias = config.flag("attention_bias")
    layer = [
        spec.norm("attn_norm", "input_layernorm"),
        *spec.attention(bias=bias, output_bias=bias),
        LayerTensor("attn_sinks.weight", "self_attn.sinks", (spec.n_heads,)),
        spec.norm("post_attention_norm", "post_attention_layernorm"),
        *linear("ffn_gate_inp", "mlp.router", (experts, spec.hidden_size), bias=True),
        *_experts(spec, experts),
    ]
    return spec.build(layer, needs_output=True)


def add_swish_limit(spec: DecoderSpec) -> None:
    """Adds the limit of the clamped activation, where it is not what readers assume."""
    limit = spec.config.number("swiglu_limit", SWISH_LIMIT, positive=True)
    if limit != SWISH_LIMIT:
        spec.add_float32({"swiglu_clamp_exp": limit, "swiglu_clamp_shexp": limit})
        spec.notes.append(f"llama.cpp and ik_llama.cpp take the activation's limit to be {SWISH_LIMIT:g}, not {limit:g}")


def _experts(spec: DecoderSpec, n: int) -> list[LayerTensor]:
    settings = spec.config.get("quantization_config")
    is_mxfp4 = isinstance(settings, dict) and settings.get("quant_method") == "mxfp4"
    hidden_size, inner = spec.hidden_size, spec.intermediate_size
    if is_mxfp4 and (hidden_size % MXFP4_BLOCK or inner % MXFP4_BLOCK):
        raise spec.config.error(f"mxfp4 experts of {hidden_size} x {inner} cannot be: blocks have {MXFP4_BLOCK} columns")
    tensors = []
    # name in the GGUF, in the checkpoint, first row and step, rows and columns in the checkpoint
    for name, source, first, step, rows, columns in (
        ("gate", "gate_up_proj", 0, 2, 2 * inner, hidden_size),
        ("up", "gate_up_proj", 1, 2, 2 * inner, hidden_size),
        ("down", "down_proj", 0, 1, hidden_size, inner),
    ):
        shape: tuple[int, ...] = (n, columns, rows)
        transform: Transform = transposed_expert_rows(first, step)
        suffix = ""
        if is_mxfp4:
            shape = (n, rows, columns // MXFP4_BLOCK, MXFP4_BLOCK // 2)
            transform, suffix = expert_rows(first, step), "_blocks"
        tensors += [
            LayerTensor(f"ffn_{name}_exps.weight", f"mlp.experts.{source}{suffix}", shape, transform),
            LayerTensor(f"ffn_{name}_exps.bias", f"mlp.experts.{source}_bias", (n, rows), select_columns(first, step)),
        ]
    return tensors
