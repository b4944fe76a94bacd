"""Muse Glimmer: norms before and after both blocks and of the embeddings, heads normalised without weights, attention with a
gate; layers with a window rotate, those without have no positions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...config import Config
from ...model_spec import ModelSpec, TensorSpec
from ...tensor_transforms import add_one, computed
from ..decoder_spec import DecoderSpec, linear

_PERIOD = 4  # every fourth layer, the last one among them, sees everything
_POST_EPSILON = 1e-8  # of norms after a block; readers know it by the architecture
_DEFAULTS = {"head_dim": 128, "sliding_window": 2048, "final_logit_softcapping": 20.0, "hidden_activation": "silu"}
_DEFAULTS |= {"qk_scale_factor": 3.87, "output_multiplier": 0.19611613513818404}


def muse_glimmer(config: Config, mla_layout: str) -> ModelSpec:
    """The text model. Raises FormatError for settings that cannot be converted."""
    config = config.with_defaults(_DEFAULTS)
    config.require("hidden_activation", "silu", "this activation")
    config.require("attention_bias", False, "biases in the attention")
    config.require("post_norm_eps", _POST_EPSILON, "another epsilon of norms after a block")
    spec = DecoderSpec("muse-glimmer", config)
    is_local = spec.local_layers(lambda i: (spec.n_layers - 1 - i) % _PERIOD != 0)
    bases = config.get("layer_rope_theta")
    if bases is not None and bases != [spec.rope.theta if local else 0 for local in is_local]:
        raise config.error("layer_rope_theta: a GGUF has one base for all layers with a window, and no rotation in the others")
    spec.add_sliding_window(is_local, always=True)
    spec.metadata["muse-glimmer.attention.sliding_window_pattern"] = np.array(is_local, bool)
    spec.add_float32({"logit_scale": config.number("output_multiplier", positive=True)})
    spec.add_float32({"final_logit_softcapping": config.number("final_logit_softcapping", positive=True)})
    layer = [
        spec.norm("attn_norm", "input_layernorm", transform=add_one),
        *spec.attention(permute=True),
        *linear("attn_gate", "self_attn.gate_proj", (spec.n_heads * spec.head_dim, spec.hidden_size)),
        spec.norm("post_attention_norm", "post_attention_layernorm", transform=add_one),
        spec.norm("ffn_norm", "pre_feedforward_layernorm", transform=add_one),
        *spec.gated_mlp(),
        spec.norm("post_ffw_norm", "post_feedforward_layernorm", transform=add_one),
    ]
    model = spec.build(layer)
    factors = {"q": config.number("qk_scale_factor", positive=True), "k": 1.0}
    norms = [
        _head_norm(f"blk.{i}.attn_{part}_norm", spec.head_dim, factors[part]) for i in range(spec.n_layers) for part in "qk"
    ]
    return replace(model, tensors=[*model.tensors, *norms])


def _head_norm(name: str, width: int, factor: float) -> TensorSpec:
    """The weights of a norm that has none in the checkpoint: its factor, which all elements share."""
    return TensorSpec(f"{name}.weight", (), (width,), computed(lambda: np.full(width, factor, np.float32)))
