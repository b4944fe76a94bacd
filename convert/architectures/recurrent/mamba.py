"""Mamba, Falcon Mamba and Mamba-2: state space layers only, without feed-forward blocks."""

from __future__ import annotations

from ...config import Config
from ...model_spec import ModelSpec
from ..decoder_spec import CheckpointNames, DecoderSpec, LayerTensor
from .state_space import Mamba, Mamba2

NAMES = CheckpointNames("backbone.layers.{}", "backbone.embeddings.weight", "backbone.norm_f.weight")
MAMBA2 = {"heads": "num_heads", "width": "head_dim", "groups": "n_groups", "size": "state_size", "kernel": "conv_kernel"}
MAMBA = {"expand": "expand", "rank": "time_step_rank", "size": "state_size", "kernel": "conv_kernel"}
_RMS_NORM = ("attention.layer_norm_rms_epsilon", "layer_norm_epsilon")
_CONTEXT = 1 << 20  # what llama.cpp's converter writes: these models have no limit
_DEFAULTS = {"layer_norm_epsilon": 1e-5, "max_position_embeddings": _CONTEXT}
_FALCON_EPSILON = 1e-6  # mixer_rms_eps of the published models


def mamba(config: Config, mla_layout: str) -> ModelSpec:
    """Mamba. Raises FormatError for settings that cannot be converted."""
    return _mamba(config, tied=True)


def falcon_mamba(config: Config, mla_layout: str) -> ModelSpec:
    """Falcon Mamba: as `mamba`, with steps and factors normalised without weights."""
    inner = config.number("mixer_rms_eps", _FALCON_EPSILON, positive=True)
    model = _mamba(config, tied=False)
    if inner != config.number("layer_norm_epsilon", 1e-5, positive=True):
        model.notes.append(f"steps and factors are normalised with mixer_rms_eps {inner}; GGUF has layer_norm_epsilon only")
    model.metadata["mamba.ssm.dt_b_c_rms"] = True
    return model


def mamba2(config: Config, mla_layout: str) -> ModelSpec:
    """Mamba-2. Raises FormatError for settings that cannot be converted."""
    config = config.with_defaults({"n_groups": 8, "state_size": 128, "conv_kernel": 4, "expand": 2})
    sizes = Mamba2.of(config, MAMBA2, int(config.number("expand") * config.integer("hidden_size")))
    spec = _spec("mamba2", config)
    sizes.add_metadata(spec)
    layer = [spec.norm("attn_norm", "norm"), *sizes.tensors(spec, "mixer", conv_bias=config.flag("use_conv_bias", True))]
    return _build(spec, layer, tied=False)


def _mamba(config: Config, *, tied: bool) -> ModelSpec:
    sizes = Mamba.of(config, config.integer("hidden_size"), MAMBA)
    spec = _spec("mamba", config)
    sizes.add_metadata(spec)
    layer = [spec.norm("attn_norm", "norm"), *sizes.tensors(spec, "mixer", conv_bias=config.flag("use_conv_bias", True))]
    return _build(spec, layer, tied=tied)


def _spec(architecture: str, config: Config) -> DecoderSpec:
    """Sizes of attention and feed-forward blocks, which there are none of, are written as 0."""
    config.require("hidden_act", "silu", "this activation")
    config.require("use_bias", False, "a model with biases")
    none = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2, "intermediate_size": 1, "rope_parameters": None}
    spec = DecoderSpec(architecture, config.with_defaults(_DEFAULTS).with_values(none), norm=_RMS_NORM)
    for key in ("rope.freq_base", "rope.dimension_count", "attention.key_length", "attention.value_length"):
        del spec.metadata[f"{architecture}.{key}"]
    spec.add_uint32({"attention.head_count": 0, "attention.head_count_kv": 0, "feed_forward_length": 0})
    return spec


def _build(spec: DecoderSpec, layer: list[LayerTensor], *, tied: bool) -> ModelSpec:
    return spec.build(layer, NAMES, tied=tied)
