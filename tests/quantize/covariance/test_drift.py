"""Targets for drifting inputs: they make up for what can be made up for, and do nothing where the drift is noise."""

import numpy as np
import pytest

from ggufmill.quantize.covariance.drift import Drift, DriftSums, Following, drift_of, steps_of
from ggufmill.quantize.covariance.matrix.covariance_matrix import Covariance

N, TOKENS = 100, 12500


def copied_of(halves):
    return tuple(
        DriftSums(half.squares.copy(), half.drifts.copy(), half.tokens, {k: x.copy() for k, x in half.misses.items()})
        for half in halves
    )


def step_of(halves, w):
    first, second = ([w @ half.drifts] for half in halves)
    return steps_of(halves, first, second)[0]


def correction_of(halves, w):
    """(the step, None: there is none; the function that changes weights)."""
    copied = copied_of(halves)
    drift = drift_of(copied, {"w": w})
    following = Following(drift)
    return drift.steps.get("w"), lambda x: following.target("w", x)


def halves_of(x, z, **misses):
    """The sums of two halves of the rows of x and z; misses: of tensors, [tokens, rows]."""

    def sums(part):
        missed = {name: m[part].T @ z[part] for name, m in misses.items()}
        return DriftSums(z[part].T @ z[part], (x[part] - z[part]).T @ z[part], len(z[part]), missed)

    return sums(slice(0, None, 2)), sums(slice(1, None, 2))


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


def test_what_results_are_added_to_is_made_up_for(drawn):
    """As far as the inputs tell it, and beside the drift; rows get what theirs misses, wherever a part of them begins."""
    z, told, noise, w = drawn
    rng = np.random.default_rng(1)
    missed = (z @ (0.1 * rng.standard_normal((N, len(w)))) + noise[:, : len(w)]).astype(np.float32)
    for x, share in ((z, 0.011), (z + told, 0.002)):
        drift = drift_of(copied_of(halves_of(x, z, w=missed, other=missed)), {"w": w})
        assert drift.steps["w"] > 0.95
        following = Following(drift)
        target, expected = following.target("w", w), x @ w.T + missed
        assert np.square(expected - z @ target.T).mean() < share * np.square(expected - z @ w.T).mean()
        assert np.array_equal(following.target("w", w[4:7], 4), target[4:7])
    damaged = w.copy()
    damaged[3, 5] = np.nan
    np.testing.assert_array_equal(following.target("w", damaged)[3], damaged[3])


def test_noise_in_what_results_are_added_to_changes_little(drawn):
    z, _, noise, w = drawn
    few = slice(0, 333)
    step, _ = correction_of(halves_of(z[few], z[few], w=noise[few, : len(w)]), w)
    assert step is None or step < 0.25


def test_a_drift_outlives_a_file(drawn, tmp_path):
    z, told, noise, w = drawn
    for few in (None, N - 4):
        drift = drift_of(halves_of((z + told + noise)[:few], z[:few], **{"a.weight": told[:few, : len(w)]}), {"a.weight": w})
        drift.save(tmp_path / "0.npz")
        loaded = Drift.load(tmp_path / "0.npz")
        assert (loaded.sums.tokens, loaded.steps, loaded.is_enough) == (drift.sums.tokens, drift.steps, few is None)
        assert np.array_equal(Following(loaded).target("a.weight", w), Following(drift).target("a.weight", w))


def test_noise_changes_nothing(drawn):
    z, _, noise, w = drawn
    few = slice(0, 333)  # of which a regression would find much
    halves = halves_of((z + 3 * noise)[few], z[few])
    assert step_of(halves, w) < 0.25
    target = correction_of(halves, w)[1](w)
    assert loss((z + 3 * noise)[1000:], z[1000:], w, target) < 1.02 * loss((z + 3 * noise)[1000:], z[1000:], w, w)


def test_the_step_is_that_of_least_error_on_the_other_half(drawn):
    z, told, noise, w = drawn
    x, few = z + told + 16 * noise, slice(0, 625)
    halves = halves_of(x[few], z[few])
    step = step_of(halves, w)
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
