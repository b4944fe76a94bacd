"""The multiple-choice knapsack: against all combinations on small cases, against the Lagrangian bound on large ones."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufmill.formats import PlanError
from ggufmill.quantize.search.allocate import TypeOption, allocate, minimise_bytes, total

UNITS = st.lists(
    st.lists(st.builds(TypeOption, st.integers(1, 40), st.floats(0, 10)), min_size=1, max_size=4), min_size=1, max_size=5
)


@settings(max_examples=60, deadline=None)
@given(UNITS, st.floats(0, 1))
def test_optimal_on_small_cases(units, share):
    least = sum(min(o.nbytes for o in options) for options in units)
    most = sum(max(o.nbytes for o in options) for options in units)
    budget = int(least + share * (most - least))
    result = total(units, allocate(units, budget))
    choices = [total(units, chosen) for chosen in product(*(range(len(options)) for options in units))]
    best = min(choice.loss for choice in choices if choice.nbytes <= budget)
    assert result.nbytes <= budget
    assert result.loss <= best + 1e-9


def random_units(n, seed):
    """Units of unequal sizes whose loss falls to about a quarter with each bit, as quantisation errors do."""
    rng = np.random.default_rng(seed)
    units = []
    for _ in range(n):
        weights, sensitivity = int(rng.integers(1, 400)) * 4096, rng.lognormal(0, 2)
        bits = (2.06, 2.375, 2.69, 3.44, 4.25, 4.5, 5.5, 6.6, 8.5)
        units.append([TypeOption(int(weights * b / 8), float(sensitivity * 4.0**-b * rng.uniform(0.8, 1.2))) for b in bits])
    return units


@pytest.mark.parametrize("share", [0.05, 0.4, 0.9])
def test_large_cases_use_the_budget_and_come_close_to_the_lagrangian_bound(share):
    units = random_units(800, 5)
    low, high = (sum(f(o.nbytes for o in options) for options in units) for f in (min, max))
    budget = int(low + share * (high - low))
    chosen = allocate(units, budget)
    result = total(units, chosen)
    assert 0.995 * budget <= result.nbytes <= budget
    # No choice can beat the Lagrangian bound: at any price per byte, sum of min(loss + price * bytes) - price * budget.
    prices = np.geomspace(1e-16, 1, 2000)
    nbytes, loss = (np.array([[getattr(o, k) for o in options] for options in units]) for k in ("nbytes", "loss"))
    bound = max((loss + p * nbytes).min(axis=1).sum() - p * budget for p in prices)
    assert result.loss <= 1.002 * bound
    assert chosen == allocate(units, budget)


def test_error_if_the_smallest_options_exceed_the_budget():
    with pytest.raises(PlanError, match="more than the 9"):
        allocate([[TypeOption(10, 1.0)]], 9)


def test_minimise_bytes_below_a_loss():
    units = random_units(60, 1)
    max_loss = total(units, allocate(units, sum(o[4].nbytes for o in units))).loss
    result = total(units, minimise_bytes(units, max_loss))
    assert result.loss <= max_loss
    assert result.nbytes <= 1.001 * sum(o[4].nbytes for o in units)
    with pytest.raises(PlanError, match="allow larger"):
        minimise_bytes(units, 0.0)
