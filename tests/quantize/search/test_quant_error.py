"""Quantisation errors of types on sampled rows."""

import time

import numpy as np
import pytest

from ggufmill.formats import TYPES, PlanError, SourceTensor
from ggufmill.quantize import decode, encode
from ggufmill.quantize.covariance.matrix.covariance_matrix import Covariance
from ggufmill.quantize.covariance.source import CollectedInput, Covariances, PreparedCache
from ggufmill.quantize.importance import Importance
from ggufmill.quantize.search import quant_error
from ggufmill.quantize.search.quant_error import relative_errors, usable_types
from ggufmill.quantize.search.row_sample import RowSample, sample_rows


def tensor(data, name="blk.0.ffn_up.weight", stack=()):
    shape = (data.shape[1], len(data) // int(np.prod(stack)), *stack) if stack else data.shape[::-1]
    return SourceTensor(name, shape, "f32", lambda start, stop: data[start:stop])


@pytest.fixture
def rows():
    return np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)


def test_error_of_all_rows_is_the_weighted_relative_error(rows):
    weights = np.random.default_rng(1).chisquare(2, 256).astype(np.float32)
    importance = Importance({"blk.0.ffn_up.weight": weights[None]})
    squares = (decode(encode(rows, "q4_0", weights), "q4_0", 256).astype(np.float64) - rows) ** 2
    expected = (squares @ weights).sum() / (rows.astype(np.float64) ** 2 @ weights).sum()
    sample = sample_rows(tensor(rows), importance, 64, 0)
    assert sample.error(TYPES["q4_0"]) == pytest.approx(expected, rel=1e-9)
    assert sample.error(TYPES["q4_0_r8"]) == sample.error(TYPES["q4_0"])
    assert sample.error(TYPES["q8_0"]) < sample.error(TYPES["q5_0"]) < sample.error(TYPES["q4_0"])


def test_samples_depend_on_seed_and_tensor_name_only(rows):
    big = np.tile(rows, (8, 1)) * np.arange(1, 513, dtype=np.float32)[:, None]

    def first(seed, name="blk.0.ffn_up.weight"):
        return np.concatenate([run.x for run in sample_rows(tensor(big, name, (4,)), None, 32, seed).runs])

    assert first(0).shape == (32, 256)
    assert np.array_equal(first(0), first(0))
    assert not np.array_equal(first(0), first(1))
    assert not np.array_equal(first(0), first(0, "blk.1.ffn_up.weight"))


def test_zeros_and_nonfinite_weights_do_not_count_as_error():
    assert sample_rows(tensor(np.zeros((8, 32), np.float32)), None, 8, 0).error(TYPES["q4_0"]) == 0
    nonfinite = np.ones((8, 32), np.float32)
    nonfinite[3, 3] = np.nan
    assert sample_rows(tensor(nonfinite), None, 8, 0).error(TYPES["q8_0"]) < 1e-3


def test_usable_types_by_shape_and_importance():
    wide, narrow = tensor(np.zeros((64, 256), np.float32)), tensor(np.zeros((64, 32), np.float32))
    types = [TYPES[name] for name in ("q8_0", "iq2_xxs", "iq3_k", "q4_K")]
    assert [t.name for t in usable_types(wide, types, True)] == ["iq2_xxs", "iq3_k", "q4_K", "q8_0"]
    assert [t.name for t in usable_types(wide, types, False)] == ["iq3_k", "q4_K", "q8_0"]
    assert [t.name for t in usable_types(narrow, types, True)] == ["iq4_nl", "q5_0", "q8_0"]
    embedding = tensor(np.zeros((64, 256), np.float32), "token_embd.weight")
    assert [t.name for t in usable_types(embedding, [TYPES["q4_k_r4"]], True)] == ["q4_K"]
    with pytest.raises(PlanError, match="none of the types allowed can hold"):
        usable_types(wide, [TYPES["iq2_xxs"]], False)


def test_known_errors_are_not_computed_again(rows):
    def fail(start, stop):
        raise AssertionError("read")

    unreadable = SourceTensor("a.weight", (256, 64), "f32", fail)
    options = {"a.weight": [TYPES["q4_0"]]}
    assert dict(
        relative_errors({"a.weight": unreadable}, options, None, {"a.weight": {"q4_0": 0.5, "q8_0": 0.1}}, rows=8, seed=0)
    ) == {"a.weight": {"q4_0": 0.5}}


