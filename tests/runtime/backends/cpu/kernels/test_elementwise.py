import numpy as np
import pytest

from ggufmill.runtime.backends.cpu.kernels import elementwise as small
from ggufmill.runtime.backends.cpu.rope import Rope
from ggufmill.simd.compile import kernel
from ggufmill.simd.exponential import exp, exp_lanes
from ggufmill.simd.workers import Workers


@kernel
def each(x, out):
    for i in range(x.size):
        out[i] = exp(x[i])


@kernel
def sixteen(x, out):
    for i in range(0, x.size, small.LANES):
        small.store(out, i, exp_lanes(small.load(x, i)))


def test_exponential():
    x = np.concatenate([np.linspace(-87.2, 88.6, 16 * 4001), [-88, 89, np.nan, np.inf, -np.inf, 0, -0.0, 1e-40] * 2])
    x = x.astype(np.float32)
    out, lanes = np.empty_like(x), np.empty_like(x)
    each(x, out)
    sixteen(x, lanes)
    assert np.array_equal(out.view(np.int32)[x == x], lanes.view(np.int32)[x == x])
    exact = np.exp(x[:-16].astype(np.float64))
    assert np.abs(out[:-16] / exact - 1).max() < 1e-7
    for found in (out, lanes):
        assert np.array_equal(found[-8:], [0, np.inf, np.nan, np.inf, 0, 1, 1, 1], equal_nan=True)


@pytest.mark.parametrize("shape", [(1, 5), (3, 100), (70, 1024)])  # the last one is shared out
def test_normalise(shape):
    draw = np.random.default_rng(1)
    x, weight = draw.standard_normal(shape).astype(np.float32), draw.standard_normal(shape[1]).astype(np.float32)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-3) * weight
    results = []
    for count in (1, 3):
        out = np.empty_like(x)
        small.normalise(Workers(count).ready(), small.normalise_part.address, x, weight, 1e-3, out)
        results.append(out)
    assert np.allclose(results[0], expected, rtol=2e-6, atol=1e-7)
    assert np.array_equal(*results)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


ACTIVATIONS = {
    small.SILU: lambda g, u: g * sigmoid(g) * u,
    small.GELU: lambda g, u: 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))) * u,
    small.CLAMPED_SWISH: lambda g, u: np.minimum(g, 7) * sigmoid(1.702 * np.minimum(g, 7)) * (np.clip(u, -7, 7) + 1),
}


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(1, 3), (2, 37), (5, 4096)])
def test_gated(kind, shape):
    draw = np.random.default_rng(2)
    gate, up = (6 * draw.standard_normal((2, *shape))).astype(np.float32)
    gate[0, :2] = -1e4, 1e25
    with np.errstate(over="ignore"):
        expected = ACTIVATIONS[kind](gate.astype(np.float64), up.astype(np.float64))
    alone = gate.copy()
    small.gated(0, small.gate_part.address, kind, alone, up, 7.0)
    assert np.allclose(alone, expected, rtol=2e-6, atol=1e-6)
    small.gated(Workers(3).ready(), small.gate_part.address, kind, gate, up, 7.0)
    assert np.array_equal(gate, alone)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_gates_that_are_no_numbers_stay_so(kind):
    gate, up = np.array([[np.nan, 1, np.inf]], np.float32), np.array([[1, np.nan, 1]], np.float32)
    small.gated(0, small.gate_part.address, kind, gate, up, 7.0)
    assert np.isnan(gate[0, :2]).all()
    assert gate[0, 2] == (pytest.approx(14, rel=1e-4) if kind == small.CLAMPED_SWISH else np.inf)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("cut", [0, 2])  # elements in front of the heads: with them, heads do not lie side by side
def test_rotate(interleaved, cut):
    draw = np.random.default_rng(3)
    rope = Rope(draw.random(4), 1.5, interleaved)
    x = draw.standard_normal((3, 2, 10 + cut)).astype(np.float32)
    table = rope.table(np.array([0, 5, 1000]))
    expected = x.copy()
    heads = expected[..., cut:]
    first, second = (slice(0, 8, 2), slice(1, 8, 2)) if interleaved else (slice(0, 4), slice(4, 8))
    turned = (heads[..., first] + 1j * heads[..., second]) * table[:, None]
    heads[..., first], heads[..., second] = turned.real, turned.imag
    rope.rotate(x[..., cut:], table)
    assert np.allclose(x, expected, atol=1e-6)
    many = np.tile(x, (1000, 1, 1))
    shared, turns = many.copy(), np.tile(table, (1000, 1))
    rope.rotate(many[..., cut:], turns)
    rope.rotate(shared[..., cut:], turns, Workers(3))
    assert np.array_equal(many, shared)


def route_by_hand(scores, sigmoid_scores, bias, groups, groups_used, normalised, scale, used):
    """As the papers say it, one token at a time."""
    chosen, weights = [], []
    for row in scores.astype(np.float64):
        s = sigmoid(row) if sigmoid_scores else np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        choice = s + bias if bias.size else s.copy()
        grouped = choice.reshape(groups, -1)
        two = np.sort(grouped, axis=1)[:, -2:].sum(1) if sigmoid_scores and grouped.shape[1] > 1 else grouped.max(1)
        for g in np.argsort(-two, kind="stable")[groups_used:]:
            grouped[g] = -np.inf
        best = np.argsort(-grouped.reshape(-1), kind="stable")[:used]
        w = s[best] / s[best].sum() if normalised else s[best]
        chosen.append(best)
        weights.append(w * scale)
    return np.array(chosen), np.array(weights)


@pytest.mark.parametrize("sigmoid_scores", [False, True])
@pytest.mark.parametrize("groups", [1, 4, 16])
@pytest.mark.parametrize("biased", [False, True])
def test_route(sigmoid_scores, groups, biased):
    draw = np.random.default_rng(4)
    scores = draw.standard_normal((20, 16)).astype(np.float32)
    bias = (0.3 * draw.standard_normal(16 if biased else 0)).astype(np.float32)
    groups_used, normalised, scale = -(-groups // 2), biased, 2.5 if biased else 1.0
    experts, weights = np.empty((20, 3), np.int64), np.empty((20, 3), np.float32)
    expected = route_by_hand(scores, sigmoid_scores, bias, groups, groups_used, normalised, scale, 3)
    small.route(scores, sigmoid_scores, bias, groups, groups_used, normalised, scale, experts, weights)
    assert np.array_equal(experts, expected[0])
    assert np.allclose(weights, expected[1], rtol=1e-5)


def test_of_equal_experts_the_first_are_chosen():
    scores, experts, weights = np.zeros((1, 6), np.float32), np.empty((1, 3), np.int64), np.empty((1, 3), np.float32)
    small.route(scores, False, np.zeros(0, np.float32), 1, 1, False, 1.0, experts, weights)
    assert experts.tolist() == [[0, 1, 2]]
    assert np.allclose(weights, 1 / 6)
