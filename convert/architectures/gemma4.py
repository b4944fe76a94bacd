"""Gemma 4: heads of two widths, embeddings per layer, keys and values that layers share, experts next to the dense block."""

from __future__ import annotations

from functools import partial

import numpy as np

from ..config import Config
from ..expert_transforms import expert_rows
from ..model_spec import ModelSpec, TensorSpec
from ..tensor_transforms import computed
from .decoder_spec import DecoderSpec, LayerTensor
from .gemma import GEMMA3_RENAMED_PREFIXES, GEMMA3_SKIPPED_PREFIXES

ARCHITECTURE = "gemma4"
# Defaults of the model's own code, for what config.json may leave out.
DEFAULTS = {"tie_word_embeddings": True, "head_dim": 256, "sliding_window": 512, "rms_norm_eps": 1e-6}
GLOBAL_HEAD_DIM = 512
FULL_ROPE = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
SKIPPED_PREFIXES = GEMMA3_SKIPPED_PREFIXES | {
    f"{prefix}{name}.": what
    for prefix in ("", "model.")
    for name, what in (
        ("audio_tower", "audio tower"),
        ("embed_vision", "projector of images"),
        ("embed_audio", "projector of audio"),
        ("vision_embedder", "projector of images"),
    )
}
NOT_ROTATED = np.float32(1e30)  # divisor of the frequency of pairs that are not rotated


