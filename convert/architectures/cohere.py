"""Command-R and Command-R7B (Cohere 2): attention and feed-forward block side by side behind one LayerNorm, scaled logits."""

from __future__ import annotations

from ..checkpoint import Description
from ..config import Config
from .decoder_spec import Outline, Part

LAYER_NORM = ("attention.layer_norm_epsilon", "layer_norm_eps")
DEFAULTS = {"layer_norm_eps": 1e-5, "logit_scale": 0.0625}


def command_r(config: Config, mla_layout: str) -> Description:
    """Command-R and R+ (whose heads are normalised). Raises FormatError for what cannot be converted."""
    outline = _outline("command-r", config)
    norms = []
    if config.flag("use_qk_norm", False):
        heads = {"q": outline.heads, "k": outline.heads_kv}
        norms = [Part(f"attn_{p}_norm.weight", f"self_attn.{p}_norm.weight", (n, outline.head)) for p, n in heads.items()]
    return outline.describe(_layer(outline, norms), tied=True)


def cohere2(config: Config, mla_layout: str) -> Description:
    """Local layers are rotated, every fourth sees everything and has no positions. Raises FormatError."""
    config = config.over({"sliding_window": 4096, "sliding_window_pattern": 4})
    outline = _outline("cohere2", config)
    period = config.integer("sliding_window_pattern")
    outline.window(outline.layer_types(lambda i: (i + 1) % period != 0), period=4)
    return outline.describe(_layer(outline, []), tied=True)


def _outline(architecture: str, config: Config) -> Outline:
    config.expect("hidden_act", "silu", "this activation")
    config = config.over(DEFAULTS)
    outline = Outline(architecture, config, norm=LAYER_NORM)
    outline.real({"logit_scale": config.real("logit_scale", positive=True)})
    if outline.rope.kind == "default":
        outline.metadata[f"{architecture}.rope.scaling.type"] = "none"
    return outline


def _layer(outline: Outline, head_norms: list[Part]) -> list[Part]:
    bias = outline.config.flag("attention_bias", False)
    return [
        outline.norm("attn_norm", "input_layernorm"),
        *outline.attention(bias=bias, output_bias=bias),
        *head_norms,
        *outline.gated(),
    ]
