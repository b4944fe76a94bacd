"""openPangu 2: latent attention with parameter sinks, convolutions of latents, windows and indexers; residual streams.

ik_llama.cpp names its tensors and keys (openpangu); latent attention is in that program's layout whatever is asked for. Draft
layers are left out.
"""

from __future__ import annotations

import numpy as np

from ...config import Config
from ...model_spec import ModelSpec
from ...tensor_spec import TensorSpec
from ...tensor_transforms import kv_b_keys, kv_b_values, reshaped
from ..decoder_spec import SIGMOID_GATING, DecoderSpec, LayerTensor, linear

ARCHITECTURE = "openpangu"
KERNEL = 3  # tokens of a convolution, for readers of GGUF
ATTENTION = "self_attn"
# convolution in the GGUF -> in the checkpoint
CONVOLUTIONS = {"attn_qa_conv": "qa_conv", "attn_compresskv_conv": "compresskv_conv", "attn_o_conv": "o_conv"}
NORMS = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
NORMS |= {"ffn_norm": "pre_mlp_layernorm", "post_ffw_norm": "post_mlp_layernorm"}
INDEXER = {"head_count": "index_n_heads", "key_length": "index_head_dim", "top_k": "index_topk"}


def openpangu(config: Config, mla_layout: str) -> ModelSpec:
    """Raises FormatError for settings that cannot be converted."""
    for key, supported, what in (
        ("hidden_act", "silu", "this activation"),
        ("attention_bias", False, "biases in the attention"),
        ("rope_interleave", False, "another order of rotated elements"),
        ("sandwich_norm", True, "a block without a norm behind it"),
        ("use_mome", True, "a model without convolutions"),
        ("use_mhc", True, "a model with one residual stream"),
        ("mhc_use_gamma", True, "streams whose norm has no weights"),
        ("router_sliding_window", KERNEL, "another length of convolutions"),
        ("tie_word_embeddings", False, "an output that shares the embeddings"),
    ):
        config.require(key, supported, what)
    rope = config.integer("qk_rope_head_dim")
    spec = DecoderSpec(ARCHITECTURE, config.with_values({"head_dim": rope, "partial_rotary_factor": None}))
    if spec.rope.scaling != "default":
        raise config.error(f"rotary scaling {spec.rope.scaling} cannot be converted for this architecture")
    streams, sinks = config.integer("mhc_num_stream"), config.integer("param_sink_number")
    numbers = {"mhc_num_stream": streams, "mhc_recur_norm": config.integer("mhc_recur_norm"), "param_sink_number": sinks}
    spec.add_uint32(numbers)
    has_window = _windows(spec)
    if not all(has_window):
        spec.add_uint32({f"attention.indexer.{key}": config.integer(theirs) for key, theirs in INDEXER.items()})
    attention = _attention(spec, sinks)
    dense = config.integer("first_k_dense_replace", minimum=0)
    experts = _experts(spec, dense)
    after = config.get("block_post_layernorm_idx") or []
    if not isinstance(after, list):
        raise config.error(f"block_post_layernorm_idx is {after!r:.60}; a list of layers is needed")
    wide = streams * spec.hidden_size

    def layer(number: int) -> list[LayerTensor]:
        return [
            *(spec.norm(name, source) for name, source in NORMS.items()),
            *attention,
            *([] if has_window[number] else _indexer(spec)),
            *_streams(wide, streams, "attn"),
            *_streams(wide, streams, "mlp"),
            *([spec.norm("block_post_norm", "block_post_layernorm", wide)] if number in after else []),
            *(spec.gated_mlp() if number < dense else experts),
        ]

    spec.skip_prediction_layers(config.count("num_nextn_predict_layers", 0, minimum=0))
    model = spec.build(layer)
    for name, source, shape in (
        ("merge_mhc_phi.weight", "phi.weight", (streams, wide)),
        ("merge_mhc_alpha", "branch_alpha_pre", (1,)),
        ("merge_mhc_beta", "branch_beta_pre", (streams,)),
        ("merge_mhc_gamma", "norm_gamma", (wide,)),
    ):
        model.tensors.append(TensorSpec(name, (f"model.merge_mhc_module.{source}",), shape))
    return model


def _windows(spec: DecoderSpec) -> list[bool]:
    """For each layer whether its attention has a window; adds the metadata. Raises FormatError for lists that say nothing
    sensible, and for windows of several sizes, which readers of GGUF do not know."""
    config = spec.config
    layers, sizes = config.get("swa_layers") or [], config.get("sliding_window_list")
    sizes = [config.integer("sliding_window")] * len(layers) if sizes is None and layers else sizes or []
    lists = isinstance(layers, list) and isinstance(sizes, list) and len(layers) == len(sizes)
    if not lists or not all(type(v) is int for v in (*layers, *sizes)):
        raise config.error(
            f"swa_layers is {layers!r:.60}, and sliding_window_list {sizes!r:.60}; lists of one length are needed"
        )
    others = config.get("dsa_layers")
    if isinstance(others, list) and layers and {*others, *layers} & {*range(spec.n_layers)} != {*range(spec.n_layers)}:
        raise config.error(f"dsa_layers and swa_layers are not all of {spec.n_layers} layers")
    own = {layer: size for layer, size in zip(layers, sizes, strict=True) if layer < spec.n_layers}
    if len({*own.values()}) > 1 or min(own.values(), default=1) < 1:
        raise config.error(f"sliding_window_list is {sizes!r:.60}: one size above 0 for all layers is needed")
    if own:
        spec.add_uint32({"attention.sliding_window": next(iter(own.values()))})
        lists = {"swa_layers": [*own], "sliding_window_list": [*own.values()]}
        spec.metadata |= {f"{ARCHITECTURE}.{key}": np.array(values, np.uint32) for key, values in lists.items()}
    return [i in own for i in range(spec.n_layers)]


