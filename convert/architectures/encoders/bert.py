"""BERT and its relatives: norms after every block, whose input they include.

Bert, RoBERTa, XLM-RoBERTa and CamemBERT with learned positions; Nomic BERT and Jina v3 with a rotary embedding, Jina v2 with
linear biases. All functions raise FormatError for settings that cannot be converted.
"""

from __future__ import annotations

import numpy as np

from ...config import Config
from ...expert_transforms import split_experts, split_transposed_experts
from ...model_spec import ModelSpec, TensorSpec
from ...tensor_transforms import select_rows, unchanged
from ..decoder_spec import DecoderSpec, LayerTensor, linear
from .pooling import POOLINGS, pooling_keys

EPSILON = "attention.layer_norm_epsilon"
GELU = ("gelu", "gelu_python")
# Prefix of a task's head or of the layer that pre-training pools with -> what it is
HEADS = {"cls.": "head of the pre-training", "lm_head.": "head of the pre-training", "pooler.": "pooling of the pre-training"}
BERT_BLOCK = {
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
}
BERT_NORMS = {"attn_output_norm": "attention.output.LayerNorm", "layer_output_norm": "output.LayerNorm"}
# After the first token's output: a layer with tanh, and the one that gives the score
BERT_CLASSIFIER = ("pooler.dense", "classifier")
ROBERTA_CLASSIFIER = ("classifier.dense", "classifier.out_proj")
# Nomic's keys of config.json -> those of others
NOMIC_KEYS = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
NOMIC_KEYS |= {"intermediate_size": "n_inner", "max_position_embeddings": "n_positions"}
NOMIC_KEYS |= {"layer_norm_eps": "layer_norm_epsilon", "rope_theta": "rotary_emb_base"}


def bert(config: Config, mla_layout: str) -> ModelSpec:
    """Bert, and with positions that begin after the padding token's RoBERTa, XLM-RoBERTa, CamemBERT; with a classifier of one
    label a model that ranks documents (pooling 'rank')."""
    if config.get("hidden_act", "gelu") not in GELU:
        raise config.error(f"hidden_act is {config.get('hidden_act')!r}: this activation cannot be converted, only 'gelu'")
    config.require("position_embedding_type", "absolute", "this embedding of positions")
    config.require("is_decoder", False, "attention to earlier tokens only")
    names = config.get("architectures") or [""]
    rows = config.integer("max_position_embeddings")
    first = 0 if str(names[0]).startswith("Bert") else config.integer("pad_token_id", 1, minimum=0) + 1
    spec = _spec("bert", config.with_values({"max_position_embeddings": rows - first}))
    size = spec.hidden_size
    shapes = dict.fromkeys(BERT_BLOCK, (size, size)) | _feed_forward(spec)
    layer = [tensor for name, source in BERT_BLOCK.items() for tensor in linear(name, source, shapes[name], bias=True)]
    layer += [tensor for name, source in BERT_NORMS.items() for tensor in spec.layer_norm(name, source)]
    tensors = _embeddings(spec, "embeddings.LayerNorm")
    positions = select_rows(first, rows - first) if first else unchanged
    tensors.append(TensorSpec("position_embd.weight", ("embeddings.position_embeddings.weight",), (rows, size), positions))
    if str(names[0]).endswith("ForSequenceClassification"):
        tensors += _classifier(spec, BERT_CLASSIFIER if names[0] == "BertForSequenceClassification" else ROBERTA_CLASSIFIER)
    return _finished(spec, tensors, "encoder.layer.{}", layer)


