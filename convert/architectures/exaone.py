"""EXAONE 3 and 3.5, a Llama under other names; EXAONE 4, with norms behind the blocks and local layers between global ones."""

from __future__ import annotations

from ..checkpoint import Description
from ..config import Config
from ..tensor_transforms import plain
from .decoder_spec import Names, Outline, linear

NAMES = Names("transformer.h.{}", "transformer.wte.weight", "transformer.ln_f.weight")
ATTENTION = {p: f"attn.attention.{p}_proj" for p in "qkv"} | {"output": "attn.attention.out_proj"}
FEED_FORWARD = {"gate": "mlp.c_fc_0", "up": "mlp.c_fc_1", "down": "mlp.c_proj"}
# name that other models have -> EXAONE 3's in config.json
SPELT = {"num_hidden_layers": "num_layers", "rms_norm_eps": "layer_norm_epsilon", "hidden_act": "activation_function"}


def exaone(config: Config, mla_layout: str) -> Description:
    """EXAONE 3 and 3.5. Raises FormatError for what config.json says that cannot be converted."""
    config = config.over({name: config.get(own) for name, own in SPELT.items()})
    config.expect("hidden_act", "silu", "this activation")
    outline = Outline("exaone", config)
    shapes = {"gate": (outline.inner, outline.hidden), "up": (outline.inner, outline.hidden)}
    shapes["down"] = (outline.hidden, outline.inner)
    layer = [
        outline.norm("attn_norm", "ln_1"),
        *outline.attention(ATTENTION),
        outline.norm("ffn_norm", "ln_2"),
        *(part for p, shape in shapes.items() for part in linear(f"ffn_{p}", FEED_FORWARD[p], shape)),
    ]
    return outline.describe(layer, NAMES)


def exaone4(config: Config, mla_layout: str) -> Description:
    """EXAONE 4: where there are local layers, only these are rotated. Raises FormatError for what cannot be converted."""
    config.expect("hidden_act", "silu", "this activation")
    outline = Outline("exaone4", config)
    pattern = config.get("sliding_window_pattern", 4)
    if isinstance(pattern, str) and pattern and set(pattern) <= set("LG"):
        whole = pattern
        outline_types = outline.layer_types(lambda i: whole[i % len(whole)] == "L" and i < outline.layers - 1)
    else:
        period = config.integer("sliding_window_pattern", 4, least=0)
        outline_types = outline.layer_types(lambda i: period > 0 and (i + 1) % period != 0)
    if config.get("sliding_window") is not None:
        outline.window(outline_types, period=4)
    layer = [
        *outline.attention(head_norms=plain),
        outline.norm("post_attention_norm", "post_attention_layernorm"),
        *outline.gated(),
        outline.norm("post_ffw_norm", "post_feedforward_layernorm"),
    ]
    return outline.describe(layer)