def covariances_of(matrices, effort=1):
    """Covariances of one tensor: a `Covariance` for each of its matrices."""
    tokens = np.array([one.tokens for one in matrices])
    collected = CollectedInput(matrices[0].columns, tokens)
    return Covariances(lambda name: collected, PreparedCache(lambda name, matrix: matrices[matrix]), "digest", {}, effort)


def correlated(seed, tokens=2000):
    x = np.random.default_rng(seed).standard_normal((tokens, 24)) @ np.random.default_rng(seed + 1).standard_normal((24, 256))
    x = (x + np.random.default_rng(seed + 2).standard_normal(x.shape)).astype(np.float32)
    return Covariance(np.ascontiguousarray(x.T @ x / tokens), tokens)


@pytest.mark.parametrize("name", ["q4_0", "iq2_ks", "iq2_xxs"])
def test_error_with_a_covariance_is_that_of_the_encoded_rows(rows, name):
    """Of a stack whose first two matrices share a covariance, while each has its importance; against r H r^T in float64."""
    shared, own = correlated(0), correlated(5)
    stack = [shared, shared, own, own]
    weights = np.random.default_rng(1).chisquare(2, (4, 256)).astype(np.float32)
    importance = Importance({"blk.0.ffn_up.weight": weights})
    sample = sample_rows(tensor(rows, stack=(4,)), importance, 64, 0, covariances_of(stack))
    error = energy = 0.0
    for matrix, covariance in enumerate(stack):
        x = rows[16 * matrix : 16 * matrix + 16]
        r = x - decode(encode(x, name, weights[matrix], covariance, 1), name, 256).astype(np.float64)
        damped = covariance.damped().astype(np.float64)
        error += np.einsum("ri,ij,rj->", r, damped, r)
        energy += (x.astype(np.float64) ** 2 @ np.diagonal(damped)).sum()
    assert sample.error(TYPES[name]) == pytest.approx(error / energy, rel=1e-4)
    without = sample_rows(tensor(rows, stack=(4,)), importance, 64, 0)
    assert sample.error(TYPES[name]) < 0.8 * without.error(TYPES[name])


def test_too_few_tokens_leave_the_diagonal(rows):
    few = correlated(0, tokens=100)
    importance = Importance({"blk.0.ffn_up.weight": few.diagonal[None]})
    q4_0 = TYPES["q4_0"]
    expected = sample_rows(tensor(rows), importance, 64, 0).error(q4_0)
    assert sample_rows(tensor(rows), importance, 64, 0, covariances_of([few])).error(q4_0) == expected
    assert sample_rows(tensor(rows), None, 64, 0, covariances_of([few])).error(q4_0) == expected


@pytest.mark.parametrize("threads", [1, 3])
def test_what_is_done_of_a_tensor_is_said_after_each_type(rows, threads, monkeypatch):
    monkeypatch.setattr(quant_error, "_LOOK", 0.0)
    tensors = {name: tensor(rows, name) for name in ("blk.0.ffn_up.weight", "blk.1.ffn_up.weight")}
    options, shares = {name: [TYPES["q4_0"], TYPES["q8_0"]] for name in tensors}, []
    slow = RowSample._error

    def wait_until_said(sample, name, *others):
        before, until = len(shares), time.monotonic() + 10
        while threads > 1 and name == "q8_0" and len(shares) == before == 0 and time.monotonic() < until:
            time.sleep(0.001)
        return slow(sample, name, *others)

    monkeypatch.setattr(RowSample, "_error", wait_until_said)
    list(relative_errors(tensors, options, None, {}, rows=16, seed=0, threads=threads, on_share=shares.append))
    assert shares == [0.5, 1.0] * 2 if threads == 1 else shares[0] in (0.5, 1.0)


def test_errors_do_not_depend_on_threads(rows):
    tensors = {f"blk.{i}.ffn_up.weight": tensor(rows * (i + 1), f"blk.{i}.ffn_up.weight") for i in range(5)}
    options = {name: [TYPES["q4_0"], TYPES["iq2_ks"]] for name in tensors}
    common = {"rows": 16, "seed": 0, "covariances": covariances_of([correlated(0)], effort=0)}
    alone = list(relative_errors(tensors, options, None, {}, **common))
    assert list(relative_errors(tensors, options, None, {}, **common, threads=3)) == alone
    assert [name for name, _ in alone] == list(tensors)
