"""Samplers in an order of the user's."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufmill.errors import PlanError
from ggufmill.runtime import Sampler, Sampling
from ggufmill.runtime.generation.sampler_order import apply_in_order
from ggufmill.runtime.generation.sampling_options import DEFAULT_ORDER, parse_samplers


def shares(weights):
    return weights / weights.sum()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    top_k=st.sampled_from([0, 3, 20]),
    top_p=st.sampled_from([0.4, 0.9, 1.0]),
    min_p=st.sampled_from([0, 0.1, 0.3]),
    typical_p=st.sampled_from([0.5, 1.0]),
    top_n_sigma=st.sampled_from([-1, 1.5]),
    repeat_penalty=st.sampled_from([1.0, 1.5]),
    temp=st.sampled_from([0.5, 1.7]),
    dynatemp_range=st.sampled_from([0, 0.3]),
)
def test_the_default_order_gives_what_the_faster_way_gives(seed, temp, **chosen):
    """min_p and top_p both: the faster way leaves out of top_p's sum what min_p drops, which is the same prefix."""
    logits = np.random.default_rng(seed).normal(0, 3, 60).astype(np.float32)
    sampler, past = Sampler(Sampling(temp=temp, seed=1, **chosen)), [3, 5, 5, 7]
    sampler.sample(logits, past)
    ids, weights = sampler.candidates
    ids_in_order, weights_in_order = apply_in_order(Sampler(Sampling(temp=temp, seed=1, **chosen)), logits.astype(float), past)
    by_id, by_id_in_order = np.argsort(ids), np.argsort(ids_in_order)
    assert ids[by_id].tolist() == ids_in_order[by_id_in_order].tolist()
    np.testing.assert_allclose(shares(weights)[by_id], shares(weights_in_order)[by_id_in_order], rtol=1e-9)


def test_an_order_changes_what_is_kept():
    p = np.array([0.5, 0.3, 0.15, 0.05])
    logits = np.log(p)

    def kept(samplers, **chosen):
        sampler = Sampler(Sampling(samplers=samplers, **{"top_k": 0, "top_p": 1, "min_p": 0, "seed": 1} | chosen))
        return apply_in_order(sampler, logits.copy(), [])

    # min_p of the model's probabilities, or of those at a high temperature
    assert kept("min_p;temperature", min_p=0.4, temp=4)[0].tolist() == [0, 1]
    assert kept("temperature;min_p", min_p=0.4, temp=4)[0].tolist() == [0, 1, 2, 3]
    ids, weights = kept("top_p;top_k", top_p=0.75, top_k=1)
    assert (ids.tolist(), weights.tolist()) == ([0], [1.0])
    assert kept("top_k", top_k=2, temp=0.1)[1] == pytest.approx([1, 0.6])  # no temperature among them
    assert kept("", top_k=1)[0].tolist() == [0, 1, 2, 3]
    assert kept("kt", top_k=3, temp=0)[0].tolist() == [0]
    assert Sampler(Sampling(samplers=["temperature"], temp=0)).sample(logits.astype(np.float32), []) == 0


def test_excluded_tokens_stay_excluded():
    logits = np.array([0.0, -math.inf, 1.0], np.float32)
    for order in ("temperature;top_k", "top_p", "s"):
        sampler = Sampler(Sampling(samplers=order, top_n_sigma=3, seed=1))
        assert {sampler.sample(logits, []) for _ in range(50)} == {0, 2}


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("kpt", ("top_k", "top_p", "temperature")),
        ("edskypmxt", DEFAULT_ORDER),
        ("temp", ("temperature",)),
        ("dry", ("dry",)),
        ("top-k; typical;temperature", ("top_k", "typ_p", "temperature")),
        (["min_p", "xtc"], ("min_p", "xtc")),
        ("", ()),
    ],
)
def test_names_and_letters(given, names):
    assert parse_samplers(given) == names


def test_names_that_are_not_known():
    for names in ("top_z", "kz", ["adaptive_p"]):
        with pytest.raises(PlanError, match="is not a sampler; there are penalties, dry"):
            Sampling(samplers=names)
