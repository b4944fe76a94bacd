"""Passes over few tokens with fixed addresses, which CUDA records, against passes op by op. On torch's cpu device they are made
without being recorded."""

import os

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")
import torch
from checkpoint_cases import convert_case
from op_graphs import DEVICE
from row_numbers import vector_numbers

from ggufmill import quantize_model
from ggufmill.formats import TYPES
from ggufmill.quantize import decode
from ggufmill.runtime import load_model
from ggufmill.runtime.backends.torch import cache, executable, fixed_pass, weights
from ggufmill.runtime.backends.torch import triton as kernels_package
from ggufmill.runtime.backends.torch.decode import matrix
from ggufmill.runtime.backends.torch.triton.launch import PackedProducts

pytestmark = pytest.mark.oracle


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {case: convert_case(case, folder / case)[2] for case in ("llama", "qwen3moe", "gpt-oss", "v3")}


@pytest.fixture
def loaded(paths, monkeypatch):
    """(case, devices where passes are fixed, settings) -> a model."""

    def load(case, devices, **settings):
        monkeypatch.setattr(executable, "FIXED_DEVICES", devices)
        return load_model(paths[case], device=DEVICE, exact=True, threads=1, n_ctx=80, **settings)

    monkeypatch.setattr(cache, "_MIN_TOKENS", 8)  # so that caches grow within the test
    return load


def generated(model):
    """Logits of a sequence that grows, goes back, divides, and is computed together with another one."""
    rng, session = np.random.default_rng(0), model.session()
    vocabulary = min(model.n_vocab, 200)
    out = [session.feed(rng.integers(0, vocabulary, 11))]
    out += [session.feed([token]) for token in rng.integers(0, vocabulary, 8)]
    out += model.feed_rows([(session, [5, 6, 7], 3)], generated=True)
    session.rewind(15)
    out.append(session.feed([9]))
    other = session.fork()
    out += [other.feed([3]), session.feed([4])]
    for token in rng.integers(0, vocabulary, 4):
        out.append(model.feed([(session, [token]), (other, [1 + token])]))
    return np.concatenate([np.atleast_2d(rows) for rows in out])


@pytest.mark.parametrize("case", ["llama", "qwen3moe", "gpt-oss"])
def test_generation_by_fixed_passes(loaded, case):
    model = loaded(case, (DEVICE.split(":")[0],))
    assert model.executable._fixed_body is not None
    assert model.executable._fixed_head is not None
    found = generated(model)
    plain = loaded(case, ())
    assert plain.executable._fixed_body is None
    np.testing.assert_allclose(found, generated(plain), rtol=0, atol=1e-4)


def test_a_pass_is_kept_while_its_caches_have_their_memory(loaded):
    model = loaded("llama", (DEVICE.split(":")[0],))
    session, kept = model.session(), model.executable._passes._kept
    session.feed([1, 2, 3])
    session.feed([4])
    bodies = [each for key, each in kept.items() if len(key) > 2]
    session.feed([5])
    assert [each for key, each in kept.items() if len(key) > 2] == bodies
    for token in range(6):  # beyond the eight rows that there was memory for
        session.feed([token])
    (grown,) = [each for key, each in kept.items() if len(key) > 2]
    assert grown is not bodies[0]
    model.release()
    assert not kept


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        ("v3", {}),  # latent attention
        ("llama", {"device_memory": 1 << 30}),  # weights are copied
        ("llama", {"gpu_layers": 1}),  # ops on the host in between
        ("qwen3moe", {"cpu_moe": True}),
    ],
)
def test_what_cannot_be_fixed_is_made_op_by_op(loaded, case, settings):
    assert loaded(case, (DEVICE.split(":")[0],), **settings).executable._fixed_body is None


def test_a_pass_that_cannot_be_recorded_is_noted_once(monkeypatch):
    with pytest.warns(UserWarning, match="not recorded on cuda:9, which makes generation slower: an operation waits"):
        fixed_pass.note_unrecorded("cuda:9", "an operation waits")
    fixed_pass.note_unrecorded("cuda:9", "an operation waits")


@pytest.fixture
def interpreted(monkeypatch):
    """All kernels of Triton serve the processor, in its interpreter."""
    monkeypatch.setattr(kernels_package, "_DEVICES", ("cpu",))
    monkeypatch.setattr(kernels_package, "_served", lambda device: True)
    kernels = kernels_package.row_kernels, kernels_package.attention_kernels, kernels_package.kernels_of
    for cached in kernels:
        cached.cache_clear()
    yield
    for cached in kernels:
        cached.cache_clear()


def few_logits(model):
    """Of a prompt and of two tokens after it."""
    session = model.session()
    return np.array([session.feed([3, 4, 5, 6, 7, 8, 9, 10, 11, 12]), *(session.feed([token]) for token in (13, 14))])


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels of rows are used anyway")
@pytest.mark.parametrize("case", ["llama", "gpt-oss"])
def test_passes_with_kernels_of_rows_and_attention(loaded, monkeypatch, request, case):
    """In Triton's interpreter; products are torch's."""
    expected = few_logits(loaded(case, ()))
    request.getfixturevalue("interpreted")
    monkeypatch.setattr(matrix, "kernels_of", lambda type_name, device: None)
    np.testing.assert_allclose(few_logits(loaded(case, ("cpu",))), expected, rtol=0, atol=1e-4)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="they are used anyway")
def test_packed_matrices_are_multiplied_together(paths, tmp_path, monkeypatch, request):
    """Queries, keys and values, and gate and up, by one kernel each; torch does its work here."""
    path, together = tmp_path / "llama-q8_0.gguf", []
    quantize_model(paths["llama"], path, "q8_0")
    expected = few_logits(load_model(path, device="cpu", exact=True, threads=1, n_ctx=80))
    request.getfixturevalue("interpreted")
    monkeypatch.setattr(executable, "FIXED_DEVICES", ("cpu",))
    monkeypatch.setattr(weights.Weights, "product_dtype", lambda self, device: torch.bfloat16)

    def multiplied(self, parts, x, matrices, columns, same):
        together.append(len(parts))
        numbers = torch.from_numpy(vector_numbers(x, columns)).float()
        return [numbers @ self.decode(data, columns, 0, count).T for data, count in parts]

    monkeypatch.setattr(PackedProducts, "_multiply_bytes", multiplied)

    def decoded(self, data, columns, first, count, dtype=torch.float32):
        rows = data.numpy().reshape(-1, TYPES[self._type].row_bytes(columns))[first : first + count]
        return torch.from_numpy(decode(rows, self._type, columns)).to(dtype)

    monkeypatch.setattr(PackedProducts, "decode", decoded)
    model = load_model(path, device="cpu", exact=False, threads=1, n_ctx=80)
    np.testing.assert_allclose(few_logits(model), expected, rtol=0, atol=0.05 * np.abs(expected).max())
    layers, generated = len(model.graph.layers), [each for each in together if each > 1]
    assert generated == 2 * layers * [3, 2]


def test_logits_of_a_pass_are_not_those_of_other_states(loaded):
    """They are computed with the states that they belong to, and given for these alone."""
    model = loaded("llama", (DEVICE.split(":")[0],))
    cache = model.new_cache(20)
    (hidden,) = model.hidden([(cache, [5])], generated=True)
    assert model.executable._foreseen is not None
    doubled = model.head(2 * hidden, True)
    np.testing.assert_allclose(doubled, 2 * model.head(hidden, True), rtol=1e-4)
    (hidden,) = model.hidden([(cache, [6])], generated=True)
    given = model.head(hidden, True)
    given[:] = 0
    assert model.head(hidden, True).any()
