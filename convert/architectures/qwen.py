"""Qwen 2 and 2.5, Qwen 3, their mixtures of experts, and the text models of Qwen 2, 2.5 and 3 VL.

All functions raise FormatError for settings that cannot be converted.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..config import Config
from ..model_spec import ModelSpec
from ..tensor_transforms import flatten, unchanged
from .decoder_spec import DecoderSpec, LayerTensor
from .encoders.pooling import pooling_keys, read_modules

MROPE_SECTIONS = [24, 20, 20]  # the default of Qwen 3 VL's own code


def qwen2(config: Config, mla_layout: str) -> ModelSpec:
    """Qwen 2 and 2.5: biases on q, k and v."""
    spec = _spec("qwen2", config)
    _add_window(spec, lambda i: i >= config.integer("max_window_layers", 28, minimum=0))
    return spec.build(_layer(spec, spec.attention(bias=True), spec.gated_mlp()))


def qwen2vl(config: Config, mla_layout: str) -> ModelSpec:
    """The text model of Qwen 2 VL, 2.5 VL and 2.5 Omni: as `qwen2`, with rotation by positions in images."""
    config.lose_unless("use_sliding_window", False, "this architecture has no windows: all layers attend to everything")
    scaling = config.get("rope_scaling")
    if isinstance(scaling, dict) and scaling.get("type") == "mrope":  # in older files; angles are not scaled
        config = config.with_values({"rope_scaling": scaling | {"type": "default", "rope_type": "default"}})
    spec = _spec("qwen2vl", config)
    _add_sections(spec)
    return spec.build(_layer(spec, spec.attention(bias=True), spec.gated_mlp()))


def qwen3(config: Config, mla_layout: str) -> ModelSpec:
    """Qwen 3: queries and keys of every head are normalised. With sentence-transformers' files (Qwen 3 Embedding) the head is
    left out."""
    is_embedding = read_modules(config.path.parent).pooling is not None or config.get("architectures") == ["Qwen3Model"]
    if is_embedding:
        config = config.with_values({"tie_word_embeddings": True})
    spec = _spec("qwen3", config)
    if is_embedding:  # stored with or without a head, whose names begin otherwise
        spec.metadata |= pooling_keys("qwen3", config, "last", spec.notes)
        spec.renamed_prefixes |= {f"{name}.": f"model.{name}." for name in ("layers", "embed_tokens", "norm")}
    _add_window(spec, lambda i: i >= config.integer("max_window_layers", 28, minimum=0))
    return _qwen3_layers(spec, spec.gated_mlp())


def qwen3vl(config: Config, mla_layout: str) -> ModelSpec:
    """The text model of Qwen 3 VL: as `qwen3`, with rotation by positions in images."""
    spec = _spec("qwen3vl", config)
    _add_vision(spec)
    return _qwen3_layers(spec, spec.gated_mlp())


def qwen3vlmoe(config: Config, mla_layout: str) -> ModelSpec:
    """As `qwen3vl`, with experts, whose weights always sum to one."""
    config = config.with_defaults({"num_experts": config.get("num_local_experts"), "tie_word_embeddings": True})
    spec = _spec("qwen3vlmoe", config)
    _add_vision(spec)
    rows = config.integer("moe_intermediate_size")
    n = spec.add_expert_counts("num_experts", rows, layers=0)
    return _qwen3_layers(spec, spec.experts(n, rows, may_be_transposed=True))


def _qwen3_layers(spec: DecoderSpec, feed_forward: list[LayerTensor]) -> ModelSpec:
    bias = spec.config.flag("attention_bias", False)
    return _layers(spec, spec.attention(bias=bias, output_bias=bias, head_norms=unchanged), feed_forward)


def _add_sections(spec: DecoderSpec) -> None:
    """How many pairs rotate by time, height and width."""
    sections = spec.rope.settings.get("mrope_section") or MROPE_SECTIONS
    if not isinstance(sections, list) or len(sections) != 3 or sum(map(int, sections)) != spec.rotary_dim // 2:
        raise spec.config.error(f"mrope_section is {sections!r:.60}; 3 numbers are needed with sum {spec.rotary_dim // 2}")
    spec.metadata[f"{spec.architecture}.rope.dimension_sections"] = np.array([*sections, 0], np.int32)


def _add_vision(spec: DecoderSpec) -> None:
    """As `_add_sections`, and how many layers get images' features of their own."""
    _add_sections(spec)
    vision = spec.config.section("vision_config") if spec.config.get("vision_config") else spec.config
    indexes = vision.get("deepstack_visual_indexes") or ()
    spec.add_uint32({"n_deepstack_layers": len(indexes)})