def nomic(config: Config, mla_layout: str) -> ModelSpec:
    """Nomic BERT 1 and 1.5: a rotary embedding, a gated feed-forward block, no biases; 2: see `_nomic_moe`."""
    is_moe = bool(config.integer("moe_every_n_layers", 0, minimum=0))
    for key, value, what in (
        ("activation_function", "gelu" if is_moe else "swiglu", "this activation"),
        ("hidden_act", "gelu" if is_moe else "silu", "this activation"),
        ("causal", False, "attention to earlier tokens only"),
        ("qkv_proj_bias", is_moe, "this choice of biases"),
        ("mlp_fc1_bias", is_moe, "this choice of biases"),
        ("mlp_fc2_bias", is_moe, "this choice of biases"),
        ("prenorm", False, "norms before the blocks"),
        ("rotary_emb_fraction", 1.0, "a rotation of parts of heads"),
        ("rotary_emb_interleaved", False, "a rotation of neighbouring elements"),
        ("rotary_emb_scale_base", None, "this rotary embedding"),
        ("moe_normalize_expert_weights", False, "normalised weights of experts"),
        ("expert_choice_router", False, "this choice of experts"),
        ("num_shared_experts", 0, "a shared expert"),
        *(() if is_moe else (("num_experts", None, "experts without moe_every_n_layers"),)),
    ):
        config.require(key, value, what)
    config = config.with_defaults({key: config.get(old) for key, old in NOMIC_KEYS.items() if config.get(old) is not None})
    config = config.with_defaults({"layer_norm_eps": 1e-12, "rope_theta": 1000.0})
    if config.get("max_trained_positions") is not None:  # beyond them its rotary embedding needs a scaling
        length = min(config.integer("max_position_embeddings"), config.integer("max_trained_positions"))
        config = config.with_values({"max_position_embeddings": length})
    if is_moe:
        return _nomic_moe(config)
    spec = _spec("nomic-bert", config)
    size, shapes = spec.hidden_size, _feed_forward(spec)
    layer = [
        *linear("attn_qkv", "attn.Wqkv", (3 * size, size)),
        *linear("attn_output", "attn.out_proj", (size, size)),
        *linear("ffn_up", "mlp.fc11", shapes["ffn_up"]),
        *linear("ffn_gate", "mlp.fc12", shapes["ffn_up"]),
        *linear("ffn_down", "mlp.fc2", shapes["ffn_down"]),
        *spec.layer_norm("attn_output_norm", "norm1"),
        *spec.layer_norm("layer_output_norm", "norm2"),
    ]
    return _finished(spec, _embeddings(spec, "emb_ln"), "encoder.layers.{}", layer)


def _nomic_moe(config: Config) -> ModelSpec:
    """Nomic Embed 2: biases, and in every so-manyeth layer, the first of them the second, experts without gates."""
    spec, period = _spec("nomic-bert-moe", config), config.integer("moe_every_n_layers", minimum=2)
    size, shapes = spec.hidden_size, _feed_forward(spec)
    config = config.with_values({"num_experts": config.get("num_local_experts", config.get("num_experts"))})
    spec.config = config
    n = spec.add_expert_counts("num_experts", used_key="moe_top_k", layers=0)
    spec.add_uint32({"moe_every_n_layers": period})
    attention = [
        *linear("attn_qkv", "attn.Wqkv", (3 * size, size), bias=True),
        *linear("attn_output", "attn.out_proj", (size, size), bias=True),
        *spec.layer_norm("attn_output_norm", "norm1"),
        *spec.layer_norm("layer_output_norm", "norm2"),
    ]
    dense = [
        tensor
        for name, part in (("ffn_up", "fc1"), ("ffn_down", "fc2"))
        for tensor in linear(name, f"mlp.{part}", shapes[name], bias=True)
    ]
    stacked, source = (n * spec.intermediate_size, size), "mlp.experts.mlp"
    experts = [
        LayerTensor("ffn_gate_inp.weight", "mlp.router.layer.weight", (n, size)),
        LayerTensor("ffn_up_exps.weight", f"{source}.w1", stacked, split_experts(n)),
        LayerTensor("ffn_down_exps.weight", f"{source}.w2", stacked, split_transposed_experts(n)),
    ]
    tensors = _embeddings(spec, "emb_ln")
    for i in range(spec.n_layers):
        has_experts = i % period == 1
        block = experts if has_experts else dense
        tensors += [tensor.spec(f"blk.{i}", f"encoder.layers.{i}") for tensor in [*attention, *block]]
        if has_experts:  # llama.cpp's files of this architecture, and so its results, do not have it
            spec.skipped_prefixes[f"encoder.layers.{i}.mlp.experts.bias"] = "bias of the experts' sum, which a GGUF cannot have"
    return _finished(spec, tensors, "", [])


def jina3(config: Config, mla_layout: str) -> ModelSpec:
    """Jina embeddings v3 without the adapters of its tasks: an XLM-RoBERTa with a rotary embedding."""
    config.require("hidden_act", "gelu", "this activation")
    config = config.with_defaults({"layer_norm_eps": 1e-5, "rope_theta": config.get("rotary_emb_base", 20000.0)})
    spec = _spec("jina-bert-v3", config)
    size, shapes = spec.hidden_size, _feed_forward(spec)
    layer = [
        *linear("attn_qkv", "mixer.Wqkv", (3 * size, size), bias=True),
        *linear("attn_output", "mixer.out_proj", (size, size), bias=True),
        *linear("ffn_up", "mlp.fc1", shapes["ffn_up"], bias=True),
        *linear("ffn_down", "mlp.fc2", shapes["ffn_down"], bias=True),
        *spec.layer_norm("attn_output_norm", "norm1"),
        *spec.layer_norm("layer_output_norm", "norm2"),
    ]
    return _finished(spec, _embeddings(spec, "emb_ln"), "encoder.layers.{}", layer)


