"""DeepSeek-V2 to V3.2, Kimi K2, GLM-4.7-Flash, GLM-5, Mistral Small 4: multi-head latent attention (MLA) and experts.

Latent attention is written in one of three layouts, which differ in how kv_b_proj is stored and in the metadata of head counts
and lengths: 'ik' (attn_kv_b, and also its parts attn_k_b and attn_v_b, 2-D), 'mainline' (only these parts, 3-D, with one
key-value head of the latent's width), 'legacy' (only attn_kv_b).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ....data_classes import dataclass
from ...config import Config
from ...draft_layers import DEEPSEEK_NAMES, nextn_tensors
from ...metadata import hparam_keys, uint32_keys
from ...model_spec import ModelSpec
from ...rope import RopeConfig, read_rope, rope_scaling_keys
from ...tensor_spec import DraftLayer, DraftLayers, TensorSpec
from ...tensor_transforms import Transform, kv_b_keys, kv_b_values, permute_heads, unchanged
from ..decoder_spec import expert_stacks, linear

GATING_FUNCTIONS = {"softmax": 1, "sigmoid": 2}
# with the defaults of V3's own code
V3_MODELS = ("DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM", "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")
MISTRAL4_ROPE = {"type": "yarn", "rope_theta": 10000.0, "factor": 128.0, "original_max_position_embeddings": 8192}
MISTRAL4_ROPE |= {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
MISTRAL4_DEFAULTS = {"norm_topk_prob": True, "rope_parameters": MISTRAL4_ROPE}
PROJECTIONS = ("gate", "up", "down")


@dataclass(frozen=True)
class LatentSizes:
    """Sizes of the latent attention.

    q_rank, kv_rank     of the latents; q_rank is 0 if queries have none (V2-Lite)
    nope_dim, rope_dim  elements of a head's query and key without and with rotary embedding
    value_dim           elements of a head's value
    bias                of the projections to the latents and of the output
    halves              the checkpoint rotates halves of the rotated elements with each other, not neighbours as the GGUF
    """

    n_heads: int
    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    bias: bool = False
    halves: bool = False


def deepseek2(config: Config, mla_layout: str) -> ModelSpec:
    """DeepSeek-V2, V2-Lite, V3 and R1, Kimi K2. Raises FormatError for settings that cannot be converted."""
    config.require("moe_layer_freq", 1, "experts in only some of the layers")
    if not _is_v3(config):  # DeepSeek's own code does not scale such weights, transformers does not normalise them
        config.lose_unless("norm_topk_prob", False, "DeepSeek-V2's weights of experts are not normalised, as in transformers")
        config = config.with_values({"norm_topk_prob": False})
    return _spec("deepseek2", config, mla_layout)


def glm4_moe_lite(config: Config, mla_layout: str) -> ModelSpec:
    """GLM-4.7-Flash, whose layers are those of DeepSeek-V3. Raises FormatError for settings that cannot be converted."""
    return _spec("deepseek2", _with_dense_layers(config, 1), mla_layout)


def mistral4(config: Config, mla_layout: str) -> ModelSpec:
    """Mistral Small 4: as DeepSeek-V2; the scores of queries grow with their position (llama_4_scaling_beta).

    Raises FormatError for settings that cannot be converted.
    """
    config = config.with_defaults(MISTRAL4_DEFAULTS)
    config.lose_unless("n_group", 1, "readers of GGUF weigh groups otherwise in this architecture, so there are none")
    config = config.with_values({"n_group": 1})
    spec = _spec("mistral4", config, mla_layout)
    settings = read_rope(config).settings
    if settings.number("llama_4_scaling_beta", 0.0):
        length = settings.integer("original_max_position_embeddings")
        spec.metadata.update(uint32_keys("mistral4", {"attention.temperature_length": length}))
        spec.metadata["mistral4.attention.temperature_scale"] = np.float32(settings.number("llama_4_scaling_beta"))
    return spec


def deepseek32(config: Config, mla_layout: str) -> ModelSpec:
    """DeepSeek-V3.2: as V3, with an indexer that selects the keys of long texts (DSA, arXiv:2512.02556)."""
    return _with_indexer("deepseek32", _with_dense_layers(config, 3), mla_layout, lambda i: True)


def glm_dsa(config: Config, mla_layout: str) -> ModelSpec:
    """GLM-5: as DeepSeek-V3.2; layers may share the selection of an earlier one (indexer_types)."""
    n_layers = config.count("num_hidden_layers")
    types, pattern = config.get("indexer_types"), config.get("index_topk_pattern")
    if types is None and isinstance(pattern, str):
        types = [{"F": "full", "S": "shared"}.get(letter) for letter in pattern]
    elif types is None:
        period, offset = max(config.integer("index_topk_freq", 1, minimum=0), 1), config.integer("index_skip_topk_offset", 2)
        types = ["full" if max(i - offset + 1, 0) % period == 0 else "shared" for i in range(n_layers)]
    if not isinstance(types, list) or len(types) != n_layers or set(types) - {"full", "shared"} or types[0] != "full":
        raise config.error(f"indexer_types is {types!r:.80}; 'full' or 'shared' is needed for each layer, the first one full")
    spec = _with_indexer("glm-dsa", _with_dense_layers(config, 3), mla_layout, lambda i: types[i] == "full")
    if "shared" in types:
        spec.metadata["glm-dsa.attention.indexer.types"] = np.array([t == "full" for t in types], bool)
    return spec


def _with_dense_layers(config: Config, default: int) -> Config:
    """The config with first_k_dense_replace, which newer files say as mlp_layer_types."""
    types = config.get("mlp_layer_types")
    dense = min(config.integer("first_k_dense_replace", default, minimum=0), config.integer("num_hidden_layers"))
    if isinstance(types, list):
        dense, n_layers = types.count("dense"), config.count("num_hidden_layers")
        if types != ["dense"] * dense + ["sparse"] * (n_layers - dense):
            raise config.error(f"mlp_layer_types is {types!r:.80}; only dense layers before sparse ones can be converted")
    return config.with_values({"first_k_dense_replace": dense})


def _with_indexer(architecture: str, config: Config, mla_layout: str, has_indexer: Callable[[int], bool]) -> ModelSpec:
    """has_indexer: layer number -> whether it has an indexer of its own."""
    heads, width = config.integer("index_n_heads"), config.integer("index_head_dim")
    config.integer("q_lora_rank")
    config.require("rope_interleave", True, "this order of rotary dimensions")
    keys = {"head_count": heads, "key_length": width, "top_k": config.integer("index_topk")}
    spec = _spec(architecture, config, mla_layout)
    spec.metadata.update(uint32_keys(architecture, {f"attention.indexer.{key}": value for key, value in keys.items()}))
    hidden_size, q_rank = config.integer("hidden_size"), config.integer("q_lora_rank")

    def indexer(i: int) -> list[TensorSpec]:
        block, source = f"blk.{i}.indexer", f"model.layers.{i}.self_attn.indexer"
        return [
            TensorSpec(f"{block}.{name}", (f"{source}.{stored}",), shape)
            for name, stored, shape in (
                ("attn_q_b.weight", "wq_b.weight", (heads * width, q_rank)),
                ("attn_k.weight", "wk.weight", (width, hidden_size)),
                ("k_norm.weight", "k_norm.weight", (width,)),
                ("k_norm.bias", "k_norm.bias", (width,)),
                ("proj.weight", "weights_proj.weight", (heads, hidden_size)),
            )
        ]

    n_layers = config.count("num_hidden_layers")
    spec.tensors.extend(tensor for i in range(n_layers) if has_indexer(i) for tensor in indexer(i))
    if spec.draft is None:
        return spec
    drafts = enumerate(spec.draft.layers, n_layers)
    layers = tuple(replace(layer, optional=(*layer.optional, *indexer(i))) for i, layer in drafts)
    return replace(spec, draft=replace(spec.draft, layers=layers))


def _spec(architecture: str, config: Config, mla_layout: str) -> ModelSpec:
    """What all models with this attention and these experts have."""
    notes: list[str] = []
    config.require("hidden_act", "silu", "this activation")
    attention = latent_attention(config)
    rope = latent_rope(config)
    metadata = hparam_keys(architecture, config, rope)
    metadata |= attention_keys(architecture, attention, mla_layout)
    metadata |= _expert_keys(architecture, config)
    metadata |= uint32_keys(architecture, {"rope.dimension_count": attention.rope_dim})
    metadata |= rope_scaling_keys(architecture, rope, notes, latent=True)

    n_layers = config.count("num_hidden_layers")
    tensors = list(_tensors(config, attention, mla_layout, n_layers))
    draft = _draft_layers(config, attention, mla_layout, n_layers)
    if draft is not None and architecture == "deepseek2":
        draft = replace(draft, refused_by="ik_llama.cpp", default=mla_layout == "mainline")
    skipped = {"lm_head.weight": "output tied to the embeddings"} if config.flag("tie_word_embeddings", False) else {}
    return ModelSpec(architecture, metadata, tensors, config.integer("vocab_size"), skipped, notes, draft=draft)


def latent_rope(config: Config) -> RopeConfig:
    """As `read_rope`, for latent attention, for which files have no tensor of factors."""
    rope = read_rope(config)
    if rope.scaling not in ("llama3", "longrope"):
        return rope
    config.lose(f"a GGUF has no keys for rotary scaling of type {rope.scaling!r} with latent attention: nothing is scaled")
    return replace(rope, scaling="default")


def _draft_layers(config: Config, a: LatentSizes, mla_layout: str, n_layers: int) -> DraftLayers | None:
    """The draft layers after the last layer, with experts and tensors of their own."""
    sizes = config.integer("vocab_size"), config.integer("hidden_size")
    count = config.count("num_nextn_predict_layers", 0, minimum=0)
    if not count:
        return None
    config.count("n_routed_experts", layers=count)
    numbers = range(n_layers, n_layers + count)
    layers = []
    for i in numbers:
        nextn, optional = nextn_tensors(f"blk.{i}", f"model.layers.{i}", sizes, DEEPSEEK_NAMES)
        layers.append(DraftLayer(f"model.layers.{i}.", (*_layer_tensors(config, a, mla_layout, i), *nextn), tuple(optional)))
    return DraftLayers(tuple(layers), tuple(layer.prefix for layer in layers))


def latent_attention(config: Config) -> LatentSizes:
    """The sizes of the attention. Raises FormatError for missing or impossible ones."""
    n_heads = config.integer("num_attention_heads")
    if config.integer("num_key_value_heads", n_heads) != n_heads:
        raise config.error(f"num_key_value_heads is {config.get('num_key_value_heads')}; latent attention has one per head")
    sizes = (config.integer(k) for k in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    bias, halves = config.flag("attention_bias", False), not config.flag("rope_interleave", True)
    return LatentSizes(n_heads, config.integer("q_lora_rank", 0, minimum=0), *sizes, bias=bias, halves=halves)


def attention_keys(architecture: str, a: LatentSizes, mla_layout: str) -> dict[str, Any]:
    """The metadata of the attention's sizes."""
    values = {"attention.q_lora_rank": a.q_rank} if a.q_rank else {}
    values["attention.kv_lora_rank"] = a.kv_rank
    if mla_layout == "mainline":
        values |= {
            "attention.head_count_kv": 1,
            "attention.key_length": a.kv_rank + a.rope_dim,
            "attention.value_length": a.kv_rank,
            "attention.key_length_mla": a.nope_dim + a.rope_dim,
            "attention.value_length_mla": a.value_dim,
        }
    else:
        values |= {
            "attention.head_count_kv": a.n_heads,
            "attention.key_length": a.nope_dim + a.rope_dim,
            "attention.value_length": a.value_dim,
        }
    return uint32_keys(architecture, values)


