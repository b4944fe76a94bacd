"""Gradients of models as they are loaded: in other types, on devices, with weights that are read again; labels; encoders."""

import numpy as np
import pytest

pytest.importorskip("torch")
from checkpoint_cases import convert_case
from encoder_cases import CASES as ENCODERS
from encoder_cases import convert_encoder

from ggufmill import quantize_model
from ggufmill.convert import open_source
from ggufmill.errors import PlanError
from ggufmill.recipes import FOLDER
from ggufmill.runtime import load_model
from ggufmill.runtime.backends.torch import gradients as gradients_module
from ggufmill.runtime.backends.torch.drawn_labels import loss_gradient, uniform_draws
from ggufmill.runtime.backends.torch.functions import attention
from ggufmill.runtime.backends.torch.weights import Weights
from ggufmill.runtime.output_gradients import gradients_of

pytestmark = pytest.mark.oracle

N_CTX = 48


@pytest.fixture(scope="module")
def windows():
    model = load_model(open_source(FOLDER / "demo"), threads=1)
    tokens = model.tokenizer.encode((FOLDER / "demo/calibration.txt").read_text("utf-8")[:2000])
    return np.array(tokens[: 3 * N_CTX], np.int64).reshape(3, N_CTX)


def found_in(model, windows, seed=0, **changes):
    """(value index, tensor) -> gradients of all windows."""
    gradients, found = gradients_of(model), {}
    for name, value in changes.items():
        setattr(gradients, name, value)
    names = [name for name in model.stored.tensors if name.endswith(".weight")]
    gradients.run(windows, seed, names, lambda one: found.setdefault((one.op.out.index, one.weight.name), []).append(one.g))
    return {key: np.concatenate(parts) for key, parts in found.items()}


@pytest.fixture(scope="module")
def expected(windows):
    return found_in(load_model(open_source(FOLDER / "demo"), threads=1), windows)


def test_interleaved_weights_and_threads_make_no_difference(windows, expected):
    other = found_in(load_model(open_source(FOLDER / "demo"), threads=3, repack=True), windows)
    assert other.keys() == expected.keys()
    for key, g in expected.items():
        assert np.array_equal(other[key], g), key


def test_weights_that_were_copied_are_read_again(windows, expected, monkeypatch):
    released, original = [], Weights.release

    def release(self, most):
        before = len(self._stored)
        original(self, most)
        released.append(before - len(self._stored))

    monkeypatch.setattr(Weights, "release", release)
    other = found_in(load_model(open_source(FOLDER / "demo"), threads=1), windows, _copied_bytes=0)
    assert sum(count > 0 for count in released) > 4
    for key, g in expected.items():
        assert np.array_equal(other[key], g), key


def test_scores_that_are_too_large_are_computed_again(windows, expected, monkeypatch):
    calls, original = [], attention.checkpoint
    monkeypatch.setattr(gradients_module, "SCRATCH", 8 * 4 * N_CTX * 20)  # 20 queries of 4 heads at a time
    monkeypatch.setattr(attention, "checkpoint", lambda *given, **options: calls.append(1) or original(*given, **options))
    other = found_in(load_model(open_source(FOLDER / "demo"), threads=2), windows)
    assert len(calls) == 4 * 3 * 2 * 3  # layers, windows, forms of latent attention, runs of queries
    for key, g in expected.items():
        assert np.abs(other[key] - g).max() <= 1e-4 * np.abs(g).max(), key


@pytest.mark.parametrize("rules", [{}, {"device_memory": 6 << 20}, {"n_cpu_moe": 2}, {"gpu_layers": 2}], ids=str)
def test_on_a_device_of_torch(windows, expected, rules):
    """Whatever lies there, and what is copied there for each use."""
    other = found_in(load_model(open_source(FOLDER / "demo"), threads=1, device="cpu", **rules), windows)
    assert other.keys() == expected.keys()
    for key, g in expected.items():
        assert np.abs(other[key] - g).max() <= 1e-4 * np.abs(g).max(), key


def test_a_model_in_q8_0_has_those_of_its_values(windows, expected, tmp_path):
    """Packed rows are decoded for both products; and most labels are those of the model that was quantised."""
    quantize_model(FOLDER / "demo", tmp_path / "q8.gguf", "q8_0")
    quantize_model(tmp_path / "q8.gguf", tmp_path / "f32.gguf", "f32", allow_requantize=True)
    packed, plain = (found_in(load_model(tmp_path / f"{name}.gguf", threads=1), windows) for name in ("q8", "f32"))
    assert packed.keys() == plain.keys()
    for key, g in plain.items():
        assert np.abs(packed[key] - g).max() <= 1e-4 * np.abs(g).max(), key
    labels = [
        found.argmin(axis=2)
        for found in (next(g for key, g in each.items() if key[1] == "output.weight") for each in (packed, expected))
    ]
    assert np.mean(labels[0] == labels[1]) > 0.7


def test_labels_depend_on_seed_and_tokens_alone(windows):
    draws = uniform_draws(3, windows[0])
    assert draws.shape == (N_CTX,)
    assert np.array_equal(draws, uniform_draws(3, windows[0].copy()))
    assert ((draws >= 0) & (draws < 1)).all()
    changed = windows[0].copy()
    changed[-1] += 1
    for other in (uniform_draws(4, windows[0]), uniform_draws(3, changed), uniform_draws(3, windows[1])):
        assert not np.isin(other, draws).any()


def test_labels_are_drawn_from_the_predictions():
    import torch

    p = np.array([0.1, 0.0, 0.6, 0.3])
    logits = torch.log(torch.tensor(p, dtype=torch.float32)).repeat(4000, 1)
    gradient = loss_gradient(logits, np.random.default_rng(0).random(4000)).numpy()
    labels = (gradient - p).argmin(axis=1)
    np.testing.assert_allclose(gradient, p - np.eye(4)[labels], atol=1e-6)
    np.testing.assert_allclose(np.bincount(labels, minlength=4) / 4000, p, atol=0.03)
    assert loss_gradient(logits[:2], np.array([0.0, 1.0 - 1e-16])).argmin(dim=1).tolist() == [0, 3]


def test_a_window_gives_the_same_whatever_runs_beside_it(windows, expected):
    """But for the rounding of products of more rows."""
    alone = found_in(load_model(open_source(FOLDER / "demo"), threads=1), windows[1:2])
    for key, g in expected.items():
        assert np.abs(alone[key] - g[N_CTX : 2 * N_CTX]).max() <= 1e-4 * np.abs(g).max(), key


def test_models_that_predict_nothing_are_refused(tmp_path):
    *_, path = convert_encoder(next(iter(ENCODERS)), tmp_path)
    with pytest.raises(PlanError, match="has no output matrix: it predicts no tokens, so that nothing has a gradient"):
        gradients_of(load_model(path))


def test_what_only_prepares_a_choice_has_none(tmp_path):
    """The indexer of DeepSeek-V3.2."""
    tokens, _, path = convert_case("deepseek32", tmp_path)
    model = load_model(path, threads=1)
    names = {name for _, name in found_in(model, np.asarray(tokens)[None, :N_CTX])}
    indexer = {name for name in model.stored.tensors if "indexer" in name and name.endswith(".weight")}
    assert len(indexer) > 4
    assert not names & indexer
