"""The text model of MiniMax-M3: heads with norms, partial rotation, experts by sigmoid and a shared one, and an indexer that
selects the blocks of keys which a query sees (MiniMax Sparse Attention)."""

from __future__ import annotations

from ...config import Config
from ...model_spec import ModelSpec
from ...tensor_transforms import add_one
from ..decoder_spec import SIGMOID_GATING, DecoderSpec, LayerTensor, linear
from ..llama import MIXTRAL_EXPERTS
from .gpt_oss import add_swish_limit

ARCHITECTURE = "minimax-m3"
THETA = 5e6
SPARSE = {  # key of sparse_attention_config in published files -> key of transformers
    "sparse_num_index_heads": "index_n_heads",
    "sparse_index_dim": "index_head_dim",
    "sparse_block_size": "index_block_size",
    "sparse_topk_blocks": "index_topk_blocks",
    "sparse_local_block": "index_local_blocks",
}
DEFAULTS = {
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_block_size": 128,
    "index_topk_blocks": 16,
    "index_local_blocks": 1,
}
DEFAULTS |= {"rms_norm_eps": 1e-6, "shared_intermediate_size": 3072, "dense_intermediate_size": 12288}


def minimax_m3(config: Config, mla_layout: str) -> ModelSpec:
    """Raises FormatError for settings that cannot be converted. Layers for multi-token prediction are left out.

    mla_layout  'mainline': with the indexers, as llama.cpp reads them; else without, as ik_llama.cpp, which has dense attention
    """
    sparse = config.get("sparse_attention_config")
    sparse = sparse if isinstance(sparse, dict) else {}
    given = {name: sparse[key] for key, name in SPARSE.items() if key in sparse}
    config = config.with_defaults(given).with_defaults(DEFAULTS)
    for key, supported, what in (
        ("swiglu_alpha", 1.702, "another activation"),
        ("scoring_func", "sigmoid", "this choice of experts"),
        ("use_qk_norm", True, "heads without norms"),
    ):
        config.require(key, supported, what)
    if config.get("hidden_act", "silu") not in ("silu", "swigluoai"):
        raise config.error(f"hidden_act is {config.get('hidden_act')!r:.40}: this activation cannot be converted")
    n_layers = config.count("num_hidden_layers")
    has_experts = _kinds(config, "mlp_layer_types", "sparse", config.get("moe_layer_freq"), n_layers, True)
    has_indexer = _kinds(config, "layer_types", "minimax_m3_sparse", sparse.get("sparse_attention_freq"), n_layers, False)
    dense = next((i for i, each in enumerate(has_experts) if each), n_layers)
    if not all(has_experts[dense:]):
        raise config.error("layers without experts after the first with them cannot be converted")
    head_dim = config.integer("head_dim", 128)
    rope = config.with_defaults({"rope_theta": THETA})
    if config.get("rotary_dim") is not None:
        rope = rope.with_defaults({"partial_rotary_factor": config.integer("rotary_dim") / head_dim})
    values = {"head_dim": head_dim, "layer_types": None}
    spec = DecoderSpec(
        ARCHITECTURE, config.with_values(values), rope=rope, keys={"feed_forward_length": "dense_intermediate_size"}
    )
    rows, shared_rows = config.integer("intermediate_size"), config.integer("shared_intermediate_size")
    shared = config.integer("n_shared_experts", max(1, shared_rows // rows), minimum=0)
    if shared_rows != shared * rows:
        raise config.error(f"shared_intermediate_size is {shared_rows}, not {shared} times intermediate_size, which is {rows}")
    n = spec.add_expert_counts("num_local_experts", rows, layers=n_layers - dense)
    spec.add_uint32({"leading_dense_block_count": dense, "expert_shared_count": shared, "expert_gating_func": SIGMOID_GATING})
    spec.add_float32({"expert_weights_scale": config.number("routed_scaling_factor", 2.0, positive=True)})
    spec.metadata[f"{ARCHITECTURE}.expert_weights_norm"] = True
    add_swish_limit(spec)
    heads, width = config.integer("index_n_heads"), config.integer("index_head_dim")
    keeps_indexer = mla_layout == "mainline"
    if any(has_indexer) and keeps_indexer:
        if spec.n_heads % heads or width < spec.rotary_dim:
            raise config.error(f"{heads} index heads of {width} elements do not fit {spec.n_heads} heads")
        spec.add_uint32({"attention.indexer.head_count": heads, "attention.indexer.key_length": width})
        spec.add_uint32({f"attention.indexer.{key}": config.integer(name) for key, name in _INDEXER_SIZES.items()})
        spec.add_uint32({"attention.indexer.local_blocks": config.integer("index_local_blocks", minimum=0)})
    elif any(has_indexer):
        block, blocks = config.integer("index_block_size"), config.integer("index_topk_blocks")
        spec.notes.append(
            f"the indexers of sparse attention are left out, as ik_llama.cpp has none: attention to more than {block * blocks} "
            "tokens is dense; --mla-layout mainline keeps them"
        )
        for i, each in enumerate(has_indexer):
            names = ("index_q_proj", "index_k_proj", "index_q_norm", "index_k_norm") if each else ()
            spec.skipped_prefixes |= {f"model.layers.{i}.self_attn.{name}.": "indexer" for name in names}
    spec.skipped_prefixes |= {"mtp.": "multi-token prediction layers", "model.mtp.": "multi-token prediction layers"}

    def layer(i: int) -> list[LayerTensor]:
        return [
            spec.norm("attn_norm", "input_layernorm", transform=add_one),
            *spec.attention(head_norms=add_one),
            *(_indexer(spec, heads, width) if has_indexer[i] and keeps_indexer else []),
            spec.norm("ffn_norm", "post_attention_layernorm", transform=add_one),
            *(_experts(spec, n, rows, shared_rows) if has_experts[i] else spec.gated_mlp()),
        ]

    return spec.build(layer, norm_transform=add_one)


_INDEXER_SIZES = {"block_size": "index_block_size", "top_k": "index_topk_blocks"}  # metadata key -> key of config.json


def _indexer(spec: DecoderSpec, heads: int, width: int) -> list[LayerTensor]:
    return [
        *linear("indexer.q_proj", "self_attn.index_q_proj", (heads * width, spec.hidden_size)),
        *linear("indexer.k_proj", "self_attn.index_k_proj", (width, spec.hidden_size)),
        *(spec.norm(f"indexer.{p}_norm", f"self_attn.index_{p}_norm", width, add_one) for p in "qk"),
    ]


def _experts(spec: DecoderSpec, n: int, rows: int, shared_rows: int) -> list[LayerTensor]:
    block = "block_sparse_moe"
    return [
        *spec.experts(n, rows, MIXTRAL_EXPERTS, f"{block}.gate"),
        LayerTensor("exp_probs_b.bias", f"{block}.e_score_correction_bias", (n,)),
        *(spec.gated_mlp(f"{block}.shared_experts", shared_rows, "_shexp") if shared_rows else []),
    ]


def _kinds(config: Config, key: str, kind: str, flags: object, n: int, default: bool) -> list[bool]:
    """For each layer whether it is of a kind: from a list of names, or of 0 and 1, as published files have it."""
    values = config.get(key)
    if isinstance(values, list) and len(values) >= n:
        return [value == kind for value in values[:n]]
    if isinstance(flags, list) and len(flags) >= n:
        return [bool(flag) for flag in flags[:n]]
    return [default] * n