def _expert_keys(architecture: str, config: Config) -> dict[str, Any]:
    is_v3 = _is_v3(config)
    scoring = config.get("scoring_func", "sigmoid" if is_v3 else "softmax")
    if not isinstance(scoring, str) or scoring not in GATING_FUNCTIONS:
        raise config.error(f"scoring_func is {scoring!r}; known are {', '.join(GATING_FUNCTIONS)}")
    n_layers, dense = config.count("num_hidden_layers"), config.integer("first_k_dense_replace", 0, minimum=0)
    if dense > n_layers:
        raise config.error(f"first_k_dense_replace is {dense}, of {n_layers} layers")
    experts = config.count("n_routed_experts", layers=n_layers - dense)
    used = config.integer("num_experts_per_tok")
    if used > experts:
        raise config.error(f"num_experts_per_tok is {used}, more than n_routed_experts, which is {experts}")
    values = {
        "leading_dense_block_count": dense,
        "expert_count": experts,
        "expert_used_count": used,
        "expert_shared_count": config.integer("n_shared_experts", 0, minimum=0),
        "expert_feed_forward_length": config.integer("moe_intermediate_size"),
        "expert_gating_func": GATING_FUNCTIONS[scoring],
    }
    groups = config.integer("n_group", 1)
    if groups > 1 and _topk_method(config) != "greedy":
        used_groups = config.integer("topk_group")
        if experts % groups:
            raise config.error(f"n_routed_experts is {experts}, not a multiple of n_group, which is {groups}")
        if used_groups > groups:
            raise config.error(f"topk_group is {used_groups}, more than n_group, which is {groups}")
        values |= {"expert_group_count": groups, "expert_group_used_count": used_groups}
    return uint32_keys(architecture, values) | {
        f"{architecture}.expert_weights_scale": np.float32(config.number("routed_scaling_factor", 1.0, positive=True)),
        f"{architecture}.expert_weights_norm": config.flag("norm_topk_prob", is_v3),
    }