def _attention(spec: DecoderSpec, sinks: int) -> list[LayerTensor]:
    config, hidden, n = spec.config, spec.hidden_size, spec.n_heads
    nope, rope, v_width = (config.integer(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    rank, q_rank = config.integer("kv_lora_rank"), config.integer("q_lora_rank")
    keys = {"q_lora_rank": q_rank, "kv_lora_rank": rank, "key_length": nope + rope, "value_length": v_width}
    spec.add_uint32({f"attention.{key}": value for key, value in keys.items()})
    sizes, kv_b = (q_rank, rank, n * v_width), (n * (nope + v_width), rank)
    convolutions = [
        LayerTensor(f"{name}.weight", f"{ATTENTION}.{source}.weight", (size, 1, KERNEL), reshaped(KERNEL, size))
        for (name, source), size in zip(CONVOLUTIONS.items(), sizes, strict=True)
    ]
    return [
        *linear("attn_q_a", f"{ATTENTION}.q_a_proj", (q_rank, hidden)),
        spec.norm("attn_q_a_norm", f"{ATTENTION}.q_a_layernorm", q_rank),
        *linear("attn_q_b", f"{ATTENTION}.q_b_proj", (n * (nope + rope), q_rank)),
        *linear("attn_kv_a_mqa", f"{ATTENTION}.kv_a_proj_with_mqa", (rank + rope, hidden)),
        spec.norm("attn_kv_a_norm", f"{ATTENTION}.kv_a_layernorm", rank),
        LayerTensor("attn_k_b.weight", f"{ATTENTION}.kv_b_proj.weight", kv_b, kv_b_keys(n, nope, v_width, by_head=False)),
        LayerTensor("attn_v_b.weight", f"{ATTENTION}.kv_b_proj.weight", kv_b, kv_b_values(n, nope, v_width, by_head=False)),
        *convolutions,
        LayerTensor("attn_param_sink_kv", f"{ATTENTION}.param_sink_compressed_kv", (sinks, rank)),
        LayerTensor("attn_param_sink_k_pe", f"{ATTENTION}.param_sink_k_pe", (sinks, rope)),
        *linear("attn_output", f"{ATTENTION}.o_proj", (hidden, n * v_width)),
    ]


def _indexer(spec: DecoderSpec) -> list[LayerTensor]:
    config, source = spec.config, f"{ATTENTION}.indexer"
    heads, width, q_rank = (config.integer(key) for key in ("index_n_heads", "index_head_dim", "q_lora_rank"))
    return [
        *linear("attn_indexer_q_b", f"{source}.wq_b", (heads * width, q_rank)),
        *linear("attn_indexer_k", f"{source}.wk", (width, spec.hidden_size)),
        spec.norm("attn_indexer_k_norm", f"{source}.k_norm", width),
        *linear("attn_indexer_weights_proj", f"{source}.weights_proj", (heads, spec.hidden_size)),
    ]


def _streams(wide: int, streams: int, part: str) -> list[LayerTensor]:
    """What the streams are mixed with around the attention (part 'attn') or the feed-forward block ('mlp')."""
    size, source = (streams + 2) * streams, f"{part}_mhc_module"
    return [
        *linear(f"{part}_mhc_phi", f"{source}.phi", (size, wide)),
        LayerTensor(f"{part}_mhc_alpha", f"{source}.branch_alpha", (3,)),
        LayerTensor(f"{part}_mhc_beta", f"{source}.branch_beta", (size,)),
        LayerTensor(f"{part}_mhc_gamma", f"{source}.norm_gamma", (wide,)),
    ]


def _experts(spec: DecoderSpec, dense: int) -> list[LayerTensor]:
    config, rows = spec.config, spec.config.integer("moe_intermediate_size")
    n, shared = (
        spec.add_expert_counts("n_routed_experts", rows, layers=spec.n_layers - dense),
        config.integer("n_shared_experts"),
    )
    spec.add_uint32({"leading_dense_block_count": dense, "expert_shared_count": shared, "expert_gating_func": SIGMOID_GATING})
    spec.add_float32({"expert_weights_scale": config.number("routed_scaling_factor", 1.0, positive=True)})
    spec.metadata[f"{ARCHITECTURE}.expert_weights_norm"] = config.flag("norm_topk_prob", True)
    in_router = LayerTensor("exp_probs_b.bias", "mlp.gate.e_score_correction_bias", (n,))
    bias = LayerTensor("exp_probs_b.bias", "mlp.e_score_correction_bias", (n,), alternative=in_router)
    return [*spec.experts(n, rows), bias, *spec.gated_mlp("mlp.shared_experts", shared * rows, "_shexp")]
