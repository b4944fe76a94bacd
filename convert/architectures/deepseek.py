"""DeepSeek-V2, V2-Lite, V3 and R1: latent attention (MLA), routed and shared experts.

Latent attention is written in one of three layouts, which differ in how kv_b_proj is kept and in the head counts and lengths
that go with it: 'ik' (attn_kv_b, and attn_k_b and attn_v_b taken out of it, 2-D), 'mainline' (only those two, 3-D, one
key-value head of the latent's width), 'legacy' (only attn_kv_b).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..checkpoint import Description, Wanted
from ..config import Config
from ..metadata import common, counts, read_rope, rope_scaling
from ..tensor_transforms import key_part, stacked, value_part

ARCHITECTURE = "deepseek2"
GATING = {"softmax": 1, "sigmoid": 2}
PROJECTIONS = ("gate", "up", "down")


@dataclass(frozen=True)
class Attention:
    """Sizes of the latent attention. q_rank is 0 where queries have no latent (V2-Lite)."""

    heads: int
    q_rank: int
    kv_rank: int
    nope: int  # elements of a head's query and key without rotary embedding
    rope: int  # ... and with it
    value: int


def deepseek2(config: Config, mla_layout: str) -> Description:
    """Hyper-parameters and tensors. Raises FormatError for what config.json says that cannot be converted."""
    notes: list[str] = []
    for key, supported, what in (
        ("hidden_act", "silu", "this activation"),
        ("attention_bias", False, "biases in the attention"),
        ("moe_layer_freq", 1, "experts in only some of the layers"),
        ("rope_interleave", True, "this order of rotary dimensions"),
        ("tie_word_embeddings", False, "an output tied to the embeddings"),
    ):
        config.expect(key, supported, what)
    attention = latent_attention(config)
    rope = read_rope(config)
    metadata = common(ARCHITECTURE, config, rope)
    metadata |= _attention_keys(attention, mla_layout)
    metadata |= _expert_keys(config)
    metadata |= counts(ARCHITECTURE, {"rope.dimension_count": attention.rope})
    metadata |= rope_scaling(ARCHITECTURE, rope, notes)

    layers = config.count("num_hidden_layers")
    left_out = {
        f"model.layers.{layers + i}.": f"multi-token prediction layer {layers + i}"
        for i in range(config.count("num_nextn_predict_layers", 0, least=0))
    }
    wanted = list(_tensors(config, attention, mla_layout, layers))
    return Description(ARCHITECTURE, metadata, wanted, config.integer("vocab_size"), left_out, notes)


def latent_attention(config: Config) -> Attention:
    """The sizes. Raises FormatError for those that are missing or cannot be."""
    heads = config.integer("num_attention_heads")
    if config.integer("num_key_value_heads", heads) != heads:
        raise config.fail(f"num_key_value_heads is {config.get('num_key_value_heads')}; latent attention has one per head")
    sizes = (config.integer(k) for k in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    return Attention(heads, config.integer("q_lora_rank", 0, least=0), *sizes)


def _attention_keys(a: Attention, mla_layout: str) -> dict[str, Any]:
    values = {"attention.q_lora_rank": a.q_rank} if a.q_rank else {}
    values["attention.kv_lora_rank"] = a.kv_rank
    if mla_layout == "mainline":
        values |= {
            "attention.head_count_kv": 1,
            "attention.key_length": a.kv_rank + a.rope,
            "attention.value_length": a.kv_rank,
            "attention.key_length_mla": a.nope + a.rope,
            "attention.value_length_mla": a.value,
        }
    else:
        values |= {
            "attention.head_count_kv": a.heads,
            "attention.key_length": a.nope + a.rope,
            "attention.value_length": a.value,
        }
    return counts(ARCHITECTURE, values)


def _expert_keys(config: Config) -> dict[str, Any]:
    names = config.get("architectures")  # of the text part of a larger model nobody has looked at them yet
    is_v3 = isinstance(names, list) and "DeepseekV3ForCausalLM" in names
    scoring = config.get("scoring_func", "sigmoid" if is_v3 else "softmax")
    if not isinstance(scoring, str) or scoring not in GATING:
        raise config.fail(f"scoring_func is {scoring!r}; known are {', '.join(GATING)}")
    layers, dense = config.count("num_hidden_layers"), config.integer("first_k_dense_replace", 0, least=0)
    if dense > layers:
        raise config.fail(f"first_k_dense_replace is {dense}, of {layers} layers")
    experts = config.count("n_routed_experts", times=layers - dense, where=f" in each of {layers - dense} layers")
    used = config.integer("num_experts_per_tok")
    if used > experts:
        raise config.fail(f"num_experts_per_tok is {used}, more than n_routed_experts, which is {experts}")
    values = {
        "leading_dense_block_count": dense,
        "expert_count": experts,
        "expert_used_count": used,
        "expert_shared_count": config.integer("n_shared_experts", 0, least=0),
        "expert_feed_forward_length": config.integer("moe_intermediate_size"),
        "expert_gating_func": GATING[scoring],
    }
    groups = config.integer("n_group", 1)
    if groups > 1 and _topk_method(config) != "greedy":
        groups_used = config.integer("topk_group")
        if experts % groups:
            raise config.fail(f"n_routed_experts is {experts}, not a multiple of n_group, which is {groups}")
        if groups_used > groups:
            raise config.fail(f"topk_group is {groups_used}, more than n_group, which is {groups}")
        values |= {"expert_group_count": groups, "expert_group_used_count": groups_used}
    return counts(ARCHITECTURE, values) | {
        f"{ARCHITECTURE}.expert_weights_scale": np.float32(config.real("routed_scaling_factor", 1.0, positive=True)),
        f"{ARCHITECTURE}.expert_weights_norm": config.flag("norm_topk_prob", is_v3),
    }


def _topk_method(config: Config) -> str:
    """'greedy', 'group_limited_greedy' (V2) or 'noaux_tc' (V3: a bias on every expert's score)."""
    names = config.get("architectures")  # of the text part of a larger model nobody has looked at them yet
    is_v3 = isinstance(names, list) and "DeepseekV3ForCausalLM" in names
    method = config.get("topk_method", "noaux_tc" if is_v3 else "greedy")
    known = ("greedy", "group_limited_greedy", "noaux_tc")
    if method not in known:
        raise config.fail(f"topk_method is {method!r}; known are {', '.join(known)}")
    return method


def _tensors(config: Config, a: Attention, mla_layout: str, layers: int) -> Iterator[Wanted]:
    n_vocab, hidden = config.integer("vocab_size"), config.integer("hidden_size")
    dense = config.integer("first_k_dense_replace", 0, least=0)
    yield Wanted("token_embd.weight", ("model.embed_tokens.weight",), (n_vocab, hidden))
    for i in range(layers):
        block, layer = f"blk.{i}", f"model.layers.{i}"
        yield Wanted(f"{block}.attn_norm.weight", (f"{layer}.input_layernorm.weight",), (hidden,))
        yield from attention_tensors(a, mla_layout, hidden, block, f"{layer}.self_attn")
        yield Wanted(f"{block}.ffn_norm.weight", (f"{layer}.post_attention_layernorm.weight",), (hidden,))
        if i < dense:
            for p in PROJECTIONS:
                shape = _projection(p, hidden, config.integer("intermediate_size"))
                yield Wanted(f"{block}.ffn_{p}.weight", (f"{layer}.mlp.{p}_proj.weight",), shape)
        else:
            yield from _expert_tensors(config, hidden, block, f"{layer}.mlp")
    yield Wanted("output_norm.weight", ("model.norm.weight",), (hidden,))
    yield Wanted("output.weight", ("lm_head.weight",), (n_vocab, hidden))


def attention_tensors(a: Attention, mla_layout: str, hidden: int, block: str, attn: str) -> Iterator[Wanted]:
    """Of the layer BLOCK in the GGUF, from ATTN in the checkpoint."""
    rows_q = a.heads * (a.nope + a.rope)
    if a.q_rank:
        yield Wanted(f"{block}.attn_q_a.weight", (f"{attn}.q_a_proj.weight",), (a.q_rank, hidden))
        yield Wanted(f"{block}.attn_q_a_norm.weight", (f"{attn}.q_a_layernorm.weight",), (a.q_rank,))
        yield Wanted(f"{block}.attn_q_b.weight", (f"{attn}.q_b_proj.weight",), (rows_q, a.q_rank))
    else:
        yield Wanted(f"{block}.attn_q.weight", (f"{attn}.q_proj.weight",), (rows_q, hidden))
    yield Wanted(f"{block}.attn_kv_a_mqa.weight", (f"{attn}.kv_a_proj_with_mqa.weight",), (a.kv_rank + a.rope, hidden))
    yield Wanted(f"{block}.attn_kv_a_norm.weight", (f"{attn}.kv_a_layernorm.weight",), (a.kv_rank,))
    source, shape = (f"{attn}.kv_b_proj.weight",), (a.heads * (a.nope + a.value), a.kv_rank)
    if mla_layout != "mainline":
        yield Wanted(f"{block}.attn_kv_b.weight", source, shape)
    if mla_layout != "legacy":
        by_head = mla_layout == "mainline"
        yield Wanted(f"{block}.attn_k_b.weight", source, shape, key_part(a.heads, a.nope, a.value, by_head=by_head))
        yield Wanted(f"{block}.attn_v_b.weight", source, shape, value_part(a.heads, a.nope, a.value, by_head=by_head))
    yield Wanted(f"{block}.attn_output.weight", (f"{attn}.o_proj.weight",), (hidden, a.heads * a.value))


def _expert_tensors(config: Config, hidden: int, block: str, mlp: str) -> Iterator[Wanted]:
    experts, inner = config.integer("n_routed_experts"), config.integer("moe_intermediate_size")
    yield Wanted(f"{block}.ffn_gate_inp.weight", (f"{mlp}.gate.weight",), (experts, hidden))
    if _topk_method(config) == "noaux_tc":
        yield Wanted(f"{block}.exp_probs_b.bias", (f"{mlp}.gate.e_score_correction_bias",), (experts,))
    for p in PROJECTIONS:
        sources = tuple(f"{mlp}.experts.{e}.{p}_proj.weight" for e in range(experts))
        yield Wanted(f"{block}.ffn_{p}_exps.weight", sources, _projection(p, hidden, inner), stacked)
    shared = inner * config.integer("n_shared_experts", 0, least=0)
    for p in PROJECTIONS if shared else ():
        source = f"{mlp}.shared_experts.{p}_proj.weight"
        yield Wanted(f"{block}.ffn_{p}_shexp.weight", (source,), _projection(p, hidden, shared))


def _projection(name: str, hidden: int, inner: int) -> tuple[int, int]:
    """[rows, columns] of a feed-forward matrix."""
    return (hidden, inner) if name == "down" else (inner, hidden)
