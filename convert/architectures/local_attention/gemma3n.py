"""Gemma 3n: several residual streams, embeddings per layer, keys and values that layers share."""

from __future__ import annotations

from functools import partial
from statistics import NormalDist

import numpy as np

from ...config import Config
from ...expert_transforms import stack_experts
from ...model_spec import ModelSpec, TensorSpec
from ...tensor_transforms import padded_rows
from ..decoder_spec import DecoderSpec, LayerTensor
from ..gemma import GEMMA3_RENAMED_PREFIXES
from ..gemma4 import SKIPPED_PREFIXES

ARCHITECTURE = "gemma3n"
# Defaults of the model's own code, for what config.json may leave out.
DEFAULTS = {
    "tie_word_embeddings": True,
    "head_dim": 256,
    "sliding_window": 512,
    "rms_norm_eps": 1e-6,
    "vocab_size": 262400,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    "altup_num_inputs": 4,
    "altup_active_idx": 0,
    "laurel_rank": 64,
    "num_kv_shared_layers": 15,
    "max_position_embeddings": 32768,
    "final_logit_softcapping": 30.0,
}
THETA, LOCAL_THETA, SPARSE_LAYERS, SPARSITY, PERIOD = 1e6, 1e4, 10, 0.95, 5
# What llama.cpp takes as given: config key -> value
IN_LLAMA_CPP = {"altup_num_inputs": 4, "laurel_rank": 64, "hidden_size_per_layer_input": 256}


def gemma3n(config: Config, mla_layout: str) -> ModelSpec:
    """The text model of Gemma3nForCausalLM and Gemma3nForConditionalGeneration. Raises FormatError for settings that cannot be
    converted."""
    is_multimodal = config.get("text_config") is not None
    text = (config.section("text_config") if is_multimodal else config).with_defaults(DEFAULTS)
    for key, supported, what in (
        ("hidden_activation", "gelu_pytorch_tanh", "this activation"),
        ("attention_bias", False, "biases in the attention"),
        ("altup_correct_scale", True, "correction without a scale"),
    ):
        text.require(key, supported, what)
    layers = text.count("num_hidden_layers")
    widths = text.get("intermediate_size")
    widths = widths if isinstance(widths, list) else [widths] * layers
    parameters = text.get("rope_parameters") or {}
    full, local = (text.part(parameters.get(f"{kind}_attention") or {}) for kind in ("full", "sliding"))
    for rope in (full, local):
        rope.require("rope_type", "default", "rotary scaling")
    theta = {"rope_theta": full.number("rope_theta", text.number("rope_theta", THETA))}
    text = text.with_values({"intermediate_size": widths[0] if widths else None})
    spec = DecoderSpec(ARCHITECTURE, text, rope=text.part(theta))
    widths = _per_layer(text, "intermediate_size", widths, layers, int)
    if len(set(widths)) > 1:
        spec.metadata[f"{ARCHITECTURE}.feed_forward_length"] = np.array(widths, np.uint32)
    is_local = spec.local_layers(lambda i: (i + 1) % PERIOD != 0)
    shared = text.integer("num_kv_shared_layers", minimum=0)
    own = layers - shared
    if own < 1 or set(is_local) != set(is_local[:own]):
        raise text.error(f"num_kv_shared_layers is {shared}: layers of each kind must have keys and values of their own")
    sparse = SPARSE_LAYERS if layers > SPARSE_LAYERS else 0
    sparsity = text.get("activation_sparsity_pattern") or [SPARSITY] * sparse + [0.0] * (layers - sparse)
    sparsity = _per_layer(text, "activation_sparsity_pattern", sparsity, layers, float)
    streams, active = text.integer("altup_num_inputs", minimum=2), text.integer("altup_active_idx", minimum=0)
    per_layer = text.integer("hidden_size_per_layer_input")
    spec.metadata[f"{ARCHITECTURE}.attention.sliding_window_pattern"] = np.array(is_local, bool)
    scales = [NormalDist().inv_cdf(s) if s > 0 else -np.inf for s in sparsity]
    spec.metadata[f"{ARCHITECTURE}.activation_sparsity_scale"] = np.array(scales, np.float32)
    spec.add_uint32({"attention.sliding_window": text.integer("sliding_window"), "attention.shared_kv_layers": shared})
    spec.add_uint32({"altup.num_inputs": streams, "altup.active_idx": active, "embedding_length_per_layer_input": per_layer})
    spec.add_float32({"rope.freq_base_swa": local.number("rope_theta", text.number("rope_local_base_freq", LOCAL_THETA))})
    spec.add_float32({"final_logit_softcapping": text.number("final_logit_softcapping", 0.0)})
    if any(text.integer(key) != value for key, value in IN_LLAMA_CPP.items()):
        spec.notes.append("llama.cpp knows this architecture in the published sizes only")
    if is_multimodal:
        spec.skipped_prefixes |= SKIPPED_PREFIXES
        spec.renamed_prefixes |= GEMMA3_RENAMED_PREFIXES
    model = spec.build(lambda i: _layer(spec, widths[i], i < own, per_layer, streams), tied=True)
    model.tensors.extend(_shared_tensors(spec, per_layer, streams))
    return model


