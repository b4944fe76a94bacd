"""Falcon-H1: attention and Mamba-2 side by side in every layer.

Its many factors are multiplied into the matrices, as llama.cpp's converter does, so that readers need not know them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...config import Config
from ...model_spec import ModelSpec
from ...tensor_transforms import scaled
from ..decoder_spec import CheckpointNames, DecoderSpec, LayerTensor
from .granite_hybrid import MAMBA2
from .state_space import Mamba2

NAMES = CheckpointNames(norm="model.final_layernorm.weight")
_DEFAULTS = {"mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2}


def falcon_h1(config: Config, mla_layout: str) -> ModelSpec:
    """Raises FormatError for settings that cannot be converted."""
    for key, supported, what in (
        ("hidden_act", "silu", "this activation"),
        ("attention_bias", False, "biases in the attention"),
        ("mlp_bias", False, "biases in the feed-forward blocks"),
        ("projectors_bias", False, "a model with biases"),
        ("mamba_proj_bias", False, "a model with biases"),
    ):
        config.require(key, supported, what)
    config = config.with_defaults(_DEFAULTS)
    has_norm = config.flag("mamba_rms_norm", False)
    if has_norm and config.flag("mamba_norm_before_gate", True):
        raise config.error("mamba_norm_before_gate is true: a norm before the gate cannot be converted")
    spec = DecoderSpec("falcon-h1", config)
    spec.add_uint32({"attention.key_length": spec.head_dim, "attention.value_length": spec.head_dim})
    sizes = Mamba2.of(config, MAMBA2, config.integer("mamba_d_ssm", config.integer("mamba_expand") * spec.hidden_size))
    sizes.add_metadata(spec)
    factors = _factors(config, sizes)
    layer = [
        spec.norm("attn_norm", "input_layernorm"),
        *spec.attention(),
        *sizes.tensors(spec, "mamba", conv_bias=config.flag("mamba_conv_bias", True), norm=has_norm),
        LayerTensor("ffn_norm", "pre_ff_layernorm.weight", (spec.hidden_size,)),  # without .weight: so it is in llama.cpp
        *spec.gated_mlp("feed_forward"),
    ]
    layer = [_scaled(tensor, factors) for tensor in layer]
    names = NAMES
    if config.flag("tie_word_embeddings", False):  # embeddings and output have factors of their own
        names = replace(NAMES, head=NAMES.embedding)
        spec.skipped_prefixes[NAMES.head] = "output tied to the embeddings"
        spec.config = config.with_values({"tie_word_embeddings": False})
    model = spec.build(layer, names)
    ends = {"token_embd.weight": "embedding_multiplier", "output.weight": "lm_head_multiplier"}
    factor_of = {name: config.number(key, 1.0, positive=True) for name, key in ends.items()}
    tensors = [replace(t, transform=scaled(factor_of[t.name])) if t.name in ends else t for t in model.tensors]
    return replace(model, tensors=tensors)


def _scaled(tensor: LayerTensor, factors: dict[str, float | np.ndarray]) -> LayerTensor:
    factor = factors.get(tensor.name.removesuffix(".weight"))
    return tensor if factor is None else replace(tensor, transform=scaled(factor))


def _factors(config: Config, sizes: Mamba2) -> dict[str, float | np.ndarray]:
    """Tensor without .weight -> its factor, or one for each of its rows."""

    def number(key: str) -> float:
        return config.number(key, 1.0)

    def numbers(key: str, n: int) -> list[float]:
        values = config.get(key, [1.0] * n)
        if not isinstance(values, list) or len(values) != n or not all(isinstance(v, int | float) for v in values):
            raise config.error(f"{key} is {values!r:.60}; {n} numbers are needed")
        return [float(v) for v in values]

    gate, down = numbers("mlp_multipliers", 2)
    shared = sizes.groups * sizes.size
    counts = (sizes.inner, sizes.inner, shared, shared, sizes.heads)  # rows of the gate, values, b, c and steps
    rows = np.repeat(np.array(numbers("ssm_multipliers", 5), np.float32), counts)
    attention_in = number("attention_in_multiplier")
    return {
        "attn_q": attention_in,
        "attn_k": attention_in * number("key_multiplier"),
        "attn_v": attention_in,
        "attn_output": number("attention_out_multiplier"),
        "ssm_in": rows * np.float32(number("ssm_in_multiplier")),
        "ssm_out": number("ssm_out_multiplier"),
        "ffn_gate": gate,
        "ffn_down": down,
    }
