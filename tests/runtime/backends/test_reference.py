"""The reference backend against transformers: one batch, and several sequences side by side; what it tells an observer."""

import math

import checkpoint_cases as checkpoints
import numpy as np
import pytest

from ggufmill.formats import MillError
from ggufmill.quantize import gguf_source
from ggufmill.runtime.backends import reference
from ggufmill.runtime.backends.reference import elementwise, functions
from ggufmill.runtime.backends.reference.reference_pass import ReferenceCache, ReferencePass
from ggufmill.runtime.graph import Observer, Value, ops
from ggufmill.runtime.graph.values import RotaryEmbedding, alibi_slopes
from ggufmill.runtime.models.architectures import build_graph

TOLERANCE = checkpoints.TOLERANCE


def load(path):
    source = gguf_source(path)
    return reference.compile_graph(build_graph(source), source)


def logits(model, batch):
    """batch: (cache, tokens) of each sequence -> the logits of each."""
    hidden = model.hidden(np.concatenate([tokens for _, tokens in batch]), [(cache, len(tokens)) for cache, tokens in batch])
    ends = np.cumsum([len(tokens) for _, tokens in batch])[:-1]
    return np.split(model.logits(hidden), ends)


def test_forks_go_on_by_themselves(tmp_path):
    record, path = checkpoints.convert_record("v3", tmp_path)
    tokens = record.tokens
    model = load(path)
    cache = model.new_cache(20)
    logits(model, [(cache, tokens[:10])])
    fork = cache.fork(5)
    logits(model, [(fork, tokens[20:25])])
    cache.truncate(8)
    (result,) = logits(model, [(cache, tokens[8:20])])
    assert record.difference(result, slice(8, 20)) < TOLERANCE
    with pytest.raises(MillError, match=r"the context is full: 20 \+ 1 tokens do not fit into 20"):
        logits(model, [(cache, tokens[20:21])])


class Products(Observer):
    """Multiplies what it is told of with the weights themselves."""

    def __init__(self, model):
        self.model, self.products, self.outputs = model, {}, {}

    def wants_input(self, op):
        return isinstance(op, ops.Linear | ops.ExpertLinear | ops.LatentAttention)

    wants_output = wants_input

    def on_input(self, op, weight, matrix, x):
        tensor = self.model.source.tensors.get(weight.name)
        if tensor is not None:
            rows = weight.shape[1]
            self.products[weight.name, matrix] = x @ tensor.read(matrix * rows, (matrix + 1) * rows).T

    def on_output(self, op, out):
        self.outputs[op.weights[0].name] = out


@pytest.mark.oracle
def test_an_observer_is_told_of_inputs_and_outputs(tmp_path):
    tokens, _, path = checkpoints.convert_case("v3-mainline", tmp_path)
    model = load(path)
    model.observer = seen = Products(model)
    (whole,) = logits(model, [(model.new_cache(len(tokens)), tokens)])
    linear = [op for op in (*model.graph.ops, *model.graph.head) if isinstance(op, ops.Linear)]
    assert len(linear) > 20
    for op in linear:
        assert np.array_equal(seen.products[op.weight.name, 0], seen.outputs[op.weight.name])
    assert np.array_equal(seen.outputs["output.weight"], whole)
    for name in ("blk.1.ffn_up_exps.weight", "blk.2.ffn_down_exps.weight"):
        rows = np.concatenate([seen.products[name, expert] for expert in range(8) if (name, expert) in seen.products])
        results = seen.outputs[name].reshape(-1, rows.shape[1])
        assert len(rows) == len(results) == 2 * len(tokens)
        assert np.allclose(rows[np.lexsort(rows.T)], results[np.lexsort(results.T)], atol=1e-6)
    heads = np.stack([seen.products["blk.1.attn_v_b.weight", head] for head in range(4)], axis=1)
    assert np.allclose(heads, seen.outputs["blk.1.attn_k_b.weight"], atol=1e-6)  # of the whole op
    assert seen.products["blk.1.attn_k_b.weight", 3].shape == (len(tokens), 32)
    model.observer = None
    seen.outputs.clear()
    logits(model, [(model.new_cache(2), tokens[:2])])
    assert not seen.outputs


# --- ops against their formulas ----------------------------------------------------------------------------------------


def step(positions):
    positions, segments = np.asarray(positions), [(ReferenceCache(100), slice(0, len(positions)))]
    return ReferencePass(np.zeros(len(positions), np.int64), positions, segments, Observer())


