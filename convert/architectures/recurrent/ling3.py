"""Ling 3 (bailing hybrid): delta attention, every few layers latent attention whose heads are gated, experts in groups.

Both llama.cpp and ik_llama.cpp know this architecture as bailingmoe3, with latent attention in llama.cpp's layout.
"""

from __future__ import annotations

import numpy as np

from ...config import Config
from ...draft_layers import LAYER_NORM_NAMES
from ...model_spec import ModelSpec
from ...tensor_transforms import reshaped
from ..decoder_spec import DecoderSpec, LayerTensor
from ..experts.mixtures import BAILING_NAMES
from .kimi_layers import (
    add_routing,
    delta_attention,
    delta_output,
    dense_layers,
    latent_attention,
    with_either_source,
    with_our_keys,
)
from .layers import add_key_value_heads, attention_layers

ARCHITECTURE = "bailingmoe3"
SOURCE = "attention"
FULL_RANK = {"f": "ssm_f_a", "g": "ssm_g_a"}
# lists of config.json with a limit for each layer's gate and up -> whose these are
LIMITS = {"expert_swiglu_limit_list": "exp", "share_expert_swiglu_limit_list": "shexp"}


def ling3(config: Config, mla_layout: str) -> ModelSpec:
    """Raises FormatError for settings that cannot be converted."""
    for key, supported, what in (
        ("hidden_act", "silu", "this activation"),
        ("score_function", "sigmoid", "this score of experts"),
        ("attention_bias", False, "biases in the attention"),
        ("use_bias", False, "a model with biases"),
        ("use_qkv_bias", False, "a model with biases"),
        ("use_qk_norm", True, "delta attention without normalised queries and keys"),
        ("use_mla_nope", False, "latent attention without positions"),
        ("rope_interleave", True, "another order of rotated elements"),
        ("no_kda_lora", True, "a gate of delta attention from two matrices"),
        ("kda_safe_gate", True, "a decay without a lower bound"),
        ("gated_attention_proj_granularity_type", "head_wise", "another gate of latent attention"),
        ("n_shared_experts", 1, "another number of shared experts"),
        ("num_shared_experts", 1, "another number of shared experts"),
        ("mtp_use_kda", False, "delta attention in draft layers"),
    ):
        config.require(key, supported, what)
    config, rope = _with_our_keys(config), config.integer("qk_rope_head_dim")
    whole = {"head_dim": rope, "partial_rotary_factor": None}  # the rotated elements are a part by themselves
    if isinstance(config.get("rope_parameters"), dict):
        whole["rope_parameters"] = config.get("rope_parameters") | {"partial_rotary_factor": 1.0}
    spec = DecoderSpec(ARCHITECTURE, config.with_values(whole))
    if spec.rope.scaling != "default":
        raise config.error(f"rotary scaling {spec.rope.scaling} cannot be converted for this architecture")
    types = config.get("layer_types")
    is_attention = _default_layers(spec) if types is None else attention_layers(spec, types)
    drafts = config.count("num_nextn_predict_layers", 0, minimum=0)
    add_key_value_heads(spec, is_attention, 1)
    n = spec.n_heads
    delta = [
        *delta_attention(
            spec,
            LayerTensor("ssm_a", f"{SOURCE}.A_log", (n,), reshaped(1, n, exponential=1)),
            source=SOURCE,
            full_rank=FULL_RANK,
        ),
        *with_either_source(delta_output(spec, f"{SOURCE}.o_proj"), delta_output(spec, f"{SOURCE}.dense")),
    ]
    spec.metadata[f"{ARCHITECTURE}.kda.safe_gate"] = True
    bound = config.number("kda_lower_bound")
    if bound >= 0:
        raise config.error(f"kda_lower_bound is {bound:g}; a number below 0 is needed")
    spec.add_float32({"kda.gate_lower_bound": bound})
    width = config.integer("linear_head_dim")
    latent = latent_attention(spec, source=SOURCE, output="dense", gate_rows=1, value_length=width)
    dense = dense_layers(spec)
    experts = _experts(spec, dense)
    _add_limits(spec, drafts)

    def layer(number: int) -> list[LayerTensor]:
        return [
            spec.norm("attn_norm", "input_layernorm"),
            *(latent if number >= spec.n_layers or is_attention[number] else delta),
            spec.norm("ffn_norm", "post_attention_layernorm"),
            *(spec.gated_mlp() if number < dense else experts),
        ]

    spec.add_draft_layers(
        lambda number: [*layer(number), spec.norm("layer_output_norm", "final_layernorm")],
        names=LAYER_NORM_NAMES,
        metadata=_of_drafts(spec, drafts),
    )
    return spec.build(layer, BAILING_NAMES)


def _with_our_keys(config: Config) -> Config:
    """Heads of delta attention are as many as the others and have head_dim elements."""
    heads = {"linear_num_heads": "num_attention_heads", "linear_head_dim": "head_dim"}
    heads |= {"linear_conv_kernel_dim": "short_conv_kernel_size"}
    known = {ours: config.get(theirs) for ours, theirs in heads.items() if config.get(theirs) is not None}
    return with_our_keys(config.with_defaults(known))


def _default_layers(spec: DecoderSpec) -> list[bool]:
    """The last layer of each group is attention, and all of a group that is not whole."""
    size = spec.config.integer("layer_group_size")
    whole = spec.n_layers // size * size
    return [(i + 1) % size == 0 or i >= whole for i in range(spec.n_layers)]


def _experts(spec: DecoderSpec, dense: int) -> list[LayerTensor]:
    rows, n = spec.config.integer("moe_intermediate_size"), add_routing(spec, dense, always_groups=True)
    shared_rows = spec.config.integer("moe_shared_expert_intermediate_size", rows)
    spec.add_uint32({"expert_shared_feed_forward_length": shared_rows})
    return [
        *spec.experts(n, rows),
        LayerTensor("exp_probs_b.bias", "mlp.gate.expert_bias", (n,)),
        *spec.gated_mlp("mlp.shared_experts", shared_rows, "_shexp"),
    ]


def _add_limits(spec: DecoderSpec, drafts: int) -> None:
    """The metadata of limits, where config.json has them. Raises FormatError for what is no list of numbers."""
    for key, part in LIMITS.items():
        values = spec.config.get(key)
        if values is None:
            continue
        if not isinstance(values, list) or not all(v is None or isinstance(v, int | float) for v in values):
            raise spec.config.error(f"{key} is {values!r:.60}; a list of numbers is needed")
        limits = [float(v or 0) for v in values[: spec.n_layers + drafts]]
        limits += [0.0] * (spec.n_layers + drafts - len(limits))
        spec.metadata[f"{ARCHITECTURE}.swiglu_clamp_{part}"] = np.array(limits, np.float32)


def _of_drafts(spec: DecoderSpec, drafts: int) -> dict[str, np.ndarray]:
    """Metadata for each layer, with draft layers; the spec keeps what it says of the others."""
    keys = ["attention.head_count_kv", *(f"swiglu_clamp_{part}" for part in LIMITS.values())]
    found = {key: spec.metadata[key] for key in (f"{ARCHITECTURE}.{key}" for key in keys) if key in spec.metadata}
    heads = f"{ARCHITECTURE}.attention.head_count_kv"
    with_drafts = found | {heads: np.concatenate([found[heads], np.ones(drafts, np.uint32)])}
    spec.metadata |= {key: values[: spec.n_layers] for key, values in found.items()}
    return with_drafts
