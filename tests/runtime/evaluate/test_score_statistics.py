import math

import numpy as np
import pytest

from ggufmill.runtime import load_model
from ggufmill.runtime.evaluate.divergence import Scored, score
from ggufmill.runtime.evaluate.score_statistics import Moments, Tally, paired_ratio


@pytest.fixture(scope="module")
def sample():
    """(losses, base losses, divergences, same top) of 300 predictions, losses correlated."""
    random = np.random.default_rng(2)
    base = random.exponential(2, 300)
    return base + 0.1 * random.standard_normal(300), base, random.exponential(0.02, 300), random.random(300) < 0.9


def tallied(sample, cuts=(300,)):
    tally, start = Tally(), 0
    for stop in cuts:
        part = slice(start, stop)
        tally.add(Scored(sample[0][part], 0.5, sample[1][part], sample[2][part], sample[3][part]))
        start = stop
    return tally


def test_moments_in_runs_are_those_of_all():
    values = np.random.default_rng(1).standard_normal(1000) + 1e6  # squares would cancel
    moments = Moments()
    for part in np.array_split(values, [1, 7, 500]):
        moments.add(part)
    assert moments.count == 1000
    assert moments.mean == pytest.approx(values.mean(), abs=1e-9)
    assert moments.error == pytest.approx(values.std() / math.sqrt(999), rel=1e-6)


def test_the_errors_are_those_of_llama_perplexity(sample):
    """Its formulae, written down anew: variances of the means, covariance of the two models' losses."""
    losses, base, _, _ = sample
    n, found = 300, tallied(sample).comparison()
    value, base_value = math.exp(losses.mean()), math.exp(base.mean())
    var, base_var = losses.var() / (n - 1), base.var() / (n - 1)
    covariance = ((losses * base).mean() - losses.mean() * base.mean()) / (n - 1)
    log_error = math.sqrt(var + base_var - 2 * covariance)
    assert found["log_ratio"] == pytest.approx(losses.mean() - base.mean())
    assert found["log_ratio_error"] == pytest.approx(log_error, rel=1e-9)
    assert found["ratio_error"] == pytest.approx(value / base_value * log_error, rel=1e-9)
    assert found["ratio_error"] < 0.2 * math.sqrt(var + base_var)  # not that of two independent figures
    assert found["correlation"] == pytest.approx(covariance / math.sqrt(var * base_var), rel=1e-9)
    difference = value**2 * var + base_value**2 * base_var - 2 * value * base_value * covariance
    assert found["difference_error"] == pytest.approx(math.sqrt(difference), rel=1e-7)


def test_change_of_probability(sample):
    losses, base, _, same = sample
    delta = np.exp(-losses) - np.exp(-base)
    tally = tallied(sample)
    found, spread = tally.comparison(), tally.distribution()
    assert found["delta_p_mean"] == pytest.approx(100 * delta.mean())
    rms = math.sqrt((delta**2).mean())
    assert found["delta_p_rms"] == pytest.approx(100 * rms)
    assert found["delta_p_rms_error"] == pytest.approx(100 * 0.5 / rms * (delta**2).std() / math.sqrt(299))
    assert found["top1_agreement"] == pytest.approx(100 * same.mean())
    p = same.mean()
    assert found["top1_error"] == pytest.approx(100 * math.sqrt(p * (1 - p) / 299))
    assert spread["delta_p_min"] == pytest.approx(100 * delta.min(), rel=1e-6)
    assert spread["delta_p_percentiles"]["25"] == pytest.approx(100 * np.percentile(delta, 25), rel=1e-5)
    assert spread["kld_percentiles"]["99.9"] == pytest.approx(np.percentile(sample[2], 99.9), rel=1e-6)
    assert list(spread["kld_percentiles"]) == ["0.1", "1", "5", "10", "50", "90", "95", "99", "99.9"]


def test_runs_do_not_matter(sample):
    whole, parts = tallied(sample), tallied(sample, (10, 11, 200, 300))
    for name, value in whole.comparison().items():
        assert parts.comparison()[name] == pytest.approx(value, rel=1e-9), name
    assert parts.distribution() == whole.distribution()
    assert len(parts.window_losses) == 4


def test_identical_models_differ_in_nothing(sample):
    losses = sample[0]
    tally = Tally()
    tally.add(Scored(losses, 1.0, losses, np.zeros(300), np.ones(300, bool)))
    found = tally.comparison()
    assert found["ratio"] == 1
    assert found["ratio_error"] == found["delta_p_rms"] == found["delta_p_rms_error"] == 0
    assert found["correlation"] == pytest.approx(1)


def test_paired_ratio():
    assert paired_ratio([1.0, 2.0], [1.0, 2.0]) == (1.0, 0.0)
    ratio, error = paired_ratio([1.1, 2.1, 3.4], [1.0, 2.0, 3.0])
    assert ratio == pytest.approx(math.exp(0.2))
    assert error == pytest.approx(ratio * np.std([0.1, 0.1, 0.4]) / math.sqrt(2))
    assert paired_ratio([1.0], [1.0]) == (1.0, None)


def test_blocks_of_tokens_do_not_matter(tiny, tokens):
    """A vocabulary too large to hold the logits of a window: they are made for a few tokens at a time."""
    model = load_model(tiny, exact=True)
    hidden = model.hidden([(model.new_cache(40), tokens[:40])])[0]
    base = hidden + np.float32(0.05)
    whole = score(model, hidden, tokens[1:41], model, base)
    parts = score(model, hidden, tokens[1:41], model, base, block_bytes=3 * 4 * model.n_vocab)
    for name in ("losses", "base_losses", "divergences"):
        assert np.allclose(getattr(whole, name), getattr(parts, name), atol=1e-5), name
    assert np.array_equal(whole.same_top, parts.same_top)
    assert whole.divergences.min() > 0


def test_a_tiny_divergence_is_not_lost_in_rounding():
    """Large logits, almost equal: the divergence is far below what rounding does to log probabilities near -20."""
    from ggufmill.runtime.evaluate.divergence import _compared

    random = np.random.default_rng(4)
    p = (30 * random.standard_normal((50, 500))).astype(np.float32)
    q = p + (1e-3 * random.standard_normal((50, 500))).astype(np.float32)

    def log_softmax(x):
        x = x.astype(np.float64)
        x = x - x.max(1, keepdims=True)
        return x - np.log(np.exp(x).sum(1, keepdims=True))

    expected = (np.exp(log_softmax(p)) * (log_softmax(p) - log_softmax(q))).sum(1)
    found = _compared(q.copy(), p.copy(), np.zeros(50, int))[2]
    assert 0 < expected.mean() < 1e-6
    assert np.abs(found - expected).max() < 2e-7