def test_pairs_turn_by_position_times_frequency():
    rope = RotaryEmbedding(np.array([1.0, 0.1]), 1.0, interleaved=True)
    x = np.array([[[1, 0, 0, 2, 9]]], np.float32)
    expected = [math.cos(3), math.sin(3), -2 * math.sin(0.3), 2 * math.cos(0.3), 9]
    assert functions.rope(step([3]), x, rope, 0)[0, 0].tolist() == pytest.approx(expected)
    moved = functions.rope(step([3]), np.roll(x, 1, axis=2), rope, 1)
    assert np.roll(moved, -1, axis=2)[0, 0].tolist() == pytest.approx(expected)
    twice = RotaryEmbedding(rope.frequencies, 2.0, interleaved=True)
    assert functions.rope(step([3]), x, twice, 0)[0, 0].tolist() == pytest.approx([*(2 * np.array(expected[:4])), 9])


def test_the_two_pairings_are_permutations_of_each_other():
    random = np.random.default_rng(0)
    x, frequencies = random.standard_normal((5, 2, 8)).astype(np.float32), random.random(4)
    halves = np.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)
    a = functions.rope(step(range(5)), x, RotaryEmbedding(frequencies, 1.0, True), 0)
    b = functions.rope(step(range(5)), halves, RotaryEmbedding(frequencies, 1.0, False), 0)
    assert np.allclose(np.concatenate([a[..., 0::2], a[..., 1::2]], axis=-1), b, atol=1e-6)


def test_activations():
    gate, up = np.linspace(-80, 80, 321, dtype=np.float32), np.full(321, 3, np.float32)
    exact, none = gate.astype(np.float64), step([])
    kinds = (("silu", 0.0), ("gelu", 0.0), ("clamped_swish", 7.0), ("silu", 2.0), ("clamped_silu", 2.0))
    silu, gelu, swish, before, after = (functions.gated_activation(none, gate, up, *each) for each in kinds)
    assert np.allclose(silu, 3 * exact / (1 + np.exp(-exact)), rtol=1e-5, atol=1e-30)
    inner = math.sqrt(2 / math.pi) * (exact + 0.044715 * exact**3)
    assert np.allclose(gelu, 3 * 0.5 * exact * (1 + np.tanh(inner)), rtol=1e-5, atol=1e-5)
    limited = np.minimum(exact, 7)
    assert np.allclose(swish, limited / (1 + np.exp(-1.702 * limited)) * (3 + 1), rtol=1e-5, atol=1e-30)
    limited = np.minimum(exact, 2)
    assert np.allclose(before, limited / (1 + np.exp(-limited)) * 2, rtol=1e-5, atol=1e-30)
    assert np.allclose(after, np.minimum(exact / (1 + np.exp(-exact)), 2) * 2, rtol=1e-5, atol=1e-30)
    large = functions.gated_activation(none, up, 10 * up, "clamped_swish", 7.0)
    assert np.allclose(large, 3 / (1 + np.exp(-1.702 * 3)) * 8)
    assert np.array_equal(functions.activation(none, gate, "squared_relu"), np.where(gate > 0, gate * gate, 0))


def test_norms():
    draw = np.random.default_rng(11)
    x, weight, bias = (draw.standard_normal(shape).astype(np.float32) for shape in ((5, 3, 8), 8, 8))
    rms = functions.norm(step([]), x, weight, 0.1, None, "rms", "last")
    assert np.allclose(rms, x / np.sqrt((x**2).mean(2, keepdims=True) + 0.1) * weight, atol=1e-6)
    centred = (x - x.mean(2, keepdims=True)) / np.sqrt(x.var(2, keepdims=True) + 0.1)
    assert np.allclose(functions.norm(step([]), x, weight, 0.1, bias, "layer", "last"), centred * weight + bias, atol=1e-6)
    each = draw.standard_normal((3, 8)).astype(np.float32)
    assert np.allclose(functions.norm(step([]), x, each, 0.1, None, "layer", "last"), centred * each, atol=1e-6)
    together = functions.norm(step([]), x, each.reshape(-1), 0.1, None, "rms", "all")
    assert np.allclose(together, x / np.sqrt((x**2).mean((1, 2), keepdims=True) + 0.1) * each, atol=1e-6)


