"""Qwen 4 Exp (Qwen 3.8 Flash Next): hyper-connections instead of norms, the linear attention of Qwen 3.5, attention to selected
runs of keys, and one layer with embeddings of hashed n-grams (per-layer embeddings), whose table has parts of its own file."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..config import Config
from ..model_spec import ModelSpec, TensorSpec
from ..tensor_transforms import add_one, joined_rows, select_rows
from .decoder_spec import LayerTensor, linear
from .qwen3next import delta_spec, shared_and_routed_experts

ARCHITECTURE = "qwen4exp"
# what transformers takes where config.json says nothing
DEFAULTS = {
    "hc_count": 4,
    "hc_lowrank": 320,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 8,
    "ngram_vocab_size_base": 20_000_000,
    "make_ngram_vocab_size_divisible_by": 128,
    "split_ngram_parts": 512,
}
_MAX_PARTS, _MAX_ROWS = 1 << 14, 1 << 31  # beyond all models; a damaged file must cost neither memory nor time


def qwen4exp(config: Config, mla_layout: str) -> ModelSpec:
    """Without its draft layer. Raises FormatError for settings that cannot be converted."""
    config = config.with_defaults(DEFAULTS | {"intermediate_size": config.get("moe_intermediate_size")})
    gate = config.get("output_gate_type") or config.get("hidden_act")
    if gate != "sigmoid":
        raise config.error(f"output_gate_type is {gate!r:.60}: only 'sigmoid' can be converted, as the GGUF does not say it")
    config.require("indexer_kv_heads", 1, "more than one key of the indexer")
    types = config.get("layer_types")
    if isinstance(types, list):
        config = config.with_values({"layer_types": ["full_attention" if t == "indexed_attention" else t for t in types]})
    spec, delta = delta_spec(ARCHITECTURE, config)
    spec.notes = [note for note in spec.notes if "this order of linear" not in note]  # llama.cpp reads the flags here
    heads, head_dim, budget, every = (
        config.integer(f"indexer_{key}") for key in ("n_heads", "head_dim", "budget", "compress_ratio")
    )
    if budget % every or spec.rotary_dim > head_dim:
        raise config.error(
            f"an indexer of {budget} keys in runs of {every}, with {spec.rotary_dim} rotated of {head_dim} numbers, cannot be"
        )
    streams, rank, hidden = config.integer("hc_count", minimum=2), config.integer("hc_lowrank"), spec.hidden_size
    size = streams * hidden
    spec.add_uint32(
        {
            "hyper_connection.count": streams,
            "hyper_connection.low_rank": rank,
            "attention.indexer.head_count": heads,
            "attention.indexer.key_length": head_dim,
            "attention.indexer.top_k": budget,
        }
    )
    ratios = np.array([0 if is_linear else every for is_linear in delta.is_linear], np.int32)
    spec.metadata[f"{ARCHITECTURE}.attention.compress_ratios"] = ratios

    def mixing(name: str, source: str, *, injects: bool = True) -> list[LayerTensor]:
        tensors = [
            spec.norm(f"{name}_norm", f"{source}.hc_norm", size, add_one),
            *linear(f"{name}_down", f"{source}.input_mix_weight_down", (rank, size)),
            *linear(f"{name}_up", f"{source}.input_mix_weight_up", (size, rank)),
        ]
        return [*tensors, *linear(f"{name}_inject", f"{source}.block_inject_weight", (streams, size))] if injects else tensors

    indexer, rows = "self_attn.indexer", (heads + 1) * head_dim
    indexer_tensors = [
        LayerTensor(f"indexer.{part}_proj.weight", f"{indexer}.index_qk_proj.weight", (rows, hidden), select_rows(first, count))
        for part, first, count in (("q", 0, heads * head_dim), ("k", heads * head_dim, head_dim))
    ]
    indexer_tensors += [spec.norm(f"indexer.{part}_norm", f"{indexer}.{part}_layernorm", head_dim, add_one) for part in "qk"]
    linear_attention = delta.linear_attention(delta.separate_projections())
    attention, experts = [*delta.attention(), *indexer_tensors], shared_and_routed_experts(spec, normalised=True)
    ngrams = _ngram_tensors(config, hidden, streams)
    embedded = _embedded_layer(config, delta.is_linear)

    def layer(number: int) -> list[LayerTensor]:
        return [
            *(ngrams if number == embedded else []),
            *mixing("hc_attn", "attn_hyper_connection"),
            *(linear_attention if delta.is_linear[number] else attention),
            *mixing("hc_ffn", "mlp_hyper_connection"),
            *experts,
        ]

    spec.skipped_prefixes["mtp."] = "draft layers (multi-token prediction)"
    model = spec.build(layer, has_norm=False)
    head = [tensor.spec("", "") for tensor in mixing("output_hc", "model.hyper_connection_mixer", injects=False)]
    head = [replace(each, name=each.name[1:], sources=tuple(source[1:] for source in each.sources)) for each in head]
    tensors = [*model.tensors, *head]
    if embedded is None:
        return replace(model, tensors=tensors)
    prefix = f"model.layers.{embedded}.ple.ple_embedding."
    table = _table(config, prefix)
    keys = {"layer_multipliers": "layer_multipliers", "head_offsets": "ngram_heads_offsets"}
    keys |= {"head_vocab_sizes": "ngram_heads_vocab_sizes"}
    integers = {f"{ARCHITECTURE}.ple.{key}": prefix + name for key, name in keys.items()}
    metadata = model.metadata | _ngram_keys(config, embedded, table.shape[1])
    return replace(model, tensors=[tensors[0], table, *tensors[1:]], metadata=metadata, stored_integers=integers)


def _embedded_layer(config: Config, is_linear: list[bool]) -> int | None:
    """The layer with embeddings of n-grams, counted from 0; None: there is none."""
    listed = config.get("ple_layer_ids") or []
    if not isinstance(listed, list) or len(listed) > 1 or any(type(number) is not int for number in listed):
        raise config.error(f"ple_layer_ids is {listed!r:.60}; a list of one layer at most can be converted")
    if not listed:
        return None
    if not 1 <= listed[0] <= len(is_linear) or not is_linear[listed[0] - 1]:
        raise config.error(f"ple_layer_ids is {listed!r:.60}, not a layer of linear attention")
    return listed[0] - 1


def _head_count(config: Config) -> int:
    return (config.integer("ngram_size", minimum=2) - 1) * config.integer("heads_per_ngram")


def _ngram_tensors(config: Config, hidden: int, streams: int) -> list[LayerTensor]:
    size, kernel = streams * hidden, config.integer("ple_conv_kernel_size")
    width = config.integer("ple_embed_dim", hidden)
    norms = [
        LayerTensor(f"ple_norm_{part}.weight", f"ple.norm_{part}.weight", (size,), add_one) for part in ("key", "query", "conv")
    ]
    return [
        *linear("ple_key", "ple.key_proj", (size, width)),
        *linear("ple_value", "ple.value_proj", (hidden, width)),
        *norms,
        LayerTensor("ple_conv1d.weight", "ple.conv1d.weight", (size, 1, kernel), select_rows(0, size)),
    ]


def _ngram_keys(config: Config, layer: int, width: int) -> dict[str, object]:
    end = config.get("eos_token_id")
    end = end[0] if isinstance(end, list) and end else end
    if type(end) is not int or end < 0:
        raise config.error(f"eos_token_id is {end!r:.60}; a token is needed, at which n-grams begin again")
    numbers = {
        "embedding_length_per_layer_input": width,
        "ple.ngram_size": config.integer("ngram_size"),
        "ple.heads_per_ngram": config.integer("heads_per_ngram"),
        "ple.conv_kernel": config.integer("ple_conv_kernel_size"),
        "ple.eos_token_id": end,
    }
    keys: dict[str, object] = {f"{ARCHITECTURE}.{key}": np.uint32(value) for key, value in numbers.items()}
    return keys | {f"{ARCHITECTURE}.ple.layers": np.array([layer], np.int32)}


def _table(config: Config, prefix: str) -> TensorSpec:
    """The rows of all heads: a prime number for each, from ngram_vocab_size_base on, filled up; in parts of one size, of which
    the last may be smaller, or in one."""
    heads, width = _head_count(config), config.integer("ple_embed_dim", config.integer("hidden_size"))
    if width % heads:
        raise config.error(f"embeddings of {width} numbers (ple_embed_dim) cannot be of {heads} heads")
    rows, size = 0, config.integer("ngram_vocab_size_base") - 1
    if size > _MAX_ROWS:
        raise config.error(f"ngram_vocab_size_base is {size + 1}; at most {_MAX_ROWS} rows for each head can be converted")
    for _ in range(heads):
        size = _next_prime(size)
        rows += size
    multiple, parts = (config.integer(key) for key in ("make_ngram_vocab_size_divisible_by", "split_ngram_parts"))
    if parts > _MAX_PARTS:
        raise config.error(f"split_ngram_parts is {parts}; at most {_MAX_PARTS} can be converted")
    rows = -(-rows // multiple) * multiple
    part = -(-rows // parts)
    parts, last = -(-rows // part), (rows - 1) % part + 1
    name, source = "per_layer_token_embd.weight", f"{prefix}ngram_embedding."
    whole = TensorSpec(name, (f"{source}weight",), (rows, width // heads))
    shards = tuple(f"{source}shard_{number}.weight" for number in range(parts))
    return TensorSpec(name, shards, (part, width // heads), joined_rows, alternative=whole, last_shape=(last, width // heads))


def _next_prime(above: int) -> int:
    number = above + 1
    while number < 2 or any(number % divisor == 0 for divisor in range(2, int(number**0.5) + 1)):
        number += 1
    return number
