"""Covariances of a model's inputs, against x^T x of what its ops are told."""

import numpy as np
import pytest

from ggufmill.convert import open_source
from ggufmill.imatrix.calibration import TextSegment, cut_windows
from ggufmill.imatrix.collect import CollectOptions, Collector, collect
from ggufmill.imatrix.covariance.collector import CovarianceCollector, InputObserver
from ggufmill.imatrix.covariance.inputs import covariance_inputs
from ggufmill.recipes import FOLDER
from ggufmill.runtime import load_model
from ggufmill.runtime.graph import Observer, ops

N_CTX = 96  # no part of a block


class Inputs(Observer):
    """Keeps the inputs of each matrix: (tensor, matrix) -> float64 [n, columns]."""

    def __init__(self):
        self.rows = {}

    def wants_input(self, op):
        return isinstance(op, ops.Linear | ops.ExpertLinear | ops.LatentAttention)

    def on_input(self, op, weight, matrix, x):
        self.rows.setdefault((weight.name, matrix), []).append(x.astype(np.float64))


@pytest.fixture(scope="module")
def tokens():
    model = load_model(open_source(FOLDER / "demo"))
    return model.tokenizer.encode((FOLDER / "demo/calibration.txt").read_text("utf-8")[:4000])[: 7 * N_CTX]


def collected(tokens, weights=(1,), **settings):
    """Covariances of the demo (a small DeepSeek-V3: a dense layer, then experts), and its importance matrix."""
    model = load_model(open_source(FOLDER / "demo"), **settings)
    collector = CovarianceCollector(covariance_inputs(model.graph, experts=True), model.workers)
    size = len(tokens) // len(weights)
    segments = [TextSegment(tokens[i * size : (i + 1) * size], weight) for i, weight in enumerate(weights)]
    options = CollectOptions(output=True)
    imatrix, _ = collect(model, cut_windows(model, segments, N_CTX), options=options, covariance=collector)
    parts = {}
    collector.each_part(lambda name, matrix, covariance: parts.update({(name, matrix): covariance}))
    return model, parts, imatrix


@pytest.fixture(scope="module")
def demo(tokens):
    return collected(tokens, threads=2)


def shared(parts, inputs, name, matrix):
    one = next(one for one in inputs if name in one.tensors)
    return parts[one.name, matrix if one.matrices > 1 else 0]


def test_every_matrix_has_the_covariance_of_its_inputs(demo, tokens):
    model, parts, _ = demo
    observer = Inputs()
    with model.observing(observer):
        collect(model, tokens, n_ctx=N_CTX)
    inputs, seen = covariance_inputs(model.graph, experts=True), 0
    for (name, matrix), rows in observer.rows.items():
        if name.endswith(("ffn_gate_exps.weight", "ffn_up_exps.weight")):  # an expert's own inputs, which it has not
            continue
        x, covariance = np.concatenate(rows), shared(parts, inputs, name, matrix)
        assert covariance.tokens == len(x)
        exact = x.T @ x / len(x)
        roots = np.sqrt(np.diagonal(exact))
        error = np.abs(covariance.matrix - exact) / np.maximum(np.outer(roots, roots), 1e-30)
        assert error.max() < 0.02, name
        assert np.sqrt(np.mean(error**2)) < 2e-3, name
        seen += 1
    assert seen == sum(len(one.tensors) * one.matrices for one in inputs) - 2 * 3


def test_the_diagonal_is_the_importance_matrix(demo):
    model, parts, imatrix = demo
    for one in covariance_inputs(model.graph, experts=True):
        sums, counts = imatrix.entries[one.tensors[0]]
        for matrix in range(one.matrices):
            covariance = parts[one.name, matrix]
            assert covariance.tokens == counts[matrix]
            if counts[matrix]:
                np.testing.assert_allclose(covariance.diagonal, sums[matrix] / counts[matrix], rtol=0.01)


def test_tensors_that_read_the_same_share_a_covariance(demo):
    inputs = covariance_inputs(demo[0].graph)
    groups = {one.tensors for one in inputs}

    def group(*names, layer=1):
        return tuple(f"blk.{layer}.{name}.weight" for name in names)

    assert group("attn_q_a", "attn_kv_a_mqa") in groups
    assert group("ffn_gate", "ffn_up", layer=0) in groups
    assert group("ffn_down", layer=0) in groups
    experts = next(one for one in inputs if group("ffn_gate_exps")[0] in one.tensors)
    expected = group("ffn_gate_inp", "ffn_gate_shexp", "ffn_up_shexp", "ffn_gate_exps", "ffn_up_exps")
    assert set(experts.tensors) == set(expected)
    assert not any("ffn_down_exps" in name for names in groups for name in names)
    assert inputs[0].tensors == ("output.weight",)
    assert all({f"blk.1.attn_{part}.weight"} in [set(names) for names in groups] for part in ("kv_b", "k_b", "v_b", "output"))


def test_threads_and_micro_batches_do_not_change_a_bit(tokens):
    _, parts, _ = collected(tokens, threads=2)
    for settings in ({"threads": 1, "ubatch": 200}, {"threads": 3, "ubatch": 64}):
        _, others, _ = collected(tokens, batch=2048, **settings)
        assert others.keys() == parts.keys()
        for key, covariance in parts.items():
            assert others[key].tokens == covariance.tokens
            assert np.array_equal(others[key].matrix, covariance.matrix), (key, settings)


def test_weights_of_texts(demo, tokens):
    _, once, _ = demo
    _, parts, imatrix = collected(tokens[: 6 * N_CTX], weights=(1, 3), threads=2)
    key = ("blk.0.ffn_gate.weight", 0)
    assert parts[key].tokens == 3 * N_CTX + 3 * 3 * N_CTX
    sums, counts = imatrix.entries[key[0]]
    np.testing.assert_allclose(parts[key].diagonal, sums[0] / counts[0], rtol=0.01)
    assert not np.allclose(parts[key].matrix, once[key].matrix, rtol=0.01)


class Kept(Observer):
    """Wants the inputs of latent attention; bytes: of those of all heads that it was given at most."""

    def __init__(self):
        self.bytes = 0

    def wants_input(self, op):
        return isinstance(op, ops.LatentAttention)

    def on_head_inputs(self, op, weight, x):
        self.bytes = max(self.bytes, x.nbytes if weight is op.observed[2] else 0)


@pytest.mark.parametrize("mla", [0, 1, 3])
def test_memory_of_a_pass_counts_the_latents_of_all_heads(tokens, mla):
    """That is what covariances are collected of; importance alone takes their squares, but where they become the result."""
    model, kept = load_model(open_source(FOLDER / "demo"), mla=mla), Kept()
    inputs = covariance_inputs(model.graph)
    with model.observing(kept):
        model.hidden_of_windows(np.array([tokens[:N_CTX]]))
    op = next(op for op in model.graph.ops if isinstance(op, ops.LatentAttention))
    assert kept.bytes == 4 * N_CTX * op.q.shape[0] * op.observed[2].shape[0]
    said = {}
    for observer in (Collector(model), InputObserver(inputs), CovarianceCollector(inputs, model.workers)):
        with model.observing(observer):
            said[type(observer)] = model.windows_bytes(64, N_CTX)  # of several windows in a pass
    squares, *others = said.values()
    assert others[0] == others[1]
    assert others[0] == squares if mla < 2 else others[0] > squares
    assert said[InputObserver] > kept.bytes * model.settings.ubatch // N_CTX
