"""Rows of tokens for each expert."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufmill.runtime.backends.cpu.kernels.experts import arrange


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 4), st.integers(4, 9), st.sampled_from([1, 3, 16]), st.integers(0, 99))
def test_every_choice_gets_a_row(n, used, experts, unit, seed):
    random = np.random.default_rng(seed)
    chosen = np.array([random.permutation(experts)[:used] for _ in range(n)])
    chosen[random.random(chosen.shape) < 0.1] = -1
    weights = random.random(chosen.shape).astype(np.float32)
    most = chosen.size + experts * unit
    starts, counts, places, matrices = (np.full(size, -7) for size in (experts, experts, most, most))
    rows, factors = np.full(chosen.shape, -7), np.full(chosen.shape, np.nan, np.float32)
    total = arrange(chosen, weights, experts, unit, starts, counts, places, matrices, rows, factors)
    assert total == (-(-counts // unit) * unit).sum()
    taken = rows[rows >= 0]
    assert len(set(taken.tolist())) == len(taken) == np.count_nonzero(chosen >= 0)
    assert set(np.flatnonzero(places[:total] >= 0).tolist()) == set(taken.tolist())
    for e in range(experts):
        own = slice(starts[e], starts[e] + counts[e])
        assert places[own].tolist() == np.flatnonzero((chosen == e).any(axis=1)).tolist()  # in the order of tokens
        assert (matrices[own] == e).all()
        assert starts[e] % unit == 0
    for t in range(n):
        order = np.argsort(chosen[t], kind="stable")
        order = order[chosen[t][order] >= 0]
        assert matrices[rows[t, : len(order)]].tolist() == chosen[t][order].tolist()
        assert factors[t, : len(order)].tolist() == weights[t][order].tolist()
        assert (rows[t, len(order) :] == -1).all()
