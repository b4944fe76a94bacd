"""gpt-oss: attention sinks, every other layer local, biases everywhere, experts in mxfp4 (or, re-trained, in bf16).

Experts are stacked and fused in the checkpoint. In mxfp4, gate_up_proj_blocks and _scales are [experts, rows of gate and up in
turns, blocks of 32 columns, ...]; in other types gate_up_proj is [experts, columns, rows of gate and up in turns].
"""

from __future__ import annotations

from ..checkpoint import Description
from ..config import Config
from ..tensor_transforms import Edit, every, stack_columns, stack_rows
from .decoder_spec import Outline, Part, linear

ARCHITECTURE = "gpt-oss"
BLOCK = 32  # numbers in a block of mxfp4
DEFAULTS = {"head_dim": 64, "attention_bias": True, "sliding_window": 128, "rope_theta": 150000.0}


def gpt_oss(config: Config, mla_layout: str) -> Description:
    """Hyper-parameters and tensors. Raises FormatError for what config.json says that cannot be converted."""
    config = config.over(DEFAULTS)
    for key, supported, what in (
        ("hidden_act", "silu", "this activation"),
        ("swiglu_alpha", 1.702, "this steepness of the activation"),
        ("swiglu_limit", 7.0, "this limit of the activation"),
    ):
        config.expect(key, supported, what)
    outline = Outline(ARCHITECTURE, config)
    experts = outline.expert_counts("num_local_experts", outline.inner, layers=0)
    outline.window(outline.layer_types(lambda i: i % 2 == 0), period=2)
    if outline.rope.kind == "yarn" and outline.rope.settings.flag("truncate", True):
        # The published models do not round the ends of yarn's ramp, and say so; readers take for granted what they do.
        outline.metadata[f"{ARCHITECTURE}.rope.scaling.yarn_truncate"] = True
    bias = config.flag("attention_bias")
    layer = [
        outline.norm("attn_norm", "input_layernorm"),
        *outline.attention(bias=bias, output_bias=bias),
        Part("attn_sinks.weight", "self_attn.sinks", (outline.heads,)),
        outline.norm("post_attention_norm", "post_attention_layernorm"),
        *linear("ffn_gate_inp", "mlp.router", (experts, outline.hidden), bias=True),
        *_experts(outline, experts),
    ]
    return outline.describe(layer)


def _experts(outline: Outline, n: int) -> list[Part]:
    settings = outline.config.get("quantization_config")
    is_packed = isinstance(settings, dict) and settings.get("quant_method") == "mxfp4"
    hidden, inner = outline.hidden, outline.inner
    if is_packed and (hidden % BLOCK or inner % BLOCK):
        raise outline.config.fail(f"mxfp4 experts of {hidden} x {inner} cannot be: blocks have {BLOCK} columns")
    parts = []
    # name in the GGUF, in the checkpoint, first row and step, rows there, columns
    for name, source, first, step, rows, columns in (
        ("gate", "gate_up_proj", 0, 2, 2 * inner, hidden),
        ("up", "gate_up_proj", 1, 2, 2 * inner, hidden),
        ("down", "down_proj", 0, 1, hidden, inner),
    ):
        shape: tuple[int, ...] = (n, columns, rows)
        edit: Edit = stack_columns(first, step)
        ending = ""
        if is_packed:
            shape, edit, ending = (n, rows, columns // BLOCK, BLOCK // 2), stack_rows(first, step), "_blocks"
        parts += [
            Part(f"ffn_{name}_exps.weight", f"mlp.experts.{source}{ending}", shape, edit),
            Part(f"ffn_{name}_exps.bias", f"mlp.experts.{source}_bias", (n, rows), every(first, step)),
        ]
    return parts