def qwen2moe(config: Config, mla_layout: str) -> ModelSpec:
    """Qwen 1.5 MoE and 2 57B-A14B: as `qwen2`, with experts and a shared expert that has a gate of its own."""
    spec = _spec("qwen2moe", config)
    _add_window(spec, lambda i: i >= config.integer("max_window_layers", 28, minimum=0))
    rows, shared_rows = config.integer("moe_intermediate_size"), config.integer("shared_expert_intermediate_size")
    n = spec.add_expert_counts("num_experts", rows, layers=sum(map(layers_with_experts(config), range(spec.n_layers))))
    spec.add_uint32({"expert_shared_feed_forward_length": shared_rows})
    spec.metadata["qwen2moe.expert_weights_norm"] = config.flag("norm_topk_prob", False)
    feed_forward = [
        *spec.experts(n, rows),
        LayerTensor("ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight", (1, spec.hidden_size), flatten),
        *spec.gated_mlp("mlp.shared_expert", shared_rows, "_shexp"),
    ]
    return _layers(spec, spec.attention(bias=config.flag("qkv_bias", True)), feed_forward)


def qwen3moe(config: Config, mla_layout: str) -> ModelSpec:
    """As `qwen3`, with experts and no shared expert."""
    config = config.with_defaults({"num_experts": config.get("num_local_experts")})  # the key of newer files
    spec = _spec("qwen3moe", config)
    _add_window(spec, lambda i: True)
    rows = config.integer("moe_intermediate_size")
    n = spec.add_expert_counts("num_experts", rows, layers=sum(map(layers_with_experts(config), range(spec.n_layers))))
    spec.metadata["qwen3moe.expert_weights_norm"] = config.flag("norm_topk_prob", False)
    return _qwen3_layers(spec, spec.experts(n, rows))


def _spec(architecture: str, config: Config) -> DecoderSpec:
    config.require("hidden_act", "silu", "this activation")
    return DecoderSpec(architecture, config)


def _layer(spec: DecoderSpec, attention: list[LayerTensor], feed_forward: list[LayerTensor]) -> list[LayerTensor]:
    return [
        spec.norm("attn_norm", "input_layernorm"),
        *attention,
        spec.norm("ffn_norm", "post_attention_layernorm"),
        *feed_forward,
    ]


def _layers(spec: DecoderSpec, attention: list[LayerTensor], feed_forward: list[LayerTensor]) -> ModelSpec:
    """feed_forward: of layers that have no plain one."""
    has_experts = layers_with_experts(spec.config)
    return spec.build(lambda i: _layer(spec, attention, feed_forward if has_experts(i) else spec.gated_mlp()))


def layers_with_experts(config: Config) -> Callable[[int], bool]:
    """layer -> whether it has experts, if the model has any: every decoder_sparse_step-th, but those of mlp_only_layers. The
    tensors alone say it in a GGUF."""
    step = config.integer("decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise config.error(f"mlp_only_layers is {dense!r:.60}; a list of layers is needed")
    return lambda i: (i + 1) % step == 0 and i not in dense


def _add_window(spec: DecoderSpec, default: Callable[[int], bool]) -> None:
    """default: which layers are local if config.json has no layer_types."""
    if spec.config.flag("use_sliding_window", False):
        spec.add_sliding_window(spec.local_layers(default))
        spec.notes.append("llama.cpp does not know of the sliding window in this architecture")