def test_a_window_a_soft_cap_and_a_sink():
    """One query head over three keys, by hand."""
    q, k = np.full((3, 1, 1), 2.0, np.float32), np.array([1, 2, 3], np.float32).reshape(3, 1, 1)
    v = np.array([10, 20, 40], np.float32).reshape(3, 1, 1)

    def last(window=0, softcap=0.0, sinks=None, alibi=0.0, causal=True, token=2):
        options = (window, softcap, sinks, False, None, 0, alibi, causal)
        return functions.attention(step(range(3)), q, k, v, 0, 0.5, *options, Value(0, (1, 1)))[token, 0, 0]

    e, values = np.exp(np.array([1.0, 2.0, 3.0])), np.array([10, 20, 40])
    assert last() == pytest.approx(e @ values / e.sum())
    assert last(window=2) == pytest.approx(e[1:] @ values[1:] / e[1:].sum())
    assert last(sinks=np.array([1.5], np.float32)) == pytest.approx(e @ values / (e.sum() + np.exp(1.5)))
    capped = np.exp(2 * np.tanh(np.array([1, 2, 3]) / 2))
    assert last(softcap=2.0) == pytest.approx(capped @ values / capped.sum())
    biased = np.exp(np.array([1.0, 2.0, 3.0]) - 2.0**-3 * np.array([2, 1, 0]))  # one head: its slope is 2 ** -alibi
    assert last(alibi=3.0) == pytest.approx(biased @ values / biased.sum())
    assert last(causal=False, token=0) == pytest.approx(e @ values / e.sum())
    assert last(causal=False, window=3, token=0) == pytest.approx(e[:2] @ values[:2] / e[:2].sum())


def test_slopes_of_linear_biases():
    """Those of the published code: 8 heads, and 12, where four more come from those of 16."""
    assert alibi_slopes(8, 8.0).tolist() == [2.0**-i for i in range(1, 9)]
    more = [2.0 ** -(i / 2) for i in (1, 3, 5, 7)]
    assert np.allclose(alibi_slopes(12, 8.0), [*[2.0**-i for i in range(1, 9)], *more], rtol=1e-6)


def test_routing():
    logits = np.array([[1.0, 3.0, 2.0, 3.0, 0.0, -1.0]], np.float32)

    def route(**options):
        usual = {"gating": "softmax", "bias": None, "groups": 1, "groups_used": 1, "normalise": False, "scale": 1.0}
        usual |= {"jitter": 0.0, "factors": None, "by_token": None, "zeros": 0}
        experts, weights = functions.route(step([0]), logits, 2, **(usual | options))
        return experts[0].tolist(), weights[0]

    softmax, sigmoid = np.exp(logits[0]) / np.exp(logits).sum(), 1 / (1 + np.exp(-logits[0]))
    experts, weights = route()
    assert experts == [1, 3]  # of equals the lower number first
    assert np.allclose(weights, softmax[experts])
    experts, weights = route(gating="sigmoid", normalise=True, scale=3.0)
    assert experts == [1, 3]
    assert np.allclose(weights, 3 * sigmoid[experts] / sigmoid[experts].sum())
    experts, weights = route(gating="sigmoid", bias=np.array([0, 0, 0, 0, 0, 9], np.float32))
    assert experts == [5, 1]
    assert np.allclose(weights, sigmoid[experts])  # without the bias
    # Groups (1, 3), (2, 3) and (0, -1): by the best of a group the first comes first, by the sum of two the second.
    assert route(groups=3, groups_used=1)[0] == [1, 0]
    assert route(groups=3, groups_used=1, gating="sigmoid")[0] == [3, 2]


def test_experts_that_were_dropped_count_nothing():
    weight = np.arange(12, dtype=np.float32).reshape(3, 2, 2)  # three experts
    x, routing = np.ones((1, 2), np.float32), (np.array([[2, -1]]), np.array([[0.5, 0.25]], np.float32))
    out = functions.expert_linear(step([0]), x, routing, weight, np.ones((3, 2), np.float32))
    assert out.tolist() == [[[18.0, 22.0], [0.0, 0.0]]]
    assert elementwise.combine_experts(step([0]), out + 1, routing, True).tolist() == [[9.5, 11.5]]


def test_gates_sums_and_caps():
    x, y = np.array([[1.0, -2.0]], np.float32), np.array([[3.0, 4.0, 5.0]], np.float32)
    gate = np.array([0.5, 0.25], np.float32)
    assert np.allclose(functions.sigmoid_gate(step([0]), x, y, gate), y / 2)
    assert elementwise.add(step([0]), y, y, 0.5).tolist() == [[4.5, 6.0, 7.5]]
    assert elementwise.scale(step([0]), y, 2.0).tolist() == [[6.0, 8.0, 10.0]]
    assert np.allclose(elementwise.softcap(step([0]), y, 4.0), 4 * np.tanh(y / 4))