def _is_v3(config: Config) -> bool:
    """Whether V3's defaults hold; `architectures` of a text_config has not been checked before."""
    names = config.get("architectures")
    return isinstance(names, list) and any(name in V3_MODELS for name in names)


def _topk_method(config: Config) -> str:
    """'greedy', 'group_limited_greedy' (V2) or 'noaux_tc' (V3: a bias on every expert's score)."""
    method = config.get("topk_method", "noaux_tc" if _is_v3(config) else "greedy")
    known = ("greedy", "group_limited_greedy", "noaux_tc")
    if method not in known:
        raise config.error(f"topk_method is {method!r}; known are {', '.join(known)}")
    return method


def _tensors(config: Config, a: LatentSizes, mla_layout: str, n_layers: int) -> Iterator[TensorSpec]:
    vocab_size, hidden_size = config.integer("vocab_size"), config.integer("hidden_size")
    shape, is_tied = (vocab_size, hidden_size), config.flag("tie_word_embeddings", False)
    fallback = "lm_head.weight" if is_tied else None
    yield TensorSpec("token_embd.weight", ("model.embed_tokens.weight",), shape, fallback_source=fallback)
    for i in range(n_layers):
        yield from _layer_tensors(config, a, mla_layout, i)
    yield TensorSpec("output_norm.weight", ("model.norm.weight",), (hidden_size,))
    if not is_tied:
        yield TensorSpec("output.weight", ("lm_head.weight",), shape)