def gemma4(config: Config, mla_layout: str) -> ModelSpec:
    """The text model of Gemma4ForCausalLM and Gemma4ForConditionalGeneration.

    Raises FormatError for settings that cannot be converted.
    """
    is_multimodal = config.get("text_config") is not None
    text = (config.section("text_config") if is_multimodal else config).with_defaults(DEFAULTS)
    for key, supported, what in (
        ("hidden_activation", "gelu_pytorch_tanh", "this activation"),
        ("attention_bias", False, "biases in the attention"),
    ):
        text.require(key, supported, what)
    if text.get("use_bidirectional_attention") == "all":
        raise text.error("use_bidirectional_attention is 'all': attention to later tokens cannot be converted")
    parameters = text.part({}) if text.get("rope_parameters") is None else text.section("rope_parameters")
    kinds = ("full_attention", "sliding_attention")
    full, local = ({} if parameters.get(kind) is None else parameters.section(kind).values for kind in kinds)
    full = text.part(FULL_ROPE | full)
    local_rope = text.part({"rope_type": "default", "rope_theta": 10000.0} | local)
    full.require("rope_type", "proportional", "this rotary embedding of global layers")
    local_rope.require("rope_type", "default", "rotary scaling of local layers")
    local_rope.require("partial_rotary_factor", 1.0, "rotating a part of the heads of local layers")
    spec = DecoderSpec(ARCHITECTURE, text, rope=text.part({"rope_theta": full.number("rope_theta")}))
    is_local = spec.local_layers(lambda i: (i + 1) % 6 != 0)
    is_local[-1] = False  # whatever the pattern is
    global_dim, global_kv_heads = _global_heads(text, spec, is_local)
    shared = text.integer("num_kv_shared_layers", 0, minimum=0)
    own = spec.n_layers - shared
    if own < 1 or set(is_local) != set(is_local[:own]):
        raise text.error(f"num_kv_shared_layers is {shared}: layers of each kind must have keys and values of their own")
    spec.metadata[f"{ARCHITECTURE}.attention.sliding_window_pattern"] = np.array(is_local, bool)
    spec.add_uint32({"attention.sliding_window": text.integer("sliding_window"), "attention.shared_kv_layers": shared})
    spec.add_uint32({f"attention.{part}_length": global_dim for part in ("key", "value")})
    spec.add_uint32({f"attention.{part}_length_swa": spec.head_dim for part in ("key", "value")})
    spec.add_uint32({"rope.dimension_count": global_dim, "rope.dimension_count_swa": spec.head_dim})
    spec.add_float32({"rope.freq_base_swa": local_rope.number("rope_theta", positive=True)})
    kv_heads = [spec.n_kv_heads if local else global_kv_heads for local in is_local]
    if len(set(kv_heads)) > 1:
        spec.metadata[f"{ARCHITECTURE}.attention.head_count_kv"] = np.array(kv_heads, np.uint32)
    wide = [
        spec.intermediate_size * (2 if i >= own and text.flag("use_double_wide_mlp", False) else 1)
        for i in range(len(is_local))
    ]
    if len(set(wide)) > 1:
        spec.metadata[f"{ARCHITECTURE}.feed_forward_length"] = np.array(wide, np.uint32)
    spec.add_float32({"final_logit_softcapping": text.number("final_logit_softcapping", 0.0)})  # without it readers take 30
    per_layer = text.integer("hidden_size_per_layer_input", 256, minimum=0)
    spec.add_uint32({"embedding_length_per_layer_input": per_layer})
    experts = rows = 0
    if text.flag("enable_moe_block", False):
        rows = text.integer("moe_intermediate_size")
        experts = spec.add_expert_counts("num_experts", rows, "top_k_experts", layers=0)
    for i in range(own, spec.n_layers):  # published files have them, unused
        for name in ("k_proj", "v_proj", "k_norm", "v_norm"):
            spec.skipped_prefixes[f"model.layers.{i}.self_attn.{name}."] = f"{name} of layer {i}, which uses an earlier one's"
    if is_multimodal:
        spec.skipped_prefixes |= SKIPPED_PREFIXES
        spec.renamed_prefixes |= GEMMA3_RENAMED_PREFIXES

    def layer(i: int) -> list[LayerTensor]:
        width = spec.head_dim if is_local[i] else global_dim
        k_is_v = text.flag("attention_k_eq_v", False) and not is_local[i]
        tensors = _layer(spec, width, kv_heads[i] if i < own else 0, k_is_v, wide[i], per_layer)
        return [*tensors, *_experts(spec, experts, rows)] if experts else tensors

    model = spec.build(layer, tied=True)
    pairs = int(full.number("partial_rotary_factor") * global_dim / 2)
    factors = np.where(np.arange(global_dim // 2) < pairs, np.float32(1), NOT_ROTATED)
    model.tensors.insert(0, TensorSpec("rope_freqs.weight", (), factors.shape, computed(lambda: factors)))
    if per_layer:
        model.tensors.extend(_embeddings_per_layer(spec, per_layer))
    return model


def _global_heads(config: Config, spec: DecoderSpec, is_local: list[bool]) -> tuple[int, int]:
    """Width of the heads of global layers, and how many of them are key-value heads: from keys of their own, or from newer
    files' per_layer_config, which has to say the same for all global layers."""
    own_kv = config.integer("num_global_key_value_heads", spec.n_kv_heads) if config.flag("attention_k_eq_v", False) else None
    values = {"head_dim": config.integer("global_head_dim", GLOBAL_HEAD_DIM), "num_key_value_heads": own_kv or spec.n_kv_heads}
    settings = config.get("per_layer_config")
    if isinstance(settings, dict):
        expected = {str(i) for i, local in enumerate(is_local) if not local}
        found = list(settings.values())
        if set(settings) != expected or any(value != found[0] for value in found) or not isinstance(found[0], dict):
            raise config.error("per_layer_config is not one set of settings for all global layers, which cannot be converted")
        values |= {key: config.part(found[0]).integer(key, default) for key, default in values.items()}
        values["num_key_value_heads"] = found[0].get("num_key_value_heads", spec.n_kv_heads)
    return values["head_dim"], values["num_key_value_heads"]


def _layer(spec: DecoderSpec, width: int, kv_heads: int, k_is_v: bool, rows: int, per_layer: int) -> list[LayerTensor]:
    """kv_heads: 0 for a layer that uses the keys and values of an earlier one."""
    hidden_size, q_rows = spec.hidden_size, spec.n_heads * width
    matrix = partial(LayerTensor, shape=(kv_heads * width, hidden_size))
    tensors = [
        spec.norm("attn_norm", "input_layernorm"),
        LayerTensor("attn_q.weight", "self_attn.q_proj.weight", (q_rows, hidden_size)),
        LayerTensor("attn_output.weight", "self_attn.o_proj.weight", (hidden_size, q_rows)),
        spec.norm("attn_q_norm", "self_attn.q_norm", width),
    ]
    if kv_heads:
        parts = ("k",) if k_is_v else ("k", "v")
        tensors += [matrix(f"attn_{p}.weight", f"self_attn.{p}_proj.weight") for p in parts]
        tensors.append(spec.norm("attn_k_norm", "self_attn.k_norm", width))
    tensors += [
        spec.norm("post_attention_norm", "post_attention_layernorm"),
        spec.norm("ffn_norm", "pre_feedforward_layernorm"),
        *spec.gated_mlp(rows=rows),
        spec.norm("post_ffw_norm", "post_feedforward_layernorm"),
        LayerTensor("layer_output_scale.weight", "layer_scalar", (1,)),
    ]
    if per_layer:
        tensors += [
            LayerTensor("inp_gate.weight", "per_layer_input_gate.weight", (per_layer, hidden_size)),
            LayerTensor("proj.weight", "per_layer_projection.weight", (hidden_size, per_layer)),
            spec.norm("post_norm", "post_per_layer_input_norm"),
        ]
    return tensors


def _experts(spec: DecoderSpec, n: int, rows: int) -> list[LayerTensor]:
    """A layer's router, which has a norm of its own, and n experts next to the dense block; all gates and ups in one tensor."""
    hidden_size = spec.hidden_size
    return [
        LayerTensor("ffn_gate_inp.weight", "router.proj.weight", (n, hidden_size)),
        LayerTensor("ffn_gate_inp.scale", "router.scale", (hidden_size,)),
        LayerTensor("ffn_gate_up_exps.weight", "experts.gate_up_proj", (n, 2 * rows, hidden_size), expert_rows()),
        LayerTensor("ffn_down_exps.weight", "experts.down_proj", (n, hidden_size, rows), expert_rows()),
        LayerTensor("ffn_down_exps.scale", "router.per_expert_scale", (n,)),
        spec.norm("post_ffw_norm_1", "post_feedforward_layernorm_1"),
        spec.norm("pre_ffw_norm_2", "pre_feedforward_layernorm_2"),
        spec.norm("post_ffw_norm_2", "post_feedforward_layernorm_2"),
    ]


def _embeddings_per_layer(spec: DecoderSpec, width: int) -> list[TensorSpec]:
    spec.config.require("vocab_size_per_layer_input", spec.vocab_size, "another vocabulary for embeddings per layer")
    size = spec.n_layers * width
    return [
        TensorSpec("per_layer_token_embd.weight", ("model.embed_tokens_per_layer.weight",), (spec.vocab_size, size)),
        TensorSpec("per_layer_model_proj.weight", ("model.per_layer_model_projection.weight",), (size, spec.hidden_size)),
        TensorSpec("per_layer_proj_norm.weight", ("model.per_layer_projection_norm.weight",), (width,)),
    ]
