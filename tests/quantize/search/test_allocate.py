"""The knapsack of types: against all combinations on small cases, and within bounds on large ones."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufmill.formats import PlanError
from ggufmill.quantize.search.allocate import Option, allocate, smallest, total

UNITS = st.lists(
    st.lists(st.builds(Option, st.integers(1, 40), st.floats(0, 10)), min_size=1, max_size=4), min_size=1, max_size=5
)


@settings(max_examples=60, deadline=None)
@given(UNITS, st.floats(0, 1))
def test_as_good_as_the_best_of_all_combinations(units, share):
    least = sum(min(o.nbytes for o in options) for options in units)
    most = sum(max(o.nbytes for o in options) for options in units)
    budget = int(least + share * (most - least))
    found = total(units, allocate(units, budget))
    choices = [total(units, chosen) for chosen in product(*(range(len(options)) for options in units))]
    best = min(choice.damage for choice in choices if choice.nbytes <= budget)
    assert found.nbytes <= budget
    assert found.damage <= best + 1e-9


def ladder(n, seed):
    """Units of unequal sizes whose damage falls to about a quarter with each bit, as that of types does."""
    draw = np.random.default_rng(seed)
    units = []
    for _ in range(n):
        weights, sensitivity = int(draw.integers(1, 400)) * 4096, draw.lognormal(0, 2)
        bits = (2.06, 2.375, 2.69, 3.44, 4.25, 4.5, 5.5, 6.6, 8.5)
        units.append([Option(int(weights * b / 8), float(sensitivity * 4.0**-b * draw.uniform(0.8, 1.2))) for b in bits])
    return units


@pytest.mark.parametrize("share", [0.05, 0.4, 0.9])
def test_large_cases_fill_the_budget_and_reach_the_bound(share):
    units = ladder(800, 5)
    low, high = (sum(f(o.nbytes for o in options) for options in units) for f in (min, max))
    budget = int(low + share * (high - low))
    chosen = allocate(units, budget)
    found = total(units, chosen)
    assert 0.995 * budget <= found.nbytes <= budget
    # No choice can beat the Lagrangian bound: at any price per byte, sum of min(damage + price * bytes) - price * budget.
    prices = np.geomspace(1e-16, 1, 2000)
    bytes_, damage = (np.array([[getattr(o, k) for o in options] for options in units]) for k in ("nbytes", "damage"))
    bound = max((damage + p * bytes_).min(axis=1).sum() - p * budget for p in prices)
    assert found.damage <= 1.002 * bound
    assert chosen == allocate(units, budget)


def test_smallest_types_over_the_budget_are_refused():
    with pytest.raises(PlanError, match="more than the 9"):
        allocate([[Option(10, 1.0)]], 9)


def test_fewest_bytes_below_a_damage():
    units = ladder(60, 1)
    wanted = total(units, allocate(units, sum(o[4].nbytes for o in units))).damage
    found = total(units, smallest(units, wanted))
    assert found.damage <= wanted
    assert found.nbytes <= 1.001 * sum(o[4].nbytes for o in units)
    with pytest.raises(PlanError, match="allow larger"):
        smallest(units, 0.0)
