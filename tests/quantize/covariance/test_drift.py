"""Targets for drifting inputs: they make up for what can be made up for, and do nothing where the drift is noise."""

import numpy as np
import pytest

from ggufmill.quantize.covariance.drift import DriftSums, correction_of, step_of

N, TOKENS = 48, 6000


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
    correction = correction_of(halves_of(x, z), w)
    assert correction.step > 0.95
    assert loss(x, z, w, correction.target(w)) < 1.05 * loss(z + told + noise, z + told, w, w)
    assert loss(x, z, w, w) > 5 * loss(x, z, w, correction.target(w))


def test_noise_changes_nothing(drawn):
    z, _, noise, w = drawn
    few = slice(0, 160)  # of which a regression would find much
    halves = halves_of((z + 3 * noise)[few], z[few])
    assert step_of(halves, w.astype(np.float64)) < 0.25
    correction = correction_of(halves, w)
    target = w if correction is None else correction.target(w)
    assert loss((z + 3 * noise)[1000:], z[1000:], w, target) < 1.02 * loss((z + 3 * noise)[1000:], z[1000:], w, w)


def test_the_step_is_that_of_least_error_on_the_other_half(drawn):
    z, told, noise, w = drawn
    x, few = z + told + 16 * noise, slice(0, 300)
    halves = halves_of(x[few], z[few])
    step = step_of(halves, w.astype(np.float64))
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
    assert correction_of(halves_of((z + told)[: N - 4], z[: N - 4]), w) is None
    assert correction_of(halves_of((z + told)[:1], z[:1]), w) is None
    correction, damaged = correction_of(halves_of(z + told, z), w), w.copy()
    damaged[3, 5] = np.nan
    np.testing.assert_array_equal(correction.target(damaged)[3], damaged[3])
    rest = np.arange(len(w)) != 3
    np.testing.assert_array_equal(correction.target(damaged)[rest], correction.target(w)[rest])
    assert correction_of(halves_of(z + told, z), np.full_like(w, np.nan)) is None
    assert np.array_equal(correction.target(w[4:7]), correction.target(w)[4:7])
