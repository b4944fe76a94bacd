"""Targets for drifting inputs: they make up for what can be made up for, and do nothing where the drift is noise."""

import numpy as np
import pytest

from ggufmill.quantize.covariance.drift import Drift, DriftSums, Following, drift_of, steps_of
from ggufmill.quantize.covariance.matrix.covariance_matrix import Covariance

N, TOKENS = 100, 12500


def correction_of(halves, w):
    """(the step, None: there is none; the function that changes weights)."""
    copied = tuple(DriftSums(half.squares.copy(), half.drifts.copy(), half.tokens) for half in halves)
    drift = drift_of(copied, {"w": w})
    following = Following(drift)
    return drift.steps.get("w"), lambda x: following.target("w", x)


def halves_of(x, z):
    """The sums of two halves of the rows of x and z."""

    def sums(x, z):
        return DriftSums(z.T @ z, (x - z).T @ z, len(z))

    return sums(x[::2], z[::2]), sums(x[1::2], z[1::2])


@pytest.fixture
def drawn():
    """(inputs, drift that the inputs tell, noise, weights)."""
    rng = np.random.default_rng(0)
    z = (rng.standard_normal((TOKENS, N)) @ rng.standard_normal((N, N))).astype(np.float32)
    told = (z @ (0.1 * rng.standard_normal((N, N)))).astype(np.float32)
    noise = rng.standard_normal((TOKENS, N)).astype(np.float32)
    return z, told, noise, rng.standard_normal((20, N)).astype(np.float32)


def loss(x, z, w, target):
    return float(np.square(x @ w.T - z @ target.T).mean())


def test_a_drift_that_the_inputs_tell_is_undone(drawn):
    z, told, noise, w = drawn
    x = z + told + noise
    step, target = correction_of(halves_of(x, z), w)
    assert step > 0.95
    assert loss(x, z, w, target(w)) < 1.1 * loss(z + told + noise, z + told, w, w)
    assert loss(x, z, w, w) > 5 * loss(x, z, w, target(w))


def test_targets_are_the_regression(drawn):
    """As solved in float64; tensors of one input have steps of their own, whichever others there are."""
    z, told, noise, w = drawn
    halves = halves_of(z + told + noise, z)
    damped = Covariance((halves[0].squares + halves[1].squares) / np.float32(TOKENS), TOKENS).damped()
    drifts = (halves[0].drifts + halves[1].drifts).astype(np.float64) / TOKENS
    change = np.linalg.solve(damped.astype(np.float64), (w @ drifts).T).T
    drift = drift_of(halves, {"w": w, "other": -3 * w[::-1], "damaged": np.full_like(w, np.nan)})
    assert set(drift.steps) == {"w", "other"}
    found = Following(drift).target("w", w)
    np.testing.assert_allclose(found, w + drift.steps["w"] * change, atol=1e-4 * np.abs(w).max())
    assert drift.steps["w"] == correction_of(halves_of(z + told + noise, z), w)[0]


def test_a_drift_outlives_a_file(drawn, tmp_path):
    z, told, noise, w = drawn
    for few in (None, N - 4):
        drift = drift_of(halves_of((z + told + noise)[:few], z[:few]), {"a.weight": w})
        drift.save(tmp_path / "0.npz")
        loaded = Drift.load(tmp_path / "0.npz")
        assert (loaded.sums.tokens, loaded.steps, loaded.is_enough) == (drift.sums.tokens, drift.steps, few is None)
        assert np.array_equal(Following(loaded).target("a.weight", w), Following(drift).target("a.weight", w))


def test_noise_changes_nothing(drawn):
    z, _, noise, w = drawn
    few = slice(0, 333)  # of which a regression would find much
    halves = halves_of((z + 3 * noise)[few], z[few])
    assert steps_of(halves, [w])[0] < 0.25
    target = correction_of(halves, w)[1](w)
    assert loss((z + 3 * noise)[1000:], z[1000:], w, target) < 1.02 * loss((z + 3 * noise)[1000:], z[1000:], w, w)


def test_the_step_is_that_of_least_error_on_the_other_half(drawn):
    z, told, noise, w = drawn
    x, few = z + told + 16 * noise, slice(0, 625)
    halves = halves_of(x[few], z[few])
    step = steps_of(halves, [w])[0]
    assert 0 < step < 1

    def crossed(step):
        total = 0.0
        for fitted, other in (halves, halves[::-1]):
            damped = fitted.squares / fitted.tokens
            mean, shrinkage = np.diagonal(damped).mean(), 0.6 * N / fitted.tokens
            ridge = max(0.01, 0.2 * N / fitted.tokens) * mean + shrinkage * np.diagonal(damped)
            change = step * w @ fitted.drifts / fitted.tokens @ np.linalg.inv(damped + np.diag(ridge))
            total += (change * (change @ other.squares - 2 * w @ other.drifts)).sum()
        return total

    assert crossed(step) < min(crossed(step - 0.02), crossed(step + 0.02))


def test_too_few_tokens_and_weights_that_are_not_finite(drawn):
    z, told, _, w = drawn
    for count in (N - 4, 1):
        step, target = correction_of(halves_of((z + told)[:count], z[:count]), w)
        assert step is None
        assert target(w) is w
    (_, target), damaged = correction_of(halves_of(z + told, z), w), w.copy()
    damaged[3, 5] = np.nan
    np.testing.assert_array_equal(target(damaged)[3], damaged[3])
    rest = np.arange(len(w)) != 3
    np.testing.assert_array_equal(target(damaged)[rest], target(w)[rest])
    assert correction_of(halves_of(z + told, z), np.full_like(w, np.nan))[0] is None
    assert np.array_equal(target(w[4:7]), target(w)[4:7])
