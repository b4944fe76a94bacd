"""DeepSeek-V4: compressed sparse attention, several residual streams, and experts by token id in the first layers.

Tensors are named as DeepSeek publishes them, with `model.` before as transformers saves them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ...config import Config
from ...metadata import hparam_keys, uint32_keys
from ...model_spec import ModelSpec, TensorSpec
from ...rope import RopeConfig, read_rope, rope_scaling_keys
from ...tensor_transforms import as_int32
from ..decoder_spec import MAX_EXPERTS, LayerTensor, expert_stacks, linear

ARCHITECTURE = "deepseek4"
SQRT_SOFTPLUS_GATING = 4  # expert_gating_func in the GGUF
EXPERTS = {"gate": "ffn.experts.{}.w1", "down": "ffn.experts.{}.w2", "up": "ffn.experts.{}.w3"}
# kind of attention -> tokens that a compressed entry stands for, in the published models
SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
RATIOS = {SLIDING: 0, SPARSE: 4, HEAVY: 128}
RENAMED = {"layers.": "model.layers.", "embed.": "model.embed_tokens.", "norm.": "model.norm."}
RENAMED |= {"hc_head_": "model.hc_head.hc_", "lm_head.": "head."}
# what transformers takes where config.json says nothing
DEFAULTS = {
    "compress_rope_theta": 160000.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "sliding_window": 128,
}


def deepseek4(config: Config, mla_layout: str) -> ModelSpec:
    """DeepSeek-V4 without its draft layers. Raises FormatError for settings that cannot be converted."""
    config = config.with_defaults(DEFAULTS)
    for key, supported, what in (
        ("hidden_act", "silu", "this activation"),
        ("attention_bias", False, "biases in the attention"),
        ("mlp_bias", False, "biases in the feed-forward blocks"),
        ("tie_word_embeddings", False, "an output tied to the embeddings"),
        ("num_key_value_heads", 1, "more than one key-value head"),
        ("n_shared_experts", 1, "another number of shared experts"),
        ("scoring_func", "sqrtsoftplus", "experts with these scores"),
        ("norm_topk_prob", True, "experts whose weights do not sum to one"),
    ):
        config.require(key, supported, what)
    notes: list[str] = []
    n_layers = config.count("num_hidden_layers")
    kinds, rates = _attention_kinds(config, n_layers), _rates(config)
    n_hashed, rope = _hash_layers(config, n_layers), _rope(config, "compress")
    metadata = hparam_keys(ARCHITECTURE, config, _rope(config, "main"), {"feed_forward_length": "moe_intermediate_size"})
    metadata |= _keys(config, n_layers)
    metadata |= uint32_keys(ARCHITECTURE, {"hash_layer_count": n_hashed})
    metadata[f"{ARCHITECTURE}.attention.compress_ratios"] = np.array([rates[kind] for kind in kinds], np.int32)
    metadata[f"{ARCHITECTURE}.attention.compress_rope_freq_base"] = np.float32(rope.theta)
    metadata |= rope_scaling_keys(ARCHITECTURE, rope, notes, latent=True)
    metadata.pop(f"{ARCHITECTURE}.rope.scaling.attn_factor", None)  # it is 1 in all programs for this architecture
    if set(kinds) - {SLIDING} and (rates[SPARSE], rates[HEAVY]) != (RATIOS[SPARSE], RATIOS[HEAVY]):
        notes.append(f"llama.cpp only loads compression by {RATIOS[SPARSE]} and {RATIOS[HEAVY]}, not these compress_rates")
    tensors = list(_tensors(config, kinds, rates, n_hashed))
    skipped = {"mtp.": "draft layers (multi-token prediction), which have a last mixing of streams of their own"}
    unused = "biases of routers, which choose by token id"
    skipped |= {f"model.layers.{layer}.ffn.gate.bias": unused for layer in range(n_hashed)}
    return ModelSpec(ARCHITECTURE, metadata, tensors, config.integer("vocab_size"), skipped, notes, dict(RENAMED))


def _attention_kinds(config: Config, n_layers: int) -> list[str]:
    """A key of RATIOS for each layer."""
    kinds, ratios = config.get("layer_types"), config.get("compress_ratios")
    if kinds is None and ratios is None:
        return [HEAVY] * min(n_layers, 2) + [SPARSE if i % 2 else HEAVY for i in range(n_layers - 2)]
    if kinds is None:
        by_ratio = {ratio: kind for kind, ratio in RATIOS.items()}
        if not isinstance(ratios, list) or len(ratios) < n_layers or any(ratio not in by_ratio for ratio in ratios):
            raise config.error(f"compress_ratios is {ratios!r:.80}; 0, 4 or 128 is needed for each layer")
        return [by_ratio[ratio] for ratio in ratios[:n_layers]]
    if not isinstance(kinds, list) or len(kinds) != n_layers or any(str(kind) not in RATIOS for kind in kinds):
        raise config.error(f"layer_types is {kinds!r:.80}; one of {', '.join(RATIOS)} is needed for each layer")
    return [str(kind) for kind in kinds]


def _rates(config: Config) -> dict[str, int]:
    """Kind of attention -> tokens that a compressed entry stands for."""
    given = config.section("compress_rates") if config.get("compress_rates") is not None else config.part({})
    older = {SPARSE: "compress_rate_csa", HEAVY: "compress_rate_hca"}
    return {SLIDING: 0} | {kind: config.integer(key, given.integer(kind, RATIOS[kind])) for kind, key in older.items()}


def _hash_layers(config: Config, n_layers: int) -> int:
    """How many layers, from the first on, choose experts by token id."""
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return min(config.integer("num_hash_layers", 3, minimum=0), n_layers)
    count = kinds.count("hash_moe") if isinstance(kinds, list) else 0
    if kinds != ["hash_moe"] * count + ["moe"] * (n_layers - count):
        raise config.error(f"mlp_layer_types is {kinds!r:.80}; only hash_moe before moe, for each layer, can be converted")
    return count


def _rope(config: Config, kind: str) -> RopeConfig:
    """'main': of layers without compressed entries; 'compress': of those that have them. Raises FormatError for one that the
    GGUF cannot say."""
    values = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if isinstance(values, dict) and all(isinstance(values.get(label), dict) for label in ("main", "compress")):
        values = values[kind]
    elif isinstance(values, dict) and kind == "main":
        values = {"rope_theta": config.number("rope_theta", 10000.0, positive=True)}
    elif isinstance(values, dict):
        values = values | {"rope_theta": config.number("compress_rope_theta", positive=True)}
    rope = read_rope(config.with_values({"rope_parameters": values}))
    if rope.scaling not in (("default",) if kind == "main" else ("default", "linear", "yarn", "dynamic")):
        raise config.error(
            f"rotary scaling of type {rope.scaling!r} cannot be converted for {kind} layers of this architecture"
        )
    if rope.settings.number("attention_factor", 1.0) != 1.0:
        raise config.error("an attention_factor of rotary scaling other than 1 cannot be converted for this architecture")
    return rope


def _keys(config: Config, n_layers: int) -> dict[str, Any]:
    head_dim, width, hc = config.integer("head_dim"), config.integer("hidden_size"), config.integer("hc_mult")
    nested = config.get("rope_parameters")
    main = nested.get("main") if isinstance(nested, dict) else None
    fraction = main.get("partial_rotary_factor") if isinstance(main, dict) else None
    default = config.number("qk_rope_head_dim", 64 * head_dim / 512) / head_dim
    fraction = config.number("partial_rotary_factor", default) if fraction is None else fraction
    rotated = int(head_dim * fraction)
    if rotated % 2 or not 0 < rotated <= min(head_dim, config.integer("index_head_dim")):
        raise config.error(f"{rotated} elements of heads with {head_dim}, and of the indexer's, cannot be rotated in pairs")
    experts, used = config.count("n_routed_experts", layers=n_layers), config.integer("num_experts_per_tok")
    if not used <= experts <= MAX_EXPERTS:
        raise config.error(f"{used} of {experts} experts per token; at most {MAX_EXPERTS} can be converted")
    limits = np.full(n_layers, config.number("swiglu_limit", positive=True), np.float32)
    return uint32_keys(
        ARCHITECTURE,
        {
            "attention.head_count_kv": 1,
            "attention.key_length": head_dim,
            "attention.value_length": head_dim,
            "attention.q_lora_rank": config.integer("q_lora_rank"),
            "attention.sliding_window": config.integer("sliding_window"),
            "attention.output_group_count": config.integer("o_groups"),
            "attention.output_lora_rank": config.integer("o_lora_rank"),
            "attention.indexer.head_count": config.integer("index_n_heads"),
            "attention.indexer.key_length": config.integer("index_head_dim"),
            "attention.indexer.top_k": config.integer("index_topk"),
            "rope.dimension_count": rotated,
            "embedding_length_out": width * hc,
            "hyper_connection.count": hc,
            "hyper_connection.sinkhorn_iterations": config.integer("hc_sinkhorn_iters"),
            "expert_count": experts,
            "expert_used_count": used,
            "expert_shared_count": 1,
            "expert_feed_forward_length": config.integer("moe_intermediate_size"),
            "expert_gating_func": SQRT_SOFTPLUS_GATING,
        },
    ) | {
        f"{ARCHITECTURE}.hyper_connection.epsilon": np.float32(config.number("hc_eps", positive=True)),
        f"{ARCHITECTURE}.expert_weights_scale": np.float32(config.number("routed_scaling_factor", positive=True)),
        f"{ARCHITECTURE}.expert_weights_norm": True,
        f"{ARCHITECTURE}.swiglu_clamp_exp": limits,
        f"{ARCHITECTURE}.swiglu_clamp_shexp": limits,
    }


def _tensors(config: Config, kinds: list[str], rates: dict[str, int], n_hashed: int) -> Iterator[TensorSpec]:
    width, n_vocab, hc = (config.integer(key) for key in ("hidden_size", "vocab_size", "hc_mult"))
    yield TensorSpec("token_embd.weight", ("model.embed_tokens.weight",), (n_vocab, width))
    for i, kind in enumerate(kinds):
        layer = [*_attention(config), *_compressors(config, kind, rates[kind]), *_experts(config, i < n_hashed)]
        yield from (tensor.spec(f"blk.{i}", f"model.layers.{i}") for tensor in layer)
    yield TensorSpec("output_norm.weight", ("model.norm.weight",), (width,))
    for part, shape in (("fn", (hc, hc * width)), ("base", (hc,)), ("scale", (1,))):
        yield TensorSpec(f"output_hc_{part}.weight", (f"model.hc_head.hc_{part}",), shape)
    yield TensorSpec("output.weight", ("head.weight",), (n_vocab, width))


def _attention(config: Config) -> list[LayerTensor]:
    """The tensors of every layer's attention, with those that mix streams."""
    width, heads, head_dim = (config.integer(key) for key in ("hidden_size", "num_attention_heads", "head_dim"))
    q_rank, groups, o_rank = (config.integer(key) for key in ("q_lora_rank", "o_groups", "o_lora_rank"))
    if heads % groups:
        raise config.error(f"{heads} heads cannot be projected in {groups} groups")
    kv_norm = LayerTensor("attn_kv_a_norm.weight", "attn.kv_norm.weight", (head_dim,))
    return [
        LayerTensor("attn_norm.weight", "attn_norm.weight", (width,)),
        LayerTensor("attn_sinks.weight", "attn.attn_sink", (heads,)),
        *linear("attn_q_a", "attn.wq_a", (q_rank, width)),
        LayerTensor("attn_q_a_norm.weight", "attn.q_norm.weight", (q_rank,)),
        *linear("attn_q_b", "attn.wq_b", (heads * head_dim, q_rank)),
        *linear("attn_kv", "attn.wkv", (head_dim, width)),
        replace(kv_norm, alternative=replace(kv_norm, source="attn.norm.weight")),  # transformers calls it so
        *linear("attn_output_a", "attn.wo_a", (groups * o_rank, heads * head_dim // groups)),
        *linear("attn_output_b", "attn.wo_b", (width, groups * o_rank)),
        *_mixing(config, "attn"),
    ]


def _mixing(config: Config, block: str) -> list[LayerTensor]:
    """What the streams of residuals are mixed with, before and after a block: 'attn' or 'ffn'."""
    hc, width = config.integer("hc_mult"), config.integer("hidden_size")
    shapes = {"fn": ((2 + hc) * hc, hc * width), "base": ((2 + hc) * hc,), "scale": (3,)}
    return [LayerTensor(f"hc_{block}_{part}.weight", f"hc_{block}_{part}", shape) for part, shape in shapes.items()]


def _compressors(config: Config, kind: str, rate: int) -> list[LayerTensor]:
    """What makes compressed entries, and the indexer that selects them."""
    if kind == SLIDING:
        return []
    own = _compressor(config, "attn_compressor", "attn.compressor", (1 + (kind == SPARSE)), config.integer("head_dim"), rate)
    if kind == HEAVY:
        return own
    width, q_rank = config.integer("hidden_size"), config.integer("q_lora_rank")
    heads, head_dim = config.integer("index_n_heads"), config.integer("index_head_dim")
    return [
        *own,
        *linear("indexer.proj", "attn.indexer.weights_proj", (heads, width)),
        *linear("indexer.attn_q_b", "attn.indexer.wq_b", (heads * head_dim, q_rank)),
        *_compressor(config, "indexer_compressor", "attn.indexer.compressor", 2, head_dim, rate),
    ]


def _compressor(config: Config, name: str, source: str, series: int, head_dim: int, rate: int) -> list[LayerTensor]:
    rows, width = series * head_dim, config.integer("hidden_size")
    return [
        *linear(f"{name}_kv", f"{source}.wkv", (rows, width)),
        *linear(f"{name}_gate", f"{source}.wgate", (rows, width)),
        LayerTensor(f"{name}_ape.weight", f"{source}.ape", (rate, rows)),
        LayerTensor(f"{name}_norm.weight", f"{source}.norm.weight", (head_dim,)),
    ]


def _experts(config: Config, is_hashed: bool) -> list[LayerTensor]:
    width, rows, n_experts = (config.integer(key) for key in ("hidden_size", "moe_intermediate_size", "n_routed_experts"))
    table = config.integer("vocab_size"), config.integer("num_experts_per_tok")
    shared = {"gate": ("w1", (rows, width)), "down": ("w2", (width, rows)), "up": ("w3", (rows, width))}
    return [
        LayerTensor("ffn_norm.weight", "ffn_norm.weight", (width,)),
        *_mixing(config, "ffn"),
        *linear("ffn_gate_inp", "ffn.gate", (n_experts, width)),
        LayerTensor("ffn_gate_tid2eid.weight", "ffn.gate.tid2eid", table, as_int32)
        if is_hashed
        else LayerTensor("exp_probs_b.bias", "ffn.gate.bias", (n_experts,)),
        *expert_stacks(n_experts, rows, width, EXPERTS),
        *(
            tensor
            for part, (stored, shape) in shared.items()
            for tensor in linear(f"ffn_{part}_shexp", f"ffn.shared_experts.{stored}", shape)
        ),
    ]
