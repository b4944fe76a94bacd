"""Products of a few tokens, straight from the packed rows (GEMV)."""

import dataclasses

import numpy as np
import pytest
from cpu_products import types_of_several
from small_models import llama

from ggufmill.formats import TYPES, SourceTensor, TensorSource
from ggufmill.quantize import decode, encode
from ggufmill.runtime import load_model
from ggufmill.runtime.backends.cpu.kernels.gemv.gemv import SEVERAL
from ggufmill.runtime.backends.cpu.kernels.gemv_plan import GEMV_TOKENS
from ggufmill.runtime.backends.cpu.weights import WeightStore

N_EMBD = 256


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


@pytest.fixture
def x():
    return np.random.default_rng(7).standard_normal((11, N_EMBD)).astype(np.float32)


@pytest.mark.parametrize("type_name", ["f32", "q8_0", "q4_K"])
def test_a_product_is_that_of_the_decoded_matrix(x, type_name):
    store = store_of(packed("w", (N_EMBD, 100, 3), type_name, np.random.default_rng(0)))
    weights = store.matrix("w")
    for n in (1, 3, GEMV_TOKENS):
        decoded = store.tensor("w").read(200, 300)
        expected, found = x[:n] @ decoded.T, weights.multiply(x[:n], 2)
        error = np.abs(found - expected).max() / np.abs(expected).max()
        assert error < (1e-5 if type_name == "f32" else 0.02)
        assert np.array_equal(found, np.concatenate([weights.multiply(row[None], 2) for row in x[:n]]))


@pytest.fixture
def asked(monkeypatch):
    return types_of_several(monkeypatch)


def test_code_for_several_tokens_is_asked_for_by_products_of_several(x, asked):
    weights = store_of(packed("w", (N_EMBD, 8, 2), "q8_0", np.random.default_rng(0))).matrix("w")
    weights.multiply(x[:1])
    assert asked == []
    weights.multiply(x[:2])
    assert asked == ["q8_0"]
    plan = weights.gemv_plan
    assert plan.table((0, 0, 0), 0, 0, 0, several=False)[SEVERAL] == 0
    assert plan.table((0, 0, 0), 0, 0, 0, several=True)[SEVERAL] == plan.product.several


@pytest.mark.parametrize("experts", [0, 8])
def test_generated_tokens_ask_for_it_side_by_side(experts, asked):
    model = load_model(llama("q8_0", experts), threads=2)
    model.feed([(model.session(4), [1, 2, 3])])
    model.feed([(model.session(4), [1])])
    assert asked == []
    model.feed([(model.session(4), [1]), (model.session(4), [2])])
    assert asked


def test_what_cannot_be_multiplied_packed_is_decoded(x):
    tensor = packed("w", (N_EMBD, 32), "q8_0", np.random.default_rng(0))
    assert store_of(dataclasses.replace(tensor, stored=None, raw=None, mapped=None)).matrix("w").gemv_plan is None
    odd = store_of(packed("w", (48, 8), "f32", np.random.default_rng(0)), vectors("v", np.ones((4, 48))))
    assert odd.matrix("w").gemv_plan is not None
    assert odd.matrix("v").gemv_plan is None
    assert odd.matrix("v").multiply(np.ones((1, 48), np.float32)).tolist() == [[48] * 4]
