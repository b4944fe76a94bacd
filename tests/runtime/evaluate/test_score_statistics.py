import math

import numpy as np
import pytest

from ggufmill.runtime import load_model
from ggufmill.runtime.evaluate.divergence import ModelPredictions, Scores, score
from ggufmill.runtime.evaluate.score_statistics import Moments, ScoreStatistics, paired_ratio


@pytest.fixture(scope="module")
def sample():
    """(losses, base losses, divergences, same top) of 300 predictions, losses correlated."""
    random = np.random.default_rng(2)
    base = random.exponential(2, 300)
    return base + 0.1 * random.standard_normal(300), base, random.exponential(0.02, 300), random.random(300) < 0.9


def statistics_of(sample, stops=(300,)):
    """The statistics of the sample, added in parts that end at these positions."""
    statistics, start = ScoreStatistics(), 0
    for stop in stops:
        part = slice(start, stop)
        statistics.add(Scores(sample[0][part], 0.5, sample[1][part], sample[2][part], sample[3][part]))
        start = stop
    return statistics


def test_moments_of_batches_are_those_of_all_values():
    values = np.random.default_rng(1).standard_normal(1000) + 1e6  # sums of squares would cancel
    moments = Moments()
    for part in np.array_split(values, [1, 7, 500]):
        moments.add(part)
    assert moments.count == 1000
    assert moments.mean == pytest.approx(values.mean(), abs=1e-9)
    assert moments.error == pytest.approx(values.std() / math.sqrt(999), rel=1e-6)


def test_the_errors_are_those_of_llama_perplexity(sample):
    """Its formulas: variances of the means, covariance of the two models' losses."""
    losses, base, _, _ = sample
    n, comparison = 300, statistics_of(sample).comparison()
    value, base_value = math.exp(losses.mean()), math.exp(base.mean())
    var, base_var = losses.var() / (n - 1), base.var() / (n - 1)
    covariance = ((losses * base).mean() - losses.mean() * base.mean()) / (n - 1)
    log_error = math.sqrt(var + base_var - 2 * covariance)
    assert comparison["log_ratio"] == pytest.approx(losses.mean() - base.mean())
    assert comparison["log_ratio_error"] == pytest.approx(log_error, rel=1e-9)
    assert comparison["ratio_error"] == pytest.approx(value / base_value * log_error, rel=1e-9)
    assert comparison["ratio_error"] < 0.2 * math.sqrt(var + base_var)  # less than the error of two independent figures
    assert comparison["correlation"] == pytest.approx(covariance / math.sqrt(var * base_var), rel=1e-9)
    difference = value**2 * var + base_value**2 * base_var - 2 * value * base_value * covariance
    assert comparison["difference_error"] == pytest.approx(math.sqrt(difference), rel=1e-7)


def test_change_of_probability(sample):
    losses, base, _, same = sample
    delta = np.exp(-losses) - np.exp(-base)
    statistics = statistics_of(sample)
    comparison, distribution = statistics.comparison(), statistics.distribution()
    assert comparison["delta_p_mean"] == pytest.approx(100 * delta.mean())
    rms = math.sqrt((delta**2).mean())
    assert comparison["delta_p_rms"] == pytest.approx(100 * rms)
    assert comparison["delta_p_rms_error"] == pytest.approx(100 * 0.5 / rms * (delta**2).std() / math.sqrt(299))
    assert comparison["top1_agreement"] == pytest.approx(100 * same.mean())
    p = same.mean()
    assert comparison["top1_error"] == pytest.approx(100 * math.sqrt(p * (1 - p) / 299))
    assert distribution["delta_p_min"] == pytest.approx(100 * delta.min(), rel=1e-6)
    assert distribution["delta_p_percentiles"]["25"] == pytest.approx(100 * np.percentile(delta, 25), rel=1e-5)
    assert distribution["kld_percentiles"]["99.9"] == pytest.approx(np.percentile(sample[2], 99.9), rel=1e-6)
    assert list(distribution["kld_percentiles"]) == ["0.1", "1", "5", "10", "50", "90", "95", "99", "99.9"]


def test_statistics_do_not_depend_on_the_batches(sample):
    whole, parts = statistics_of(sample), statistics_of(sample, (10, 11, 200, 300))
    for name, value in whole.comparison().items():
        assert parts.comparison()[name] == pytest.approx(value, rel=1e-9), name
    assert parts.distribution() == whole.distribution()
    assert len(parts.window_losses) == 4


def test_comparison_of_identical_models(sample):
    losses = sample[0]
    statistics = ScoreStatistics()
    statistics.add(Scores(losses, 1.0, losses, np.zeros(300), np.ones(300, bool)))
    comparison = statistics.comparison()
    assert comparison["ratio"] == 1
    assert comparison["ratio_error"] == comparison["delta_p_rms"] == comparison["delta_p_rms_error"] == 0
    assert comparison["correlation"] == pytest.approx(1)


def test_paired_ratio():
    assert paired_ratio([1.0, 2.0], [1.0, 2.0]) == (1.0, 0.0)
    ratio, error = paired_ratio([1.1, 2.1, 3.4], [1.0, 2.0, 3.0])
    assert ratio == pytest.approx(math.exp(0.2))
    assert error == pytest.approx(ratio * np.std([0.1, 0.1, 0.4]) / math.sqrt(2))
    assert paired_ratio([1.0], [1.0]) == (1.0, None)


def test_scores_do_not_depend_on_the_block_size(tiny, tokens):
    """With a large vocabulary the logits of a window are computed a few tokens at a time."""
    model = load_model(tiny, exact=True)
    hidden = model.hidden([(model.new_cache(40), tokens[:40])])[0]
    base = hidden + np.float32(0.05)
    baseline = ModelPredictions(model, base, tokens[1:41])
    whole = score(model, hidden, tokens[1:41], baseline)
    parts = score(model, hidden, tokens[1:41], baseline, block_bytes=3 * 4 * model.n_vocab)
    for name in ("losses", "base_losses", "divergences"):
        assert np.allclose(getattr(whole, name), getattr(parts, name), atol=1e-5), name
    assert np.array_equal(whole.same_top, parts.same_top)
    assert whole.divergences.min() > 0


def test_a_tiny_divergence_is_not_lost_in_rounding():
    """Large logits, almost equal: the divergence is far smaller than the rounding error of log probabilities near -20."""
    from ggufmill.runtime.evaluate.divergence import LogitsBlock, prepare_logits

    random = np.random.default_rng(4)
    p = (30 * random.standard_normal((50, 500))).astype(np.float32)
    q = p + (1e-3 * random.standard_normal((50, 500))).astype(np.float32)

    def log_softmax(x):
        x = x.astype(np.float64)
        x = x - x.max(1, keepdims=True)
        return x - np.log(np.exp(x).sum(1, keepdims=True))

    expected = (np.exp(log_softmax(p)) * (log_softmax(p) - log_softmax(q))).sum(1)
    targets = np.zeros(50, int)
    block = LogitsBlock(p.copy(), targets)
    divergences = block.compare(slice(0, 50), prepare_logits(q.copy(), targets), targets)[1]
    assert 0 < expected.mean() < 1e-6
    assert np.abs(divergences - expected).max() < 2e-7
