"""Two streams through a graph: what is handed over is what matrices multiply, before they are read; the same bits however."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")
import torch
from checkpoint_cases import convert_record

from ggufmill.formats import TensorSource
from ggufmill.quantize import gguf_source
from ggufmill.runtime import load_model
from ggufmill.runtime.backends.torch import two_streams as module
from ggufmill.runtime.backends.torch.stream_steps import added_late, added_values, kept_bytes, matrix_inputs, steps_of
from ggufmill.runtime.backends.torch.two_streams import TwoStreams
from ggufmill.runtime.backends.torch.weights import Weights
from ggufmill.runtime.graph import Observer, ops

pytestmark = pytest.mark.oracle

N = 24
CASES = ["llama", "qwen3moe", "v2-lite", "v3", "gemma4", "qwen35", "mamba", "deepseek4", "gpt-oss"]


class Inputs(Observer):
    """What matrices multiply, by (weight, matrix), in passes of whole windows."""

    def __init__(self):
        self.found = {}

    def wants_input(self, op):
        return isinstance(op, ops.Linear | ops.ExpertLinear | ops.LatentAttention)

    def on_input(self, op, weight, matrix, x):
        self.found.setdefault((weight.name, matrix), []).append(x.copy())


class Replaced(Weights):
    """Weights of which some may only be read once they are `ready`."""

    def __init__(self, source: TensorSource, waiting):
        super().__init__(source, {}, exact=True)
        self.waiting = set(waiting)

    def matrix(self, weight, device):
        assert weight.name not in self.waiting, f"{weight.name} is read before its inputs are known"
        return super().matrix(weight, device)


def run(path, windows, original=None, misses=None, routed=None, **options):
    """name -> (x, z) of all matrices, and what is handed over with them. misses: gets what the values miss that a matrix'
    results are added to; routed: of experts' the choices and weights of either stream."""
    source = gguf_source(path)
    model = load_model(path, threads=1)
    graph = added_late(model.graph)
    inputs = matrix_inputs(graph)
    changed = Replaced(source, inputs)
    streams = TwoStreams(graph, Weights(original or source, {}, exact=True), changed, windows, inputs, **options)
    found, halves = {}, {}

    def on_input(one, known):
        names = [name for name, other in inputs.items() if other is one]
        assert names
        for name in names:
            for matrix in range(one.matrices):
                rows = [streams.rows(one, window, matrix) for window in range(len(windows))]
                found[name, matrix] = tuple(np.concatenate([row[i].numpy() for row in rows]) for i in range(2))
                halves[name, matrix] = known.halves(matrix)
            for weight, stream in one.streams.items() if misses is not None else ():
                parts = [[of.values[index][0].numpy() for index in stream] for of in streams._streams]
                misses[weight.name] = sum(parts[0]) - sum(parts[1])
                if one.kind == "experts":
                    sent = [of.values[one.op.routing.index] for of in streams._streams]
                    routed[weight.name] = [[x.numpy() for x in each] for each in sent]
            changed.waiting.remove(name)

    streams.run(on_input)
    assert not changed.waiting
    return found, halves


def inputs_in(model, windows):
    recorder = Inputs()
    with model.observing(recorder):
        for window in windows:
            model.hidden_of_windows(window[None])
    return recorder.found


@pytest.mark.parametrize("case", CASES)
def test_inputs_are_those_of_the_model(case, tmp_path):
    """Of each matrix; of experts that read what the layer does, those of all tokens."""
    record, path = convert_record(case, tmp_path)
    windows = np.stack([record.tokens[:N], record.tokens[N : 2 * N]])
    found, halves = run(path, windows)
    model = load_model(path, threads=1, exact=True)
    seen, kinds, compared = inputs_in(model, windows), matrix_inputs(model.graph), set()
    for (name, matrix), (x, z) in found.items():
        assert np.array_equal(x, z), name
        assert not halves[name, matrix][0].drifts.any(), name
        assert sum(half.tokens for half in halves[name, matrix]) == len(z)
        squares = sum(half.squares for half in halves[name, matrix])
        np.testing.assert_allclose(squares, z.T @ z, rtol=1e-4, atol=1e-4 * max(1.0, np.square(z).sum(axis=0).max(initial=0)))
        if (name, matrix) in seen and not ("exps" in name and kinds[name].kind == "value"):
            expected = np.concatenate(seen[name, matrix]).reshape(z.shape)
            compared.add(kinds[name].kind)
            if kinds[name].kind == "value":
                assert np.abs(expected - z).max() <= 2e-3 * np.abs(expected).max(), name
            else:  # in another order
                products = expected.T @ expected
                assert np.abs(products - z.T @ z).max() <= 5e-3 * max(1e-6, np.abs(products).max()), name
    assert compared == {one.kind for one in kinds.values()}


@pytest.mark.parametrize("case", ["qwen3moe", "v3", "gemma4", "qwen35", "deepseek4"])
def test_the_same_bits_for_threads_and_in_files(case, tmp_path, monkeypatch):
    record, path = convert_record(case, tmp_path)
    windows = np.stack([record.tokens[i : i + N] for i in range(4)])
    monkeypatch.setattr(module, "GROUP_TOKENS", 2 * N)
    source = gguf_source(path)
    noisy = _with_noise(source)
    expected, sums = run(path, windows, noisy)
    assert any(not np.array_equal(x, z) for x, z in expected.values())
    for options in ({"threads": 3}, {"threads": 2, "folder": tmp_path, "copied_bytes": 0}):
        other, other_sums = run(path, windows, noisy, **options)
        for key, (x, z) in expected.items():
            assert np.array_equal(x, other[key][0]), key
            assert np.array_equal(z, other[key][1]), key
            for mine, theirs in zip(sums[key], other_sums[key], strict=True):
                assert np.array_equal(mine.drifts, theirs.drifts), key
                assert mine.misses.keys() == theirs.misses.keys()
                assert all(np.array_equal(x, theirs.misses[weight]) for weight, x in mine.misses.items()), key
    assert not list(tmp_path.glob("tmp*"))