def _layer_tensors(config: Config, a: LatentSizes, mla_layout: str, i: int) -> Iterator[TensorSpec]:
    hidden_size, dense = config.integer("hidden_size"), config.integer("first_k_dense_replace", 0, minimum=0)
    block, layer = f"blk.{i}", f"model.layers.{i}"
    yield TensorSpec(f"{block}.attn_norm.weight", (f"{layer}.input_layernorm.weight",), (hidden_size,))
    yield from attention_tensors(a, mla_layout, hidden_size, block, f"{layer}.self_attn")
    yield TensorSpec(f"{block}.ffn_norm.weight", (f"{layer}.post_attention_layernorm.weight",), (hidden_size,))
    if i < dense:
        for p in PROJECTIONS:
            shape = _projection(p, hidden_size, config.integer("intermediate_size"))
            for tensor in linear(f"ffn_{p}", f"mlp.{p}_proj", shape, bias=config.flag("mlp_bias", False)):
                yield tensor.spec(block, layer)
    else:
        yield from _expert_tensors(config, hidden_size, block, f"{layer}.mlp")


def attention_tensors(a: LatentSizes, mla_layout: str, hidden_size: int, block: str, attn: str) -> Iterator[TensorSpec]:
    """The attention of one layer; block: its prefix in the GGUF, attn: in the checkpoint."""
    q_rows = a.n_heads * (a.nope_dim + a.rope_dim)
    queries = permute_heads(a.n_heads, a.rope_dim) if a.halves else unchanged
    keys = permute_heads(1, a.rope_dim) if a.halves else unchanged

    def projection(name: str, source: str, rows: int, columns: int, transform: Transform = unchanged) -> Iterator[TensorSpec]:
        for tensor in linear(name, source, (rows, columns), bias=a.bias, transform=transform):
            yield tensor.spec(block, attn)

    if a.q_rank:
        yield from projection("attn_q_a", "q_a_proj", a.q_rank, hidden_size)
        yield TensorSpec(f"{block}.attn_q_a_norm.weight", (f"{attn}.q_a_layernorm.weight",), (a.q_rank,))
        yield TensorSpec(f"{block}.attn_q_b.weight", (f"{attn}.q_b_proj.weight",), (q_rows, a.q_rank), queries)
    else:
        yield TensorSpec(f"{block}.attn_q.weight", (f"{attn}.q_proj.weight",), (q_rows, hidden_size), queries)
    yield from projection("attn_kv_a_mqa", "kv_a_proj_with_mqa", a.kv_rank + a.rope_dim, hidden_size, keys)
    yield TensorSpec(f"{block}.attn_kv_a_norm.weight", (f"{attn}.kv_a_layernorm.weight",), (a.kv_rank,))
    source, shape = (f"{attn}.kv_b_proj.weight",), (a.n_heads * (a.nope_dim + a.value_dim), a.kv_rank)
    if mla_layout != "mainline":
        yield TensorSpec(f"{block}.attn_kv_b.weight", source, shape)
    if mla_layout != "legacy":
        by_head = mla_layout == "mainline"
        keys = kv_b_keys(a.n_heads, a.nope_dim, a.value_dim, by_head=by_head)
        values = kv_b_values(a.n_heads, a.nope_dim, a.value_dim, by_head=by_head)
        yield TensorSpec(f"{block}.attn_k_b.weight", source, shape, keys)
        yield TensorSpec(f"{block}.attn_v_b.weight", source, shape, values)
    yield from projection("attn_output", "o_proj", hidden_size, a.n_heads * a.value_dim)


def _expert_tensors(config: Config, hidden_size: int, block: str, mlp: str) -> Iterator[TensorSpec]:
    experts, rows = config.integer("n_routed_experts"), config.integer("moe_intermediate_size")
    yield TensorSpec(f"{block}.ffn_gate_inp.weight", (f"{mlp}.gate.weight",), (experts, hidden_size))
    if _topk_method(config) == "noaux_tc":
        yield TensorSpec(f"{block}.exp_probs_b.bias", (f"{mlp}.gate.e_score_correction_bias",), (experts,))
    for stack in expert_stacks(experts, rows, hidden_size):
        yield stack.spec(block, mlp.removesuffix(".mlp"))
    shared = rows * config.integer("n_shared_experts", 0, minimum=0)
    for p in PROJECTIONS if shared else ():
        shape = _projection(p, hidden_size, shared)
        for tensor in linear(f"ffn_{p}_shexp", f"shared_experts.{p}_proj", shape, bias=config.flag("mlp_bias", False)):
            yield tensor.spec(block, mlp)


def _projection(name: str, hidden_size: int, rows: int) -> tuple[int, int]:
    """[rows, columns] of a feed-forward matrix."""
    return (hidden_size, rows) if name == "down" else (rows, hidden_size)
