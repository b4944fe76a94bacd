"""Rows of tokens for each expert and back, and whole mixtures of experts made from packed weights."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufmill.formats import TYPES, SourceTensor, TensorSource
from ggufmill.quantize import decode, encode
from ggufmill.runtime.backends.cpu import moe
from ggufmill.runtime.backends.cpu.feedforward import GatedFeedForward
from ggufmill.runtime.backends.cpu.kernels.experts import arrange
from ggufmill.runtime.backends.cpu.weights import WeightStore

N_EMBD, N_FF, EXPERTS, USED, TOKENS = 64, 96, 5, 2, 60


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 40), st.integers(1, 4), st.integers(4, 9), st.sampled_from([3, 16]), st.integers(0, 6), st.integers(0, 99)
)
def test_every_choice_gets_a_row(n, used, experts, unit, few, seed):
    random = np.random.default_rng(seed)
    chosen = np.array([random.permutation(experts)[:used] for _ in range(n)])
    chosen[random.random(chosen.shape) < 0.1] = -1
    weights = random.random(chosen.shape).astype(np.float32)
    most = chosen.size + experts * unit
    starts, counts, places, matrices = (np.full(size, -7) for size in (experts, experts, most, most))
    rows, factors = np.full(chosen.shape, -7), np.full(chosen.shape, np.nan, np.float32)
    many, rest = arrange(chosen, weights, experts, unit, few, starts, counts, places, matrices, rows, factors)
    assert many % unit == 0
    assert rest == counts[counts <= few].sum()
    taken = rows[rows >= 0]
    assert len(set(taken.tolist())) == len(taken) == np.count_nonzero(chosen >= 0)
    assert set(np.flatnonzero(places[: many + rest] >= 0).tolist()) == set(taken.tolist())
    for e in range(experts):
        own = slice(starts[e], starts[e] + counts[e])
        assert places[own].tolist() == np.flatnonzero((chosen == e).any(axis=1)).tolist()  # in the order of tokens
        assert (matrices[own] == e).all()
        assert counts[e] <= few or starts[e] % unit == 0
        assert (starts[e] >= many) == (counts[e] <= few)
    for t in range(n):
        order = np.argsort(chosen[t], kind="stable")
        order = order[chosen[t][order] >= 0]
        assert matrices[rows[t, : len(order)]].tolist() == chosen[t][order].tolist()
        assert factors[t, : len(order)].tolist() == weights[t][order].tolist()
        assert (rows[t, len(order) :] == -1).all()


def mixture(threads, bias=False):
    """(a mixture of experts of q8_0 weights, those weights decoded, biases)."""
    draw, tensors, decoded = np.random.default_rng(1), {}, {}
    for part, rows, columns in (("gate", N_FF, N_EMBD), ("up", N_FF, N_EMBD), ("down", N_EMBD, N_FF)):
        w = draw.standard_normal((EXPERTS * rows, columns)).astype(np.float32) / 8
        q = encode(w, "q8_0", None)
        found = decode(q, "q8_0", columns)
        name = f"ffn_{part}_exps.weight"
        shape = (columns, rows, EXPERTS)
        read, raw = (lambda a, b, rows=rows: rows[a:b] for rows in (found, q))
        tensors[name] = SourceTensor(name, shape, "q8_0", read, raw, TYPES["q8_0"], q)
        decoded[part] = found.reshape(EXPERTS, rows, columns)
    router = draw.standard_normal((EXPERTS, N_EMBD)).astype(np.float32)
    tensors["router"] = SourceTensor("router", (N_EMBD, EXPERTS), "f32", lambda a, b: router[a:b])
    decoded["router"] = router
    store = WeightStore(TensorSource("test", {}, tensors, "test"), 1 << 20, threads)
    experts = GatedFeedForward.load(store, "", "_exps", N_EMBD, N_FF, EXPERTS)
    if bias:
        sizes = {"gate": N_FF, "up": N_FF, "down": N_EMBD}
        experts.bias = {part: draw.standard_normal((EXPERTS, size)).astype(np.float32) for part, size in sizes.items()}
    return moe.MixtureOfExperts(moe.Router(store.linear("router"), USED), experts), decoded


def by_hand(mixed, w, x):
    bias = {part: mixed.experts.bias.get(part, np.zeros((EXPERTS, 1))) for part in ("gate", "up", "down")}
    chosen, weights = mixed.router(x)
    out = np.zeros(x.shape)
    for t, row in enumerate(x.astype(np.float64)):
        for e, weight in zip(chosen[t], weights[t], strict=True):
            gate, up = (w[part][e] @ row + bias[part][e] for part in ("gate", "up"))
            out[t] += weight * (w["down"][e] @ (gate / (1 + np.exp(-gate)) * up) + bias["down"][e])
    return out


def tokens():
    x = np.random.default_rng(2).standard_normal((TOKENS, N_EMBD)).astype(np.float32)
    x[:, 0] += 1  # so that experts differ in how often they are chosen
    return x


@pytest.mark.parametrize("bias", [False, True])
def test_a_mixture_is_that_by_hand(bias):
    x, (mixed, w) = tokens(), mixture(1, bias)
    expected = by_hand(mixed, w, x)
    assert mixed.experts.many is not None
    assert np.abs(mixed(x) - expected).max() < 0.02 * np.abs(expected).max()


def test_threads_and_memory_change_nothing(monkeypatch):
    x, (alone, _), (shared, _) = tokens(), mixture(1), mixture(3)
    expected = alone(x)
    assert np.array_equal(shared(x), expected)
    monkeypatch.setattr(moe, "_TOGETHER", 1)  # an expert at a time
    assert np.array_equal(shared(x), expected)


def test_experts_of_few_tokens_among_many(monkeypatch):
    x, (mixed, w) = tokens(), mixture(2)
    monkeypatch.setattr(moe, "_FEW", TOKENS * USED // EXPERTS)
    counts = np.bincount(mixed.router(x)[0].reshape(-1), minlength=EXPERTS)
    assert min(counts) <= moe._FEW < max(counts)
    expected = by_hand(mixed, w, x)
    assert np.abs(mixed(x) - expected).max() < 0.02 * np.abs(expected).max()


def test_an_observer_sees_the_inputs_of_every_expert(monkeypatch):
    x, (mixed, w), seen = tokens(), mixture(2), {}
    monkeypatch.setattr(moe, "_FEW", 0)
    expected = mixed(x)
    mixed.experts.gate.store.observer = lambda name, matrix, rows: seen.__setitem__((name, matrix), rows.copy())
    assert np.abs(mixed(x) - expected).max() < 1e-5 * np.abs(expected).max()
    chosen, _ = mixed.router(x)
    for e in range(EXPERTS):
        mine = x[(chosen == e).any(axis=1)]
        for part in ("gate", "up"):
            assert np.array_equal(seen[f"ffn_{part}_exps.weight", e], mine)
        gate, up = (mine @ w[part][e].T for part in ("gate", "up"))
        inner = gate / (1 + np.exp(-gate)) * up
        assert np.abs(seen["ffn_down_exps.weight", e] - inner).max() < 0.02 * np.abs(inner).max()
