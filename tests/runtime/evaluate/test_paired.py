"""Paired tests, against sums over all signs and an integral."""

import itertools
import math

import numpy as np
import pytest

from ggufmill.runtime.evaluate.paired import paired, student_p, wilcoxon_p


@pytest.mark.parametrize(("t", "degrees"), [(0.0, 5), (0.3, 1), (2.0, 10), (5.5, 31), (12.0, 3), (1.96, 4000)])
def test_students_tail_is_the_integral_of_its_density(t, degrees):
    log_norm = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - math.log(degrees * math.pi) / 2
    x = np.linspace(0, t, 200_001)
    density = np.exp(log_norm - (degrees + 1) / 2 * np.log1p(x * x / degrees))
    assert student_p(t, degrees) == pytest.approx(1 - 2 * np.trapezoid(density, x), abs=1e-9)


def test_signed_ranks_of_few_are_counted():
    values = np.random.default_rng(1).standard_normal(9) + 0.4
    ranks = np.argsort(np.argsort(np.abs(values))) + 1
    sums = np.array(
        [sum(r for r, sign in zip(ranks, signs, strict=True) if sign) for signs in itertools.product((0, 1), repeat=9)]
    )
    own, middle = ranks[values > 0].sum(), 45 / 2
    assert wilcoxon_p(values) == pytest.approx((np.abs(sums - middle) >= abs(own - middle)).mean())


def test_signed_ranks_of_many_are_nearly_those_that_are_drawn():
    draw = np.random.default_rng(2)
    values = draw.integers(-20, 26, 60).astype(float)
    signs = draw.integers(0, 2, (20_000, 60)) * 2 - 1
    kept = values[values != 0]
    _, places, counts = np.unique(np.abs(kept), return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    drawn = np.abs((signs[:, : len(kept)] * ranks).sum(axis=1))
    assert wilcoxon_p(values) == pytest.approx((drawn >= abs((np.sign(kept) * ranks).sum())).mean(), abs=0.01)


def test_a_difference_of_pairs_is_found_where_the_figures_themselves_vary_much():
    draw = np.random.default_rng(3)
    base = draw.exponential(1, 40)
    a, b = base + 0.02 + 0.02 * draw.standard_normal(40), base
    found = paired(a, b)
    assert found.difference == pytest.approx((a - b).mean())
    assert found.p < 1e-4
    assert found.p_wilcoxon < 1e-4
    assert paired(a, a).p == 1
    assert paired(a[:1], b[:1]) is None