def test_drifts_are_those_of_both_streams(tmp_path, monkeypatch):
    """Their sums by windows of even and odd numbers, in strips of columns; of an expert over tokens that both streams send."""
    record, path = convert_record("v2-lite", tmp_path)
    windows = np.stack([record.tokens[i : i + N] for i in range(3)])
    monkeypatch.setattr(module, "_STRIP", 24)
    misses, routed = {}, {}
    found, halves = run(path, windows, _with_noise(gguf_source(path)), misses, routed)
    kinds = matrix_inputs(load_model(path, threads=1).graph)
    assert {one.kind for one in kinds.values()} >= {"value", "experts"}
    for (name, matrix), (x, z) in found.items():
        drifts = halves[name, matrix][0].drifts + halves[name, matrix][1].drifts
        np.testing.assert_allclose(drifts, (x - z).T @ z, atol=1e-4 * max(1, np.abs(z).max(initial=0) ** 2 * len(z)))
        if len(z) == len(windows) * N:
            even = np.r_[z[:N], z[2 * N :]]
            np.testing.assert_allclose(halves[name, matrix][0].squares, even.T @ even, rtol=1e-3, atol=1e-3)

    assert {"blk.0.ffn_down.weight", "blk.1.attn_output.weight", "blk.1.ffn_down_shexp.weight"} <= misses.keys()
    assert not misses["blk.0.attn_output.weight"].any()  # embeddings are the same
    assert routed
    for name, missed in misses.items():
        for matrix in range(len(found)) if name in routed else [0]:
            if (name, matrix) not in found:
                break
            z, sums = found[name, matrix][1], sum(half.misses[name] for half in halves[name, matrix])
            own = missed
            if name in routed:  # as much of each expert as makes the whole with their weights
                (first, _), (second, weights) = routed[name]
                both = (first == matrix).any(axis=1) & (second == matrix).any(axis=1)
                own = (missed / weights.sum(axis=1, keepdims=True))[both]
            most = max(1, np.abs(z).max(initial=0) * np.abs(own).max(initial=0) * len(z))
            np.testing.assert_allclose(sums, own.T @ z, atol=1e-4 * most)


@pytest.mark.parametrize("case", CASES)
def test_what_results_are_added_to(case, tmp_path):
    """The stream, whatever is between, with what all other matrices give it in the layer, as far as order allows."""
    _, path = convert_record(case, tmp_path)
    graph = load_model(path, threads=1).graph
    late = added_late(graph)
    assert sorted(map(id, late.ops)) == sorted(map(id, graph.ops))
    known = set()
    for op in (*late.ops, *late.head):
        assert known.issuperset(value.index for value in op.inputs), "an op reads what is not computed yet"
        known.update(value.index for value in op.outputs)
    streams = {weight.name: indices for weight, indices in added_values(late).items()}
    first, second = graph.ops[0].outputs[0].index, graph.layers[0].index
    if case in ("llama", "qwen3moe", "v2-lite", "v3"):
        assert streams["blk.0.attn_output.weight"] == (first,)
        assert streams["blk.1.attn_output.weight"] == (second,)
    if case in ("v2-lite", "v3"):
        combined = next(op.out.index for op in graph.ops if isinstance(op, ops.CombineExperts))
        shared = next(name for name in streams if name.endswith("ffn_down_shexp.weight"))
        assert combined in streams[shared]
        assert len(streams[shared]) == 2
        experts = shared.replace("ffn_down_shexp", "ffn_down_exps")
        assert streams[experts] == tuple(index for index in streams[shared] if index != combined)
    if case == "gemma4":  # a norm is between
        assert not streams


def test_weights_that_several_ops_multiply_are_not_replaced(tmp_path):
    """Tied embeddings, and a matrix that is left as it is."""
    _, path = convert_record("gemma4", tmp_path)
    graph = load_model(path, threads=1).graph
    assert "token_embd.weight" not in matrix_inputs(graph)
    one = {"blk.1.ffn_down.weight": matrix_inputs(graph)["blk.1.ffn_down.weight"]}
    (step,) = steps_of(graph, one)
    assert step.inputs == list(one.values())
    assert one["blk.1.ffn_down.weight"].op not in step.ops
    assert 0 < kept_bytes(graph, [step]) <= kept_bytes(graph, steps_of(graph, matrix_inputs(graph)))
    assert torch.get_num_threads() >= 1


def _with_noise(source: TensorSource) -> TensorSource:
    """The model with other weights in its matrices."""

    def noisy(tensor):
        if len(tensor.shape) < 2 or "token_embd" in tensor.name:
            return tensor

        def read(start, stop):
            x = tensor.read(start, stop)
            noise = np.random.default_rng([start, stop, len(tensor.name)]).standard_normal(x.shape).astype(np.float32)
            return x + np.float32(0.02) * noise

        return replace(tensor, read=read, raw=None, stored=None, mapped=None)

    return replace(source, tensors={name: noisy(tensor) for name, tensor in source.tensors.items()})
