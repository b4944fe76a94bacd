"""Errors of types on sampled rows."""

import numpy as np
import pytest

from ggufmill.formats import TYPES, PlanError, SourceTensor
from ggufmill.quantize import decode, encode
from ggufmill.quantize.planning import Importance
from ggufmill.quantize.search.quant_error import errors, fitting, sample


def tensor(data, name="blk.0.ffn_up.weight", stack=()):
    shape = (data.shape[1], len(data) // int(np.prod(stack)), *stack) if stack else data.shape[::-1]
    return SourceTensor(name, shape, "f32", lambda start, stop: data[start:stop])


@pytest.fixture
def rows():
    return np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)


def test_all_rows_give_the_weighted_error_of_the_tensor(rows):
    weights = np.random.default_rng(1).chisquare(2, 256).astype(np.float32)
    importance = Importance({"blk.0.ffn_up.weight": weights[None]})
    off = (decode(encode(rows, "q4_0", weights), "q4_0", 256).astype(np.float64) - rows) ** 2
    expected = (off @ weights).sum() / (rows.astype(np.float64) ** 2 @ weights).sum()
    found = sample(tensor(rows), importance, 64, 0)
    assert found.error(TYPES["q4_0"]) == pytest.approx(expected, rel=1e-9)
    assert found.error(TYPES["q4_0_r8"]) == found.error(TYPES["q4_0"])
    assert found.error(TYPES["q8_0"]) < found.error(TYPES["q5_0"]) < found.error(TYPES["q4_0"])


def test_samples_depend_on_seed_and_name_alone(rows):
    big = np.tile(rows, (8, 1)) * np.arange(1, 513, dtype=np.float32)[:, None]

    def first(seed, name="blk.0.ffn_up.weight"):
        return np.concatenate([x for x, _ in sample(tensor(big, name, (4,)), None, 32, seed).runs])

    assert first(0).shape == (32, 256)
    assert np.array_equal(first(0), first(0))
    assert not np.array_equal(first(0), first(1))
    assert not np.array_equal(first(0), first(0, "blk.1.ffn_up.weight"))


def test_zeros_and_broken_weights_are_no_error():
    assert sample(tensor(np.zeros((8, 32), np.float32)), None, 8, 0).error(TYPES["q4_0"]) == 0
    broken = np.ones((8, 32), np.float32)
    broken[3, 3] = np.nan
    assert sample(tensor(broken), None, 8, 0).error(TYPES["q8_0"]) < 1e-3


def test_types_that_fit():
    wide, narrow = tensor(np.zeros((64, 256), np.float32)), tensor(np.zeros((64, 32), np.float32))
    types = [TYPES[name] for name in ("q8_0", "iq2_xxs", "iq3_k", "q4_K")]
    assert [t.name for t in fitting(wide, types, True)] == ["iq2_xxs", "iq3_k", "q4_K", "q8_0"]
    assert [t.name for t in fitting(wide, types, False)] == ["iq3_k", "q4_K", "q8_0"]
    assert [t.name for t in fitting(narrow, types, True)] == ["iq4_nl", "q5_0", "q8_0"]
    embedding = tensor(np.zeros((64, 256), np.float32), "token_embd.weight")
    assert [t.name for t in fitting(embedding, [TYPES["q4_k_r4"]], True)] == ["q4_K"]
    with pytest.raises(PlanError, match="none of the types allowed can hold"):
        fitting(wide, [TYPES["iq2_xxs"]], False)


def test_what_is_known_is_not_worked_out_again(rows):
    def explode(start, stop):
        raise AssertionError("read")

    one = SourceTensor("a.weight", (256, 64), "f32", explode)
    options = {"a.weight": [TYPES["q4_0"]]}
    assert dict(errors({"a.weight": one}, options, None, {"a.weight": {"q4_0": 0.5, "q8_0": 0.1}}, rows=8, seed=0)) == {
        "a.weight": {"q4_0": 0.5}
    }
