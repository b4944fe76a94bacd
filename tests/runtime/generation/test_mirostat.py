"""Mirostat against arXiv:2007.14966."""

import math

import numpy as np
import pytest

from ggufmill.formats import PlanError
from ggufmill.runtime import Sampler, Sampling
from ggufmill.runtime.generation.sampling import ZIPF_TOKENS, Mirostat

N = 5000


def zipf(exponent):
    p = np.arange(1, N + 1) ** -float(exponent)
    return p / p.sum()


def surprises(p, n=1500, **settings):
    """Bits of surprise of the tokens that are sampled, by their probabilities among those that were kept."""
    sampler, result = Sampler(Sampling(seed=3, temp=1.0, **settings)), []
    learn = sampler._mirostat.learn
    sampler._mirostat.learn = lambda probability: (result.append(-math.log2(probability)), learn(probability))
    logits = np.log(p).astype(np.float32)
    tokens = [sampler.sample(logits, []) for _ in range(n)]
    return np.array(result), np.array(tokens)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("target", [2.0, 4.0, 6.0])
@pytest.mark.parametrize("exponent", [0.9, 1.3])
def test_the_surprise_is_near_the_target(version, target, exponent):
    """The claim of the paper: whatever the distribution is, unless its entropy is below the target."""
    result, _ = surprises(zipf(exponent), mirostat=version, mirostat_tau=target, mirostat_eta=0.1)
    assert result[300:].mean() == pytest.approx(target, abs=0.15)


def test_the_number_of_tokens_by_zipf_s_law():
    """Algorithm 1: the exponent is estimated from the largest probabilities, k = (e 2^mu / (1 - N^-e))^(1/s) with e = s - 1."""
    for exponent in (0.8, 1.2, 2.0):
        mirostat, p = Mirostat(3.0, 0.1), zipf(exponent)
        excess = exponent - 1
        expected = (excess * 2**6 / (1 - N**-excess)) ** (1 / exponent)
        assert mirostat.limit == 6
        assert mirostat.count(p[:ZIPF_TOKENS], N) == int(expected)
    near_one = Mirostat(3.0, 0.1).count(zipf(1 + 1e-12)[:ZIPF_TOKENS], N)
    assert near_one == pytest.approx(2**6 / math.log(N), abs=1)


def test_the_limit_of_version_2():
    """Only tokens whose surprise is not above the limit, at first twice the target; it moves by rate times the error."""
    p = np.array([0.5, 0.25, 0.125, 0.0625, 0.0625])
    tokens = {Sampler(Sampling(seed=i, temp=1.0, mirostat=2, mirostat_tau=1.25)).sample(np.log(p), []) for i in range(300)}
    assert tokens == {0, 1}  # 1 and 2 bits; the next one has 3
    mirostat = Mirostat(2.0, 0.5)
    mirostat.learn(2**-3)
    assert mirostat.limit == 4 - 0.5 * (3 - 2)


@pytest.mark.parametrize("version", [1, 2])
def test_extreme_distributions(version):
    """One token, equal ones, excluded ones, targets out of reach: a token that is not excluded comes out."""
    flat, single, holes = np.zeros(50), np.full(50, -np.inf), np.zeros(50)
    single[7], holes[10:] = 0.0, -np.inf
    for target in (0.0, 3.0, 1e9):
        for logits, allowed in ((flat, range(50)), (single, [7]), (holes, range(10))):
            sampler = Sampler(Sampling(seed=1, temp=1.0, mirostat=version, mirostat_tau=target, mirostat_eta=1.0))
            assert {sampler.sample(logits.astype(np.float32), []) for _ in range(50)} <= set(allowed)


def test_filters_and_penalties_have_no_effect():
    """As in llama.cpp; biases and the temperature have one."""
    p, settings = zipf(1.1), {"mirostat": 2, "mirostat_tau": 5.0, "n": 200}
    _, tokens = surprises(p, **settings)
    _, others = surprises(p, top_k=1, top_p=0.1, repeat_penalty=2.0, **settings)
    assert (tokens == others).all()
    _, biased = surprises(p, logit_bias={0: -np.inf}, **settings)
    assert 0 in tokens
    assert 0 not in biased
    greedy = Sampler(Sampling(temp=0, mirostat=2))
    assert greedy.sample(np.log(p), []) == 0


def test_there_are_two_versions():
    for version in (3, 1.5, -1):
        with pytest.raises(PlanError, match="mirostat"):
            Sampling(mirostat=version)
