import numpy as np
import pytest

from ggufmill.runtime.backends.cpu.kernels import elementwise as small
from ggufmill.simd.compile import kernel
from ggufmill.simd.exponential import exp, exp_lanes


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


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gated(kind, gate, up):
    limit = np.float32(7 if kind == small.CLAMPED_SWISH else 0)
    gate, up = np.ascontiguousarray(gate), np.ascontiguousarray(up)
    out = np.empty_like(gate)
    small.gate_run(kind, gate.reshape(-1), up.reshape(-1), out.reshape(-1), limit, 0, 0)
    return out


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
    out = gated(kind, gate, up)
    assert np.allclose(out, expected, rtol=2e-6, atol=1e-6)
    each = [gated(kind, gate[:, i : i + 1], up[:, i : i + 1]) for i in range(min(shape[1], 40))]
    assert np.array_equal(np.concatenate(each, axis=1), out[:, :40])  # an element depends on its own inputs alone


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_gates_that_are_no_numbers_stay_so(kind):
    gate, up = np.array([[np.nan, 1, np.inf]], np.float32), np.array([[1, np.nan, 1]], np.float32)
    out = gated(kind, gate, up)
    assert np.isnan(out[0, :2]).all()
    assert out[0, 2] == (pytest.approx(14, rel=1e-4) if kind == small.CLAMPED_SWISH else np.inf)


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
