import dataclasses
import json
import re
import threading

import numpy as np
import pytest

from ggufmill.formats import MillError, PlanError, SourceTensor
from ggufmill.jobs.patterns import NamePattern
from ggufmill.pipeline.measuring.compare import _planned
from ggufmill.runtime import load_model
from ggufmill.runtime.evaluate import compare as comparing
from ggufmill.runtime.evaluate.compare import compare, weights_bytes, weights_seconds
from ggufmill.runtime.graph import Observer


def with_tensor(source, name, change):
    """The source with one tensor's values changed by a function of its array of rows."""
    tensor = source.tensors[name]
    per_matrix = tensor.shape[1] if len(tensor.shape) > 1 else 1
    rows = np.concatenate([tensor.read(i, i + per_matrix) for i in range(0, tensor.n_rows, per_matrix)])
    changed = change(rows.copy())
    new = dataclasses.replace(tensor, read=lambda start, stop: changed[start:stop], raw=None, mapped=None)
    return dataclasses.replace(source, tensors=source.tensors | {name: new})


def insert_nan(rows):
    rows[0, 1] = np.nan
    return rows


class LastLayer(Observer):
    def __init__(self, model, on_output):
        self.value, self.callback = model.graph.layers[-1], on_output

    def wants_output(self, op):
        return op.out == self.value

    def on_output(self, op, out):
        self.callback(out)


def load(source, **settings):
    return load_model(source, exact=True, threads=1, **settings)


@pytest.fixture(scope="module")
def deep(build):
    """A mixture of experts of three layers."""
    return build("v3")


def test_a_model_has_no_errors_against_itself(deep, tokens):
    comparison = compare(load(deep), load(deep), tokens, 50, products=True)
    assert [e.layer for e in comparison.layers] == [0, 1, 2]
    assert all(e.relative == e.worst == 0 and e.cosine == pytest.approx(1) for e in comparison.layers)
    assert comparison.output["kld_mean"] == 0
    assert comparison.output["top1_agreement"] == 100
    assert len(comparison.tensors) == len(deep.tensors)
    assert all(t.relative == 0 for t in comparison.tensors)
    assert comparison.tokens == 50
    assert comparison.nonfinite == ""
    json.dumps(comparison.as_json())


def test_errors_start_in_the_layer_whose_weights_differ(deep, tokens):
    name = "blk.1.attn_output.weight"
    noise = np.random.default_rng(1).standard_normal(deep.tensors[name].shape[::-1]).astype(np.float32)
    other = with_tensor(deep, name, lambda rows: rows + 0.02 * noise)
    a, b = load(deep), load(other)
    comparison = compare(a, b, tokens, 50, chunks=2, products=True)
    assert [e.relative > 0 for e in comparison.layers] == [False, True, True]
    assert comparison.tokens == 100
    changed = {t.name: t for t in comparison.tensors if t.relative}
    assert changed.keys() == {name}
    weights = deep.tensors[name].read(0, deep.tensors[name].n_rows)
    expected = np.linalg.norm(0.02 * noise) / np.linalg.norm(weights)
    assert changed[name].relative == pytest.approx(expected, rel=1e-4)
    assert changed[name].product == pytest.approx(expected, rel=0.5)  # the noise has no preferred direction
    # Independently: the outputs of the last layer of both models, before the norm.
    outputs = []
    for model in (a, b):
        with model.observing(LastLayer(model, lambda x: outputs.append(x.copy()))):
            model.hidden([(model.new_cache(50), tokens[:50])])
    layers_only = compare(a, b, tokens, 50, weights=None)
    assert layers_only.tensors == []
    relative = np.linalg.norm(outputs[1] - outputs[0]) / np.linalg.norm(outputs[0])
    assert layers_only.layers[-1].relative == pytest.approx(relative, rel=1e-4)


def test_products_are_measured_per_expert(deep, tokens):
    rows = deep.tensors["blk.2.ffn_up_exps.weight"].shape[1]

    def change(values):
        values[5 * rows : 6 * rows] *= 1.25
        return values

    other = with_tensor(deep, "blk.2.ffn_up_exps.weight", change)
    comparison = compare(load(deep), load(other), tokens, 100, products=True, weights="ffn_up_exps")
    assert [t.name for t in comparison.tensors] == ["blk.1.ffn_up_exps.weight", "blk.2.ffn_up_exps.weight"]
    assert comparison.tensors[0].product == 0
    assert 0 < comparison.tensors[1].product < 0.25


