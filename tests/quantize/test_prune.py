"""Dropping layers: remaining tensors, their new names, metadata and importance."""

import numpy as np
import pytest

from ggufmill.formats import PlanError, SourceTensor, TensorSource
from ggufmill.quantize.importance import Importance
from ggufmill.quantize.prune import drop_layers, parse_layers


def _source(layers=4):
    def read(start, stop):
        return np.zeros((stop - start, 32), np.float32)

    names = ["token_embd.weight", *(f"blk.{i}.ffn_up.weight" for i in range(layers)), "output.weight"]
    metadata = {
        "general.architecture": "x",
        "x.block_count": np.uint32(layers),
        "x.leading_dense_block_count": np.uint32(2),
        "x.attention.head_count_kv": [10 + i for i in range(layers)],
        "x.context_length": np.uint32(4),
    }
    return TensorSource("s", metadata, {n: SourceTensor(n, (32, 2), "f32", read) for n in names}, "id")


@pytest.mark.parametrize(("text", "layers"), [("3", [3]), ("3,7-9", [3, 7, 8, 9]), (" 1 - 2 ,1", [1, 2])])
def test_parse_layers(text, layers):
    assert parse_layers(text) == layers


@pytest.mark.parametrize("text", ["", "a", "5-3", "1,,2", "-1", "1-999999999"])
def test_parse_layers_refuses_other_syntax(text):
    with pytest.raises(PlanError, match="no list of layers"):
        parse_layers(text)


def test_remaining_layers_are_renumbered_in_names_metadata_and_importance():
    source, old_names = drop_layers(_source(), [1])
    assert list(source.tensors) == ["token_embd.weight", *(f"blk.{i}.ffn_up.weight" for i in range(3)), "output.weight"]
    assert old_names["blk.1.ffn_up.weight"] == "blk.2.ffn_up.weight"
    assert source.tensors["blk.1.ffn_up.weight"].name == "blk.1.ffn_up.weight"
    assert source.metadata["x.block_count"] == 3
    assert source.metadata["x.leading_dense_block_count"] == 1
    assert source.metadata["x.attention.head_count_kv"] == [10, 12, 13]
    assert source.metadata["x.context_length"] == 4
    assert source.identity != _source().identity
    means = {f"blk.{i}.ffn_up.weight": np.full((1, 32), i, np.float32) for i in range(4)}
    moved = Importance(means).renamed(old_names)
    assert [moved.means[f"blk.{i}.ffn_up.weight"][0, 0] for i in range(3)] == [0, 2, 3]


@pytest.mark.parametrize(("layers", "message"), [([4], "there is no layer 4"), ([0, 1, 2, 3], "no layer would be left")])
def test_layers_that_cannot_be_dropped(layers, message):
    with pytest.raises(PlanError, match=message):
        drop_layers(_source(), layers)
