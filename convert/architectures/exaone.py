"""EXAONE 3 and 3.5, a Llama with other tensor names; EXAONE 4, with norms after the blocks and local layers.

Both functions raise FormatError for settings that cannot be converted.
"""

from __future__ import annotations

from ..config import Config
from ..model_spec import ModelSpec
from ..tensor_transforms import unchanged
from .decoder_spec import CheckpointNames, DecoderSpec, linear

NAMES = CheckpointNames("transformer.h.{}", "transformer.wte.weight", "transformer.ln_f.weight")
ATTENTION = {p: f"attn.attention.{p}_proj" for p in "qkv"} | {"output": "attn.attention.out_proj"}
FEED_FORWARD = {"gate": "mlp.c_fc_0", "up": "mlp.c_fc_1", "down": "mlp.c_proj"}
# usual key of config.json -> EXAONE 3's
CONFIG_KEYS = {"num_hidden_layers": "num_layers", "rms_norm_eps": "layer_norm_epsilon", "hidden_act": "activation_function"}


def exaone(config: Config, mla_layout: str) -> ModelSpec:
    """EXAONE 3 and 3.5."""
    config = config.with_defaults({usual: config.get(key) for usual, key in CONFIG_KEYS.items()})
    config.require("hidden_act", "silu", "this activation")
    spec = DecoderSpec("exaone", config)
    up_shape, down_shape = (spec.intermediate_size, spec.hidden_size), (spec.hidden_size, spec.intermediate_size)
    layer = [
        spec.norm("attn_norm", "ln_1"),
        *spec.attention(ATTENTION),
        spec.norm("ffn_norm", "ln_2"),
        *linear("ffn_gate", FEED_FORWARD["gate"], up_shape),
        *linear("ffn_up", FEED_FORWARD["up"], up_shape),
        *linear("ffn_down", FEED_FORWARD["down"], down_shape),
    ]
    return spec.build(layer, NAMES)


def exaone4(config: Config, mla_layout: str) -> ModelSpec:
    """EXAONE 4; if there are local layers, only these have rotary embeddings."""
    config.require("hidden_act", "silu", "this activation")
    spec = DecoderSpec("exaone4", config)
    pattern = config.get("sliding_window_pattern", 4)
    if isinstance(pattern, str) and pattern and set(pattern) <= set("LG"):
        letters = pattern
        is_local = spec.local_layers(lambda i: letters[i % len(letters)] == "L" and i < spec.n_layers - 1)
    else:
        period = config.integer("sliding_window_pattern", 4, minimum=0)
        is_local = spec.local_layers(lambda i: period > 0 and (i + 1) % period != 0)
    if config.get("sliding_window") is not None:
        spec.add_sliding_window(is_local, default_period=4, always=True)
    layer = [
        *spec.attention(head_norms=unchanged),
        spec.norm("post_attention_norm", "post_attention_layernorm"),
        *spec.gated_mlp(),
        spec.norm("post_ffw_norm", "post_feedforward_layernorm"),
    ]
    return spec.build(layer)