@pytest.mark.parametrize("broken_b", [False, True])
def test_nan_ends_the_comparison_and_is_located(deep, tokens, broken_b):
    broken = with_tensor(deep, "blk.1.attn_output.weight", insert_nan)
    sources = [deep, broken] if broken_b else [broken, deep]
    comparison = compare(load(sources[0]), load(sources[1]), tokens, 50)
    assert [e.layer for e in comparison.layers] == [0]
    assert comparison.tensors == []
    assert re.search(r"first output that is not finite .* blk\.1\.attn_output\.weight", comparison.nonfinite)
    assert not [t for t in threading.enumerate() if t.name == "compare"]


def test_nan_in_the_output_head(deep, tokens):
    comparison = compare(load(deep), load(with_tensor(deep, "output.weight", insert_nan)), tokens, 50)
    assert "output.weight" in comparison.nonfinite


def test_an_exception_in_the_thread_of_model_b_is_raised(deep, tokens):
    a, b = load(deep), load(deep)

    def fail(x):
        raise MillError("stopped in the last layer")

    with b.observing(LastLayer(b, fail)), pytest.raises(MillError, match="stopped in the last layer"):
        compare(a, b, tokens, 50)
    assert a.observer is b.observer is None


def test_models_of_other_shapes_are_refused(deep, tiny, tokens):
    with pytest.raises(PlanError, match="3 layers and 288 tokens against 1 layers and 258 tokens"):
        compare(load(deep), load(tiny), tokens, 50)
    with pytest.raises(PlanError, match="not a regular expression"):
        compare(load(deep), load(deep), None, weights="(")


def test_tensors_that_only_one_model_has_are_listed(deep):
    fewer = dataclasses.replace(deep, tensors={n: t for n, t in deep.tensors.items() if n != "blk.0.attn_kv_b.weight"})
    comparison = compare(load(deep), load(fewer), None)
    assert comparison.only_a == ["blk.0.attn_kv_b.weight"]
    assert comparison.layers == []
    assert comparison.only_b == comparison.reshaped == []


def test_memory_of_weights_is_of_the_parts_that_threads_have_at_a_time(monkeypatch):
    monkeypatch.setattr(comparing, "ROWS_BYTES", 4 * 64 * 32)

    def said(shape, threads):
        return weights_bytes(SourceTensor("a", shape, "f32", lambda *_: np.zeros(0)), threads)

    part = comparing._WEIGHT_BYTES * 64 * 32
    assert [said((64, 128), threads) for threads in (1, 2, 8)] == [part, 2 * part, 4 * part]
    assert [said((64, 32), threads) for threads in (1, 8)] == [part, part]
    assert said((64, 16, 3), 8) == 3 * part / 2


def test_tensors_of_other_shapes_are_not_planned(deep):
    """The largest of their types, which is what is timed."""
    name, tensor = "more.weight", dataclasses.replace(deep.tensors["output.weight"], name="more.weight")
    narrow = dataclasses.replace(tensor, shape=(tensor.shape[0] // 2, tensor.shape[1]))
    models = [load(dataclasses.replace(deep, tensors={**deep.tensors, name: each})) for each in (tensor, narrow)]
    planned = _planned(models, False, 32, 0, NamePattern(""), (0, 0), 1)
    assert planned.work == {"tensors": len(deep.tensors), "weights": sum(t.n_elements for t in deep.tensors.values())}
    assert compare(*models, None).reshaped == [name]


def test_comparing_is_timed_on_the_largest_tensor_of_each_pair_of_types(monkeypatch):
    timed = []
    monkeypatch.setattr(comparing, "_seconds_of_a_weight", lambda a, b: timed.append(a.name) or 2.0)
    rows = np.ones((64, 32), np.float32)

    def tensors(*types):
        shapes = (32, 64), (32, 32), (32,)
        made = zip("abc", shapes, types, strict=True)
        return {name: SourceTensor(name, shape, kind, lambda start, stop: rows[start:stop]) for name, shape, kind in made}

    a, b = tensors("f32", "f32", "f32"), tensors("q8_0", "q8_0", "f32")
    assert weights_seconds(a, b, list("bac")) == 2.0 * (96 * 32 + 32)
    assert timed == ["a", "c"]
    monkeypatch.undo()
    assert weights_seconds(a, b, list("abc")) > 0