def _per_layer(config: Config, key: str, values: list, layers: int, kind: type) -> list:
    is_valid = all(isinstance(v, (int, kind)) and not isinstance(v, bool) and 0 <= v < 1 << 31 for v in values)
    if len(values) != layers or not is_valid or (kind is float and any(v >= 1 for v in values)):
        raise config.error(f"{key} is {values!r:.80}; a number is needed for each of {layers} layers")
    return values


def _layer(spec: DecoderSpec, rows: int, has_kv: bool, per_layer: int, streams: int) -> list[LayerTensor]:
    """has_kv: else a layer uses the keys and values of an earlier one; published files have matrices for them all the same,
    which llama.cpp asks for."""
    hidden_size, q_rows, kv_rows = spec.hidden_size, spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    rank, matrix = spec.config.integer("laurel_rank"), LayerTensor
    own = partial(LayerTensor, is_optional=not has_kv)
    return [
        spec.norm("attn_norm", "input_layernorm"),
        matrix("attn_q.weight", "self_attn.q_proj.weight", (q_rows, hidden_size)),
        own("attn_k.weight", "self_attn.k_proj.weight", (kv_rows, hidden_size)),
        own("attn_v.weight", "self_attn.v_proj.weight", (kv_rows, hidden_size)),
        matrix("attn_output.weight", "self_attn.o_proj.weight", (hidden_size, q_rows)),
        spec.norm("attn_q_norm", "self_attn.q_norm", spec.head_dim),
        own("attn_k_norm.weight", "self_attn.k_norm.weight", (spec.head_dim,)),
        spec.norm("post_attention_norm", "post_attention_layernorm"),
        spec.norm("ffn_norm", "pre_feedforward_layernorm"),
        *spec.gated_mlp(rows=rows),
        spec.norm("post_ffw_norm", "post_feedforward_layernorm"),
        matrix("inp_gate.weight", "per_layer_input_gate.weight", (per_layer, hidden_size)),
        matrix("proj.weight", "per_layer_projection.weight", (hidden_size, per_layer)),
        spec.norm("post_norm", "post_per_layer_input_norm"),
        matrix("altup_correct_coef.weight", "altup.correction_coefs.weight", (streams, streams)),
        matrix("altup_correct_scale.weight", "altup.correct_output_scale", (hidden_size,)),
        matrix("altup_predict_coef.weight", "altup.prediction_coefs.weight", (streams**2, streams)),
        matrix("altup_router.weight", "altup.modality_router.weight", (streams, hidden_size)),
        spec.norm("altup_router_norm", "altup.router_norm"),
        matrix("laurel_l.weight", "laurel.linear_left.weight", (rank, hidden_size)),
        matrix("laurel_r.weight", "laurel.linear_right.weight", (hidden_size, rank)),
        spec.norm("laurel_post_norm", "laurel.post_laurel_norm"),
    ]


def _shared_tensors(spec: DecoderSpec, per_layer: int, streams: int) -> list[TensorSpec]:
    """Embeddings per layer, with a row for every token (those of images and audio have the first token's, as in the model's own
    code), and the matrices between one stream and several."""
    size, width, rows = spec.n_layers * per_layer, spec.hidden_size, spec.config.integer("vocab_size_per_layer_input")
    if rows > spec.vocab_size:
        raise spec.config.error(f"vocab_size_per_layer_input is {rows}, more than vocab_size, which is {spec.vocab_size}")
    others = range(streams - 1)
    return [
        TensorSpec(
            "per_layer_token_embd.weight",
            ("model.embed_tokens_per_layer.weight",),
            (rows, size),
            padded_rows(spec.vocab_size),
        ),
        TensorSpec("per_layer_model_proj.weight", ("model.per_layer_model_projection.weight",), (size, width)),
        TensorSpec("per_layer_proj_norm.weight", ("model.per_layer_projection_norm.weight",), (per_layer,)),
        *(
            TensorSpec(f"{name}.weight", tuple(f"model.{source}.{i}.weight" for i in others), (width, width), stack_experts)
            for name, source in (("altup_proj", "altup_projections"), ("altup_unembd_proj", "altup_unembed_projections"))
        ),
    ]
