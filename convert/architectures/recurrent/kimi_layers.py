"""What Kimi Linear, Kimi K3 and Ling 3 share: delta attention with a decay per element of a key, latent attention, routing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...config import Config
from ...tensor_transforms import kv_b_keys, kv_b_values, reshaped
from ..decoder_spec import SIGMOID_GATING, DecoderSpec, LayerTensor, linear
from .layers import ATTENTION

# key of ours -> other names of it in config.json
_ALIASES = {
    "max_position_embeddings": ("model_max_length",),
    "num_experts": ("num_local_experts", "n_routed_experts"),
    "num_experts_per_tok": ("num_experts_per_token",),
    "n_shared_experts": ("num_shared_experts",),
    "norm_topk_prob": ("moe_renormalize",),
    "n_group": ("num_expert_group",),
}
SPARSE = "block_sparse_moe"
_LINEAR_KEYS = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads"}
_LINEAR_KEYS |= {"short_conv_kernel_size": "linear_conv_kernel_dim"}
LINEAR_DEFAULTS = {"linear_head_dim": 128, "linear_num_heads": 32, "linear_conv_kernel_dim": 4}


def with_our_keys(config: Config) -> Config:
    """config.json under the keys that transformers has, whichever of its names they have."""
    given = {ours: config.get(other) for ours, names in _ALIASES.items() for other in names if config.get(other) is not None}
    config = config.with_defaults({ours: value for ours, value in given.items() if config.get(ours) is None})
    if config.get("linear_attn_config") is not None:
        linear_config = config.section("linear_attn_config")
        values = {ours: linear_config.get(key) for key, ours in _LINEAR_KEYS.items() if linear_config.get(key) is not None}
        config = config.with_values(values)
    return config.with_defaults(LINEAR_DEFAULTS)


def layer_types(spec: DecoderSpec) -> object:
    """layer_types, or what linear_attn_config says: layers of attention, counted from 1."""
    types = spec.config.get("layer_types")
    if types is not None or spec.config.get("linear_attn_config") is None:
        return types
    settings = spec.config.section("linear_attn_config")
    listed = settings.get("full_attn_layers")
    if not isinstance(listed, list):
        raise spec.config.error(f"full_attn_layers is {listed!r:.60}; a list of layers is needed")
    others = settings.get("kda_layers")
    if others is not None and {*others, *listed} != {*range(1, spec.n_layers + 1)}:
        raise spec.config.error(f"full_attn_layers and kda_layers are not all of {spec.n_layers} layers")
    return [ATTENTION[0] if i + 1 in listed else "linear_attention" for i in range(spec.n_layers)]


def dense_layers(spec: DecoderSpec) -> int:
    """How many layers without experts come first. Raises FormatError for those in another place."""
    types = spec.config.get("mlp_layer_types")
    if not isinstance(types, list):
        return spec.config.integer("first_k_dense_replace", 1, minimum=0)
    dense = types.count("dense")
    if types != ["dense"] * dense + ["sparse"] * (spec.n_layers - dense):
        raise spec.config.error(f"mlp_layer_types is {types!r:.80}; only dense layers before sparse ones can be converted")
    return dense


def add_routing(spec: DecoderSpec, dense: int, *, always_groups: bool = False) -> int:
    """Adds the metadata of experts by sigmoid plus bias after `dense` dense layers. Returns their number.

    always_groups: that of one group too, without which ik_llama.cpp does not load some architectures.
    """
    config = spec.config
    n = spec.add_expert_counts("num_experts", config.integer("moe_intermediate_size"), layers=spec.n_layers - dense)
    shared = config.integer("n_shared_experts", 1)
    spec.add_uint32({"leading_dense_block_count": dense, "expert_shared_count": shared, "expert_gating_func": SIGMOID_GATING})
    groups = config.integer("n_group", 1)
    if groups > 1 or always_groups:
        spec.add_uint32({"expert_group_count": groups, "expert_group_used_count": config.integer("topk_group", 1)})
    spec.add_float32({"expert_weights_scale": config.number("routed_scaling_factor", 1.0, positive=True)})
    spec.metadata[f"{spec.architecture}.expert_weights_norm"] = config.flag("norm_topk_prob", True)
    return n


def with_either_source(tensors: list[LayerTensor], others: list[LayerTensor]) -> list[LayerTensor]:
    """The same tensors, each from one of two places in the checkpoint."""
    return [replace(own, alternative=other) for own, other in zip(tensors, others, strict=True)]


def delta_attention(
    spec: DecoderSpec, decay: LayerTensor, *, source: str = "self_attn", full_rank: Mapping[str, str] | None = None
) -> list[LayerTensor]:
    """The tensors of a layer of delta attention but attn_output; adds their metadata.

    decay: ssm_a; full_rank: of f and g those that are one matrix -> its name in the GGUF; the others are two of low rank.
    Raises FormatError for other than the model's number of heads.
    """
    config, hidden, full_rank = spec.config.with_defaults(LINEAR_DEFAULTS), spec.hidden_size, full_rank or {}
    n, width, kernel = (config.integer(key) for key in ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"))
    if n != spec.n_heads:
        raise config.error(f"{n} heads of delta attention and {spec.n_heads} of the other kind")
    spec.add_uint32({"ssm.conv_kernel": kernel, "kda.head_dim": width})
    size, tensors = n * width, []
    for part in "qkv":
        tensors += linear(f"attn_{part}", f"{source}.{part}_proj", (size, hidden))
        convolution = LayerTensor(
            f"ssm_conv1d_{part}.weight", f"{source}.{part}_conv1d.weight", (size, 1, kernel), reshaped(kernel, 1, size)
        )
        tensors.append(replace(convolution, alternative=replace(convolution, shape=(size, kernel))))
    for part in "fg":
        if part in full_rank:
            tensors += linear(full_rank[part], f"{source}.{part}_proj", (size, hidden))
        else:
            tensors += linear(f"ssm_{part}_a", f"{source}.{part}_a_proj", (width, hidden))
            tensors += linear(f"ssm_{part}_b", f"{source}.{part}_b_proj", (size, width))
    return [
        *tensors,
        *linear("ssm_beta", f"{source}.b_proj", (n, hidden)),
        decay,
        LayerTensor("ssm_dt.bias", f"{source}.dt_bias", (size,)),
        spec.norm("ssm_norm", f"{source}.o_norm", width),
    ]


def delta_output(spec: DecoderSpec, source: str) -> list[LayerTensor]:
    """attn_output of a layer of delta attention."""
    return linear(
        "attn_output", source, (spec.hidden_size, spec.n_heads * int(spec.metadata[f"{spec.architecture}.kda.head_dim"]))
    )


def latent_attention(
    spec: DecoderSpec, *, source: str = "self_attn", output: str = "o_proj", gate_rows: int = 0, value_length: int = 0
) -> list[LayerTensor]:
    """The tensors of a layer of latent attention; adds their metadata.

    gate_rows: of a gate of the result, for each head; 0: there is none. value_length: as the metadata say it, by default the
    latent's size.
    """
    config, hidden, n = spec.config, spec.hidden_size, spec.n_heads
    nope, rope, v_width = (config.integer(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    rank, q_rank = config.integer("kv_lora_rank"), config.integer("q_lora_rank", 0, minimum=0)
    keys = {"kv_lora_rank": rank, "key_length": rank + rope, "value_length": value_length or rank}
    keys |= {"key_length_mla": nope + rope, "value_length_mla": v_width} | ({"q_lora_rank": q_rank} if q_rank else {})
    spec.add_uint32({f"attention.{key}": value for key, value in keys.items()})
    kv_b, q_rows = (n * (nope + v_width), rank), n * (nope + rope)
    queries = linear("attn_q", f"{source}.q_proj", (q_rows, hidden))
    if q_rank:
        queries = [
            *linear("attn_q_a", f"{source}.q_a_proj", (q_rank, hidden)),
            spec.norm("attn_q_a_norm", f"{source}.q_a_layernorm", q_rank),
            *linear("attn_q_b", f"{source}.q_b_proj", (q_rows, q_rank)),
        ]
    return [
        *queries,
        *linear("attn_kv_a_mqa", f"{source}.kv_a_proj_with_mqa", (rank + rope, hidden)),
        spec.norm("attn_kv_a_norm", f"{source}.kv_a_layernorm", rank),
        LayerTensor("attn_k_b.weight", f"{source}.kv_b_proj.weight", kv_b, kv_b_keys(n, nope, v_width, by_head=True)),
        LayerTensor("attn_v_b.weight", f"{source}.kv_b_proj.weight", kv_b, kv_b_values(n, nope, v_width, by_head=True)),
        *(linear("attn_gate", f"{source}.g_proj", (n * gate_rows, hidden)) if gate_rows else []),
        *linear("attn_output", f"{source}.{output}", (hidden, n * v_width)),
    ]
