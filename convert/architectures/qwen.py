"""Qwen 2 and 2.5, Qwen 3, and their mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable

from ..checkpoint import Description
from ..config import Config
from ..tensor_transforms import flattened, plain
from .decoder_spec import Outline, Part

EXPERTS = {part: f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")}
NOTHING: list[int] = []


def qwen2(config: Config, mla_layout: str) -> Description:
    """Biases on q, k and v. Raises FormatError for what config.json says that cannot be converted."""
    outline = _outline("qwen2", config)
    _window(outline, lambda i: i >= config.integer("max_window_layers", 28, least=0))
    return outline.describe(_layer(outline, outline.attention(bias=True), outline.gated()))


def qwen3(config: Config, mla_layout: str) -> Description:
    """Every head's queries and keys are normalised. Raises FormatError for what cannot be converted."""
    outline = _outline("qwen3", config)
    _window(outline, lambda i: i >= config.integer("max_window_layers", 28, least=0))
    bias = config.flag("attention_bias", False)
    attention = outline.attention(bias=bias, output_bias=bias, head_norms=plain)
    return outline.describe(_layer(outline, attention, outline.gated()))


def qwen2moe(config: Config, mla_layout: str) -> Description:
    """As `qwen2`, with experts and a shared one behind a gate of its own (Qwen 1.5 MoE and 2 57B-A14B)."""
    _experts_everywhere(config)
    outline = _outline("qwen2moe", config)
    if config.flag("use_sliding_window", False):
        raise config.fail("use_sliding_window is true: windows in this architecture cannot be converted")
    inner, shared = config.integer("moe_intermediate_size"), config.integer("shared_expert_intermediate_size")
    n = outline.expert_counts("num_experts", inner)
    outline.count({"expert_shared_feed_forward_length": shared})
    outline.metadata["qwen2moe.expert_weights_norm"] = config.flag("norm_topk_prob", False)
    feed_forward = [
        *outline.routed(n, inner, EXPERTS),
        Part("ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight", (1, outline.hidden), flattened),
        *outline.gated("mlp.shared_expert", shared, "_shexp"),
    ]
    return outline.describe(_layer(outline, outline.attention(bias=config.flag("qkv_bias", True)), feed_forward))


def qwen3moe(config: Config, mla_layout: str) -> Description:
    """As `qwen3`, with experts and no shared one."""
    config = config.over({"num_experts": config.get("num_local_experts")})  # the name that newer files have
    _experts_everywhere(config)
    outline = _outline("qwen3moe", config)
    _window(outline, lambda i: True)
    inner = config.integer("moe_intermediate_size")
    n = outline.expert_counts("num_experts", inner)
    outline.metadata["qwen3moe.expert_weights_norm"] = config.flag("norm_topk_prob", False)
    bias = config.flag("attention_bias", False)
    attention = outline.attention(bias=bias, output_bias=bias, head_norms=plain)
    return outline.describe(_layer(outline, attention, outline.routed(n, inner, EXPERTS)))


def _outline(architecture: str, config: Config) -> Outline:
    config.expect("hidden_act", "silu", "this activation")
    return Outline(architecture, config)


def _layer(outline: Outline, attention: list[Part], feed_forward: list[Part]) -> list[Part]:
    return [
        outline.norm("attn_norm", "input_layernorm"),
        *attention,
        outline.norm("ffn_norm", "post_attention_layernorm"),
        *feed_forward,
    ]


def _experts_everywhere(config: Config) -> None:
    config.expect("decoder_sparse_step", 1, "experts in only some of the layers")
    config.expect("mlp_only_layers", NOTHING, "experts in only some of the layers")


def _window(outline: Outline, default: Callable[[int], bool]) -> None:
    if outline.config.flag("use_sliding_window", False):
        outline.window(outline.layer_types(default))
        outline.notes.append("llama.cpp does not know of the sliding window in this architecture")
