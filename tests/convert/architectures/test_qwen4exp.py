"""Qwen 4 Exp: metadata, the parts of the table of n-grams, what is left out and what is refused.

That the tensors are correct is tested by logits (tests/runtime/test_checkpoints.py).
"""

from pathlib import Path

import numpy as np
import pytest

from ggufmill.convert import open_source
from ggufmill.convert.architectures.registry import model_spec
from ggufmill.convert.config import Config
from ggufmill.formats import FormatError

TEXT = {
    "model_type": "qwen4_exp_text",
    "eos_token_id": [7, 3],
    "hc_count": 2,
    "hc_lowrank": 8,
    "head_dim": 32,
    "heads_per_ngram": 2,
    "hidden_act": "silu",
    "hidden_size": 64,
    "indexer_budget": 24,
    "indexer_compress_ratio": 4,
    "indexer_head_dim": 16,
    "indexer_kv_heads": 1,
    "indexer_n_heads": 2,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
    "make_ngram_vocab_size_divisible_by": 8,
    "max_position_embeddings": 512,
    "moe_intermediate_size": 32,
    "ngram_vocab_size_base": 10,
    "num_attention_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "output_gate_type": "sigmoid",
    "ple_layer_ids": [3],
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]},
    "shared_expert_intermediate_size": 48,
    "split_ngram_parts": 5,
    "vocab_size": 40,
}
PLE = "model.language_model.layers.2.ple.ple_embedding."
# Heads of 11, 13, 17 and 19 rows, filled up to 64: parts of 13 rows, the last one of 12.
INTEGERS = {"layer_multipliers": [3, 2**44 + 1, 2**52 + 3], "ngram_heads_offsets": [0, 11, 24, 41]}
INTEGERS |= {"ngram_heads_vocab_sizes": [11, 13, 17, 19]}


def config_of(**changes):
    return {"architectures": ["Qwen4ExpForConditionalGeneration"], "text_config": TEXT | changes, "vision_config": {"depth": 1}}


def spec_of(**changes):
    return model_spec(Config(Path("config.json"), config_of(**changes), 10**6), "ik")


@pytest.fixture
def convert(tmp_path, write_checkpoint):
    """The source of a checkpoint with all tensors that the spec needs, without those of `gone`, and with those of `more`."""

    def run(gone=(), more=None, **changes):
        spec, tensors = spec_of(**changes), {}
        for tensor in spec.tensors:
            for number, name in enumerate(tensor.sources):
                shape = tensor.source_shape(number)
                values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
                tensors[name.replace("model.", "model.language_model.")] = values + 1000 * number
        if spec.stored_integers:
            tensors |= {PLE + name: np.array(values, np.int64) for name, values in INTEGERS.items()}
        tensors = {name: values for name, values in tensors.items() if name not in gone} | (more or {})
        return open_source(write_checkpoint(tmp_path / "tiny", config_of(**changes), tensors))

    return run


def test_metadata(convert):
    source = convert(more={"mtp.fc.weight": np.zeros((2, 2), np.float32), "model.visual.x": np.zeros(2, np.float32)})
    found = {key.removeprefix("qwen4exp."): value for key, value in source.metadata.items()}
    expected = {"hyper_connection.count": 2, "hyper_connection.low_rank": 8, "embedding_length_per_layer_input": 16}
    expected |= {"attention.indexer.head_count": 2, "attention.indexer.key_length": 16, "attention.indexer.top_k": 24}
    expected |= {"ple.ngram_size": 3, "ple.heads_per_ngram": 2, "ple.conv_kernel": 4, "ple.eos_token_id": 7}
    assert {key: found[key] for key in expected} == expected
    assert found["attention.compress_ratios"].tolist() == [0, 4, 0]
    assert found["full_attention_interval"] == 2
    assert found["ple.layers"].tolist() == [2]
    lists = [found[f"ple.{key}"] for key in ("layer_multipliers", "head_offsets", "head_vocab_sizes")]
    assert [values.tolist() for values in lists] == list(INTEGERS.values())  # exactly, as float32 could not say them
    assert {values.dtype for values in lists} == {np.dtype(np.uint64)}
    notes = " ".join(source.notes)
    assert "draft layers" in notes
    assert "vision tower" in notes


def test_the_table_is_joined(convert):
    table = convert().tensors["per_layer_token_embd.weight"]
    assert table.shape == (16, 64)
    parts = [np.arange(16 * rows).reshape(rows, 16) + 1000 * n for n, rows in enumerate([13, 13, 13, 13, 12])]
    rows = np.concatenate(parts).astype(np.float32)
    for start, stop in ((0, 64), (12, 14), (13, 26), (25, 53), (63, 64)):
        assert np.array_equal(table.read(start, stop), rows[start:stop])


def test_a_table_in_one_piece(convert):
    whole = np.arange(16 * 64, dtype=np.float32).reshape(64, 16)
    shards = [f"{PLE}ngram_embedding.shard_{n}.weight" for n in range(5)]
    table = convert(gone=shards, more={f"{PLE}ngram_embedding.weight": whole}).tensors["per_layer_token_embd.weight"]
    assert np.array_equal(table.read(0, 64), whole)


def test_without_ngrams(convert):
    source = convert(ple_layer_ids=[])
    assert not [name for name in (*source.tensors, *source.metadata) if "ple" in name.split(".") or "per_layer" in name]


def test_missing_parts_are_named(convert):
    with pytest.raises(FormatError, match=r"2 tensors are missing: .*layer_multipliers.*shard_3"):
        convert(gone=[f"{PLE}layer_multipliers", f"{PLE}ngram_embedding.shard_3.weight"])
    with pytest.raises(FormatError, match=r"ngram_heads_offsets is F32 \[4\], not a list of 64-bit whole numbers"):
        convert(more={f"{PLE}ngram_heads_offsets": np.zeros(4, np.float32)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output_gate_type": None}, "output_gate_type is 'silu'"),
        ({"ple_layer_ids": [1, 3]}, "a list of one layer at most"),
        ({"ple_layer_ids": [2]}, "not a layer of linear attention"),
        ({"indexer_budget": 25}, "25 keys in runs of 4"),
        ({"indexer_kv_heads": 2}, "more than one key of the indexer"),
        ({"indexer_n_heads": None}, "indexer_n_heads"),
        ({"ple_embed_dim": 50}, "cannot be of 4 heads"),
        ({"split_ngram_parts": 1 << 20}, "split_ngram_parts is 1048576"),
        ({"ngram_vocab_size_base": 1 << 60}, "ngram_vocab_size_base"),
        ({"eos_token_id": None}, "eos_token_id is None"),
        ({"layer_types": ["linear_attention", "sliding_attention", "linear_attention"]}, "layer_types"),
    ],
)
def test_what_cannot_be_converted_is_refused(changes, message):
    with pytest.raises(FormatError, match=message):
        spec_of(**changes)
