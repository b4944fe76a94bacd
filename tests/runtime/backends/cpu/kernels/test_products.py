"""Products of a few tokens, straight from the packed rows: the same numbers however they are put together."""

import dataclasses

import numpy as np
import pytest

from ggufmill.formats import TYPES, SourceTensor, TensorSource
from ggufmill.quantize import decode, encode
from ggufmill.runtime.backends.cpu.feedforward import GatedFeedForward, clamped_swish_times, silu_times
from ggufmill.runtime.backends.cpu.kernels import products
from ggufmill.runtime.backends.cpu.moe import MixtureOfExperts, Router
from ggufmill.runtime.backends.cpu.weights import Together, WeightStore

N_EMBD, N_FF, EXPERTS = 256, 512, 6


def packed(name, shape, type_name, draw):
    """A source tensor with random weights of a type; shape in ne order."""
    rows = int(np.prod(shape[1:]))
    data = encode((draw.standard_normal((rows, shape[0])) / 16).astype(np.float32), type_name)

    def read(start, stop):
        return decode(data[start:stop], type_name, shape[0])

    return SourceTensor(name, shape, type_name, read, lambda a, b: data[a:b], TYPES[type_name], mapped=data)


def vectors(name, array):
    flat = array.reshape(-1, array.shape[-1]).astype(np.float32)
    return SourceTensor(name, array.shape[::-1], "f32", lambda start, stop: flat[start:stop])


def store_of(*tensors, threads=3):
    return WeightStore(TensorSource("test", {}, {t.name: t for t in tensors}, "test"), 1 << 24, threads)


def block(types, *stack, biased=False):
    """The tensors of a feed-forward block; types of gate, up and down."""
    draw = np.random.default_rng(len(stack))
    shapes = {"gate": (N_EMBD, N_FF, *stack), "up": (N_EMBD, N_FF, *stack), "down": (N_FF, N_EMBD, *stack)}
    out = [packed(f"b.ffn_{p}.weight", shapes[p], t, draw) for p, t in zip(shapes, types, strict=True)]
    if biased:
        out += [vectors(f"b.ffn_{p}.bias", draw.standard_normal((*stack, shapes[p][1]))) for p in shapes]
    return out


@pytest.fixture
def x():
    return np.random.default_rng(7).standard_normal((11, N_EMBD)).astype(np.float32)


@pytest.mark.parametrize("type_name", ["f32", "q8_0", "q4_K"])
def test_a_product_is_that_of_the_decoded_matrix(x, type_name):
    store = store_of(packed("w", (N_EMBD, 100, 3), type_name, np.random.default_rng(0)))
    linear = store.linear("w")
    for n in (1, 3, products.FEW):
        decoded = store.tensor("w").read(200, 300)
        expected, found = x[:n] @ decoded.T, linear.matmul(x[:n], 2)
        error = np.abs(found - expected).max() / np.abs(expected).max()
        assert error < (1e-5 if type_name == "f32" else 0.02)
        assert np.array_equal(found, np.concatenate([linear.matmul(row[None], 2) for row in x[:n]]))


def test_matrices_of_several_types_in_one_go(x):
    draw, types = np.random.default_rng(1), ("q4_K", "f32", "q8_0", "q4_K")
    tensors = [packed(f"w{i}", (N_EMBD, 32 * (i + 1)), t, draw) for i, t in enumerate(types)]
    for threads in (1, 3):
        store = store_of(*tensors, threads=threads)
        linears = [store.linear(t.name) for t in tensors]
        for n in (1, 2):
            for linear, found in zip(linears, Together(linears).matmul(x[:n]), strict=True):
                assert np.array_equal(found, linear.matmul(x[:n]))


@pytest.mark.parametrize("types", [("q4_K", "q4_K", "q8_0"), ("q8_0", "q4_K", "f32"), ("f32", "q8_0", "q4_K")])
@pytest.mark.parametrize("biased", [False, True])
def test_a_feed_forward_block_in_one_go(x, types, biased):
    for activation in (silu_times, clamped_swish_times):
        store = store_of(*block(types, biased=biased))
        together = GatedFeedForward.load(store, "b.", "", N_EMBD, N_FF, activation=activation)
        for n in (1, products.FEW):
            found = together(x[:n])
            store.watch = True  # every product on its own
            assert np.array_equal(found, together(x[:n]))
            store.watch = False


@pytest.mark.parametrize("biased", [False, True])
def test_experts_of_a_token_in_one_go(x, biased):
    router = packed("b.ffn_gate_inp.weight", (N_EMBD, EXPERTS), "f32", np.random.default_rng(3))
    store = store_of(router, *block(("q4_K", "q4_K", "q8_0"), EXPERTS, biased=biased))
    experts = GatedFeedForward.load(store, "b.", "", N_EMBD, N_FF, EXPERTS)
    mixture = MixtureOfExperts(Router(store.linear("b.ffn_gate_inp.weight"), 3, normalise=True), experts)
    for row in x[:4]:
        found = mixture(row[None])
        store.watch = True
        assert np.allclose(found, mixture(row[None]), atol=1e-5)
        store.watch = False
    alone = np.concatenate([mixture(row[None]) for row in x])
    assert np.array_equal(mixture(x[: products.FEW]), alone[: products.FEW])
    mixture.reduction = (1, 0.8)
    assert np.array_equal(mixture(x[:4]), np.concatenate([mixture(row[None]) for row in x[:4]]))
    assert not np.allclose(mixture(x[:4]), alone[:4], atol=1e-3)
    mixture.reduction = None
    batch = mixture(x)
    assert np.allclose(batch, alone, atol=0.02 * np.abs(batch).max())


def test_an_observer_sees_what_each_matrix_multiplies(x):
    store = store_of(*block(("q8_0", "q8_0", "q8_0")))
    seen = []
    store.observer = lambda name, matrix, rows: seen.append((name, rows.shape))
    feed_forward = GatedFeedForward.load(store, "b.", "", N_EMBD, N_FF)
    feed_forward(x[:2])
    Together([feed_forward.gate, feed_forward.up]).matmul(x[:1])
    names = [f"b.ffn_{part}.weight" for part in ("gate", "up", "down", "gate", "up")]
    assert [name for name, _ in seen] == names
    assert [shape for _, shape in seen] == [(2, N_EMBD), (2, N_EMBD), (2, N_FF), (1, N_EMBD), (1, N_EMBD)]


def test_what_cannot_be_multiplied_packed_is_decoded(x):
    tensor = packed("w", (N_EMBD, 32), "q8_0", np.random.default_rng(0))
    assert store_of(dataclasses.replace(tensor, stored=None, raw=None, mapped=None)).linear("w").plan is None
    odd = store_of(packed("w", (48, 8), "f32", np.random.default_rng(0)), vectors("v", np.ones((4, 48))))
    assert odd.linear("w").plan is not None
    assert odd.linear("v").plan is None
    assert odd.linear("v").matmul(np.ones((1, 48), np.float32)).tolist() == [[48] * 4]
