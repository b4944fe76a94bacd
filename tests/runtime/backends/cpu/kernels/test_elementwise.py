import math

import numpy as np
import pytest

from ggufmill.runtime.backends.cpu.kernels import elementwise as small
from ggufmill.simd.compile import kernel
from ggufmill.simd.exponential import exp, exp_lanes, one_plus_exp_lanes


@kernel
def each(x, out):
    for i in range(x.size):
        out[i] = exp(x[i])


@kernel
def sixteen(x, out, one_more):
    for i in range(0, x.size, small.LANES):
        small.store(out, i, exp_lanes(small.load(x, i)))
        small.store(one_more, i, one_plus_exp_lanes(small.load(x, i)))


def test_exponential():
    x = np.concatenate([np.linspace(-87.2, 88.6, 16 * 4001), [-88, 89, np.nan, np.inf, -np.inf, 0, -0.0, 1e-40] * 2])
    x = x.astype(np.float32)
    out, lanes, one_more = np.empty((3, x.size), np.float32)
    each(x, out)
    sixteen(x, lanes, one_more)
    assert np.array_equal(out.view(np.int32)[x == x], lanes.view(np.int32)[x == x])
    exact = np.exp(x[:-16].astype(np.float64))
    assert np.abs(out[:-16] / exact - 1).max() < 1e-7
    for found in (out, lanes):
        assert np.array_equal(found[-8:], [0, np.inf, np.nan, np.inf, 0, 1, 1, 1], equal_nan=True)
    sums = np.where(x == x, lanes + np.float32(1), np.float32(1))
    assert np.array_equal(one_more.view(np.int32), sums.view(np.int32))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def below(x):
    return np.minimum(x, 7)


def within(x):
    return np.clip(x, -7, 7)


def gated(kind, gate, up):
    function, limit = kind
    gate, up = np.ascontiguousarray(gate), np.ascontiguousarray(up)
    out = np.empty_like(gate)
    small.gate_run(function, gate.reshape(-1), up.reshape(-1), out.reshape(-1), np.float32(limit), 0, 0)
    return out


ACTIVATIONS = {  # function and limit
    (small.SILU, 0): lambda g, u: silu(g) * u,
    (small.SILU, 7): lambda g, u: silu(below(g)) * within(u),
    (small.GELU, 0): lambda g, u: 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))) * u,
    (small.GELU_ERF, 0): lambda g, u: 0.5 * g * (1 + np.vectorize(math.erf)(g / np.sqrt(2))) * u,
    (small.SIGMOID, 0): lambda g, u: sigmoid(g) * u,
    (small.CLAMPED_SWISH, 7): lambda g, u: below(g) * sigmoid(1.702 * below(g)) * (within(u) + 1),
    (small.CLAMPED_SILU, 7): lambda g, u: below(silu(g)) * within(u),
}


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(1, 3), (2, 37), (5, 4096)])
def test_gated(kind, shape):
    draw = np.random.default_rng(2)
    gate, up = (6 * draw.standard_normal((2, *shape))).astype(np.float32)
    gate[0, :2] = -1e4, 1e25
    with np.errstate(over="ignore"):
        expected = ACTIVATIONS[kind](gate.astype(np.float64), up.astype(np.float64))
    out = gated(kind, gate, up)
    assert np.all(np.abs(out - expected) <= 2e-6 * np.abs(expected) + 1e-6 * np.maximum(1, np.abs(up)))
    each = [gated(kind, gate[:, i : i + 1], up[:, i : i + 1]) for i in range(min(shape[1], 40))]
    assert np.array_equal(np.concatenate(each, axis=1), out[:, :40])  # an element depends on its own inputs alone


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_gates_that_are_no_numbers_stay_so(kind):
    """In whole vectors, whose loop is another one for SILU, as in the rest of a row."""
    pairs = [(np.nan, 1), (1, np.nan), (np.inf, 1), (-np.inf, 1), (-0.0, 1), (0, -0.0), (-0.0, -0.0), (-100, 3), (1, np.inf)]
    gate, up = np.resize(np.array(pairs, np.float32), (3 * small.LANES + 5, 2)).T
    out = gated(kind, gate, up)
    assert np.isnan(out[:2]).all()
    with np.errstate(invalid="ignore"):
        assert out[2] == pytest.approx(ACTIVATIONS[kind](gate[2:3].astype(np.float64), up[2:3])[0], rel=1e-6)
    each = [gated(kind, gate[i : i + 1], up[i : i + 1])[0] for i in range(out.size)]
    assert np.array_equal(np.array(each).view(np.int32), out.view(np.int32))


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
