import dataclasses
import json
import threading

import numpy as np
import pytest

from ggufmill.formats import MillError, PlanError
from ggufmill.runtime import load_model
from ggufmill.runtime.evaluate.compare import check, compare
from ggufmill.runtime.graph import Observer


def with_tensor(source, name, change):
    """The source with one tensor's values changed by a function of its array of rows."""
    tensor = source.tensors[name]
    per_matrix = tensor.shape[1] if len(tensor.shape) > 1 else 1
    rows = np.concatenate([tensor.read(i, i + per_matrix) for i in range(0, tensor.n_rows, per_matrix)])
    changed = change(rows.copy())
    new = dataclasses.replace(tensor, read=lambda start, stop: changed[start:stop], raw=None, mapped=None)
    return dataclasses.replace(source, tensors=source.tensors | {name: new})


def spoil(rows):
    rows[0, 1] = np.nan
    return rows


class LastLayer(Observer):
    def __init__(self, model, on_output):
        self.value, self.tell = model.graph.layers[-1], on_output

    def wants_output(self, op):
        return op.out == self.value

    def on_output(self, op, out):
        self.tell(out)


def load(source, **settings):
    return load_model(source, exact=True, threads=1, **settings)


@pytest.fixture(scope="module")
def deep(build):
    """A mixture of experts of three layers."""
    return build("v3")[1]


def test_a_model_is_like_itself(deep, tokens):
    found = compare(load(deep), load(deep), tokens, 50, products=True)
    assert [e.layer for e in found.layers] == [0, 1, 2]
    assert all(e.relative == e.worst == 0 and e.cosine == pytest.approx(1) for e in found.layers)
    assert found.output["kld_mean"] == 0
    assert found.output["top1_agreement"] == 100
    assert len(found.tensors) == len(deep.tensors)
    assert all(t.relative == 0 for t in found.tensors)
    assert found.tokens == 50
    check(found)
    json.dumps(found.as_json())


def test_errors_begin_in_the_layer_that_differs(deep, tokens):
    name = "blk.1.attn_output.weight"
    noise = np.random.default_rng(1).standard_normal(deep.tensors[name].shape[::-1]).astype(np.float32)
    other = with_tensor(deep, name, lambda rows: rows + 0.02 * noise)
    a, b = load(deep), load(other)
    found = compare(a, b, tokens, 50, chunks=2, products=True)
    assert [e.relative > 0 for e in found.layers] == [False, True, True]
    assert found.tokens == 100
    changed = {t.name: t for t in found.tensors if t.relative}
    assert changed.keys() == {name}
    weights = deep.tensors[name].read(0, deep.tensors[name].n_rows)
    expected = np.linalg.norm(0.02 * noise) / np.linalg.norm(weights)
    assert changed[name].relative == pytest.approx(expected, rel=1e-4)
    assert changed[name].product == pytest.approx(expected, rel=0.5)  # noise without a direction
    # By hand: the outputs of the last layer before the norm, of both models.
    states = []
    for model in (a, b):
        with model.observing(LastLayer(model, lambda x: states.append(x.copy()))):
            model.hidden([(model.new_cache(50), tokens[:50])])
    one = compare(a, b, tokens, 50, weights=None)
    assert one.tensors == []
    relative = np.linalg.norm(states[1] - states[0]) / np.linalg.norm(states[0])
    assert one.layers[-1].relative == pytest.approx(relative, rel=1e-4)


def test_products_of_each_expert_are_measured(deep, tokens):
    rows = deep.tensors["blk.2.ffn_up_exps.weight"].shape[1]

    def change(values):
        values[5 * rows : 6 * rows] *= 1.25
        return values

    other = with_tensor(deep, "blk.2.ffn_up_exps.weight", change)
    found = compare(load(deep), load(other), tokens, 100, products=True, weights="ffn_up_exps")
    assert [t.name for t in found.tensors] == ["blk.1.ffn_up_exps.weight", "blk.2.ffn_up_exps.weight"]
    assert found.tensors[0].product == 0
    assert 0 < found.tensors[1].product < 0.25


@pytest.mark.parametrize("which", [0, 1])
def test_nan_stops_and_is_named(deep, tokens, which):
    broken = with_tensor(deep, "blk.1.attn_output.weight", spoil)
    sources = [deep, broken] if which else [broken, deep]
    found = compare(load(sources[0]), load(sources[1]), tokens, 50)
    assert [e.layer for e in found.layers] == [0]
    assert found.tensors == []
    with pytest.raises(MillError, match=r"first output that is not finite .* blk\.1\.attn_output\.weight"):
        check(found)
    assert not [t for t in threading.enumerate() if t.name == "compare"]


def test_nan_in_the_head(deep, tokens):
    found = compare(load(deep), load(with_tensor(deep, "output.weight", spoil)), tokens, 50)
    assert "output.weight" in found.nonfinite


def test_an_error_of_the_other_thread_arrives(deep, tokens):
    a, b = load(deep), load(deep)

    def fail(x):
        raise MillError("stopped in the last layer")

    with b.observing(LastLayer(b, fail)), pytest.raises(MillError, match="stopped in the last layer"):
        compare(a, b, tokens, 50)
    assert a.observer is b.observer is None


def test_other_shapes_are_refused(deep, tiny, tokens):
    with pytest.raises(PlanError, match="3 layers and 96 tokens against 1 layers and 258 tokens"):
        compare(load(deep), load(tiny), tokens, 50)
    with pytest.raises(PlanError, match="no regular expression"):
        compare(load(deep), load(deep), None, weights="(")


def test_weights_alone_list_what_the_other_has_not(deep):
    fewer = dataclasses.replace(deep, tensors={n: t for n, t in deep.tensors.items() if n != "blk.0.attn_kv_b.weight"})
    found = compare(load(deep), load(fewer), None)
    assert found.only_a == ["blk.0.attn_kv_b.weight"]
    assert found.layers == []
    assert found.only_b == found.reshaped == []