def jina2(config: Config, mla_layout: str) -> ModelSpec:
    """Jina embeddings v2: linear biases, a gated feed-forward block whose two matrices are stored in one."""
    config.require("position_embedding_type", "alibi", "this embedding of positions")
    kind = config.get("feed_forward_type", "original")
    if kind != "geglu":
        raise config.error(f"feed_forward_type is {kind!r}: this feed-forward block cannot be converted, only 'geglu'")
    spec = _spec("jina-bert-v2", config)
    rows, size = spec.intermediate_size, spec.hidden_size
    block = {name: source for name, source in BERT_BLOCK.items() if name.startswith("attn")}
    layer = [tensor for name, source in block.items() for tensor in linear(name, source, (size, size), bias=True)]
    shape, halves = (2 * rows, size), (select_rows(0, rows), select_rows(rows, rows))
    layer += [
        *linear("ffn_gate", "mlp.gated_layers", shape, transform=halves[0]),
        *linear("ffn_up", "mlp.gated_layers", shape, transform=halves[1]),
        *linear("ffn_down", "mlp.wo", (size, rows), bias=True),
        *spec.layer_norm("attn_output_norm", "attention.output.LayerNorm"),
        *spec.layer_norm("layer_output_norm", "mlp.layernorm"),
    ]
    return _finished(spec, _embeddings(spec, "embeddings.LayerNorm"), "encoder.layer.{}", layer)


def _spec(architecture: str, config: Config) -> DecoderSpec:
    config = config.with_values({"num_key_value_heads": config.integer("num_attention_heads")})
    config = config.with_defaults({"layer_norm_eps": 1e-12})
    spec = DecoderSpec(architecture, config, norm=(EPSILON, "layer_norm_eps"))
    spec.metadata[f"{architecture}.attention.causal"] = False
    spec.metadata["tokenizer.ggml.token_type_count"] = np.uint32(config.integer("type_vocab_size", 2))
    spec.metadata |= pooling_keys(architecture, config, "mean", spec.notes)
    spec.renamed_prefixes |= dict.fromkeys(("bert.", "roberta.", "model."), "")
    spec.skipped_prefixes |= HEADS
    return spec


def _feed_forward(spec: DecoderSpec) -> dict[str, tuple[int, int]]:
    rows, size = spec.intermediate_size, spec.hidden_size
    return {"ffn_up": (rows, size), "ffn_down": (size, rows)}


def _embeddings(spec: DecoderSpec, norm: str) -> list[TensorSpec]:
    size = spec.hidden_size
    types = spec.config.integer("type_vocab_size", 2)
    return [
        TensorSpec("token_embd.weight", ("embeddings.word_embeddings.weight",), (spec.vocab_size, size)),
        TensorSpec("token_types.weight", ("embeddings.token_type_embeddings.weight",), (types, size)),
        *(TensorSpec(f"token_embd_norm.{part}", (f"{norm}.{part}",), (size,)) for part in ("weight", "bias")),
    ]


def _classifier(spec: DecoderSpec, sources: tuple[str, str]) -> list[TensorSpec]:
    """The head that ranks: cls and cls.output, from the first token's output. Raises FormatError for several labels."""
    size, config = spec.hidden_size, spec.config
    labels = config.get("id2label")
    count = len(labels) if isinstance(labels, dict) else config.integer("num_labels", 1)
    if count != 1:
        raise config.error(f"a classifier of {count} labels cannot be converted, only one that ranks (one label)")
    spec.metadata["bert.pooling_type"] = np.uint32(POOLINGS["rank"])
    return [
        TensorSpec(f"{name}.{part}", (f"{source}.{part}",), (rows, size) if part == "weight" else (rows,))
        for name, source, rows in (("cls", sources[0], size), ("cls.output", sources[1], 1))
        for part in ("weight", "bias")
    ]


def _finished(spec: DecoderSpec, tensors: list[TensorSpec], prefix: str, layer: list[LayerTensor]) -> ModelSpec:
    """layer: of all layers, with this prefix in the checkpoint."""
    for i in range(spec.n_layers):
        tensors += [tensor.spec(f"blk.{i}", prefix.format(i)) for tensor in layer]
    return ModelSpec(
        spec.architecture,
        spec.metadata,
        tensors,
        spec.vocab_size,
        spec.skipped_prefixes,
        spec.notes,
        spec.renamed_prefixes,
    )
