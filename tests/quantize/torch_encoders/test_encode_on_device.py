"""Encoders by torch, on its DEVICE, against the codecs: the same bytes, or nearly the same errors."""

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from op_graphs import DEVICE  # noqa: E402

import ggufmill  # noqa: E402
from ggufmill import quantize  # noqa: E402
from ggufmill.convert.source import open_source  # noqa: E402
from ggufmill.formats.gguf import open_gguf  # noqa: E402
from ggufmill.formats.layouts import layout_of  # noqa: E402
from ggufmill.quantize.codecs.codec import NonFiniteError  # noqa: E402
from ggufmill.quantize.torch_encoders.encode_on_device import METADATA_KEY, TYPES_ON_DEVICES  # noqa: E402
from ggufmill.quantize.torch_encoders.packing import packer_of  # noqa: E402
from ggufmill.recipes import FOLDER  # noqa: E402

pytestmark = pytest.mark.oracle

N = 512


def weights(kind: str) -> np.ndarray:
    """float32 [16, 512]: normal ones; with outliers; or with blocks, superblocks and rows of zeros and of extreme size."""
    rng = np.random.default_rng(1)
    x = (0.02 * rng.standard_normal((16, N))).astype(np.float32)
    if kind == "spiky":
        x[rng.random(x.shape) < 0.01] *= 30
    if kind == "extreme":
        x[:, 32:48], x[2:9, 256:], x[1] = 0, 0, 0
        x[9], x[10], x[11, ::2] = x[9] * 1e-4, x[10] * 1e4, 0
    return x


def importance(kind: str) -> np.ndarray | None:
    rng = np.random.default_rng(2)
    if kind == "none":
        return None
    values = rng.gamma(0.5, 1, N).astype(np.float32)
    if kind == "with zeros":
        values[64:128] = 0
    return values


def weighted_error(x: np.ndarray, q: np.ndarray, name: str, qw: np.ndarray | None) -> float:
    difference = x.astype(np.float64) - quantize.decode(q, name, x.shape[1])
    return float((difference * difference * (1 if qw is None else qw)).sum())


def assert_as_good(x: np.ndarray, name: str, qw: np.ndarray | None, same_bytes: float = 0.99) -> None:
    expected, actual = quantize.encode(x, name, qw), quantize.encode(x, name, qw, device=DEVICE)
    assert actual.shape == expected.shape
    assert np.mean(actual == expected) > same_bytes
    error = weighted_error(x, expected, name, qw)
    assert weighted_error(x, actual, name, qw) == pytest.approx(error, rel=1e-4)


@pytest.mark.parametrize("qw", ["none", "positive", "with zeros"])
@pytest.mark.parametrize("kind", ["normal", "spiky", "extreme"])
@pytest.mark.parametrize("name", sorted(TYPES_ON_DEVICES))
def test_bytes_of_the_codecs(name, kind, qw):
    assert_as_good(weights(kind), name, importance(qw))


@pytest.mark.parametrize("name", sorted(TYPES_ON_DEVICES))
def test_constant_rows(name):
    """Where all fits are equally good, rounding chooses one: the bytes may be others. (iq2_kl has no pair of equal values.)"""
    x, qw = np.full((2, N), 0.01, np.float32), importance("positive")
    expected, actual = (weighted_error(x, quantize.encode(x, name, qw, device=device), name, qw) for device in (None, DEVICE))
    assert actual <= max(expected * (1 + 1e-4), 0.01 * weighted_error(x, np.zeros_like(quantize.encode(x, name, qw)), name, qw))


@pytest.mark.parametrize("name", ["q4_k_r4", "iq4_ks_r4"])
def test_repacked_types_are_encoded_as_their_base(name):
    x = weights("normal")
    qw = importance("positive")
    assert np.array_equal(quantize.encode(x, name, qw, device=DEVICE), quantize.encode(x, name, qw))


@pytest.mark.parametrize("name", ["q2_K", "q3_K", "q4_K", "q6_K", "iq2_k", "iq2_ks", "iq3_k", "iq5_ks", "iq4_kss", "iq2_kl"])
def test_weights_of_a_trained_model(name):
    source = open_source(FOLDER / "demo")
    tensor = max(source.tensors.values(), key=lambda t: t.shape[0])
    x = tensor.read(0, min(128, tensor.shape[1])).reshape(-1, 256)
    assert_as_good(x, name, None)


def test_batches_do_not_change_rows(monkeypatch):
    x = weights("spiky")
    whole = quantize.encode(x, "iq3_ks", importance("positive"), device=DEVICE)
    monkeypatch.setattr("ggufmill.quantize.torch_encoders.encode_on_device._BATCH_WEIGHTS", 3 * N)
    assert np.array_equal(quantize.encode(x, "iq3_ks", importance("positive"), device=DEVICE), whole)


@pytest.mark.parametrize("name", [name for name in sorted(TYPES_ON_DEVICES) if not layout_of(name).gray_words])
def test_packing_is_the_inverse_of_the_layout(name):
    layout, rng = layout_of(name), np.random.default_rng(3)
    fields = {
        field: torch.from_numpy(rng.integers(0, 1 << bits.shape[2], (5, bits.shape[1])))
        for field, bits in layout.bit_arrays().items()
    }
    blocks = packer_of(name, torch.device("cpu"))(fields).numpy()
    bits = np.unpackbits(blocks, axis=1, bitorder="little")
    for field, addresses in layout.bit_arrays().items():
        stored = (bits[:, addresses[0]].astype(np.int64) << np.arange(addresses.shape[2])).sum(axis=2)
        assert np.array_equal(stored, fields[field].numpy()), field


def test_other_types_stay_with_the_codecs():
    x = weights("normal")
    assert np.array_equal(quantize.encode(x, "q8_0", device="no such device"), quantize.encode(x, "q8_0"))


def test_weights_that_are_not_finite_are_refused():
    x = weights("normal")
    x[3, 7] = np.nan
    with pytest.raises(NonFiniteError, match="row 3, column 7"):
        quantize.encode(x, "q4_K", device=DEVICE)


def test_a_model_quantised_on_a_device_says_so(tmp_path: Path):
    made = {"type": "Q4_K_M", "force": True}
    ggufmill.quantize_model(FOLDER / "demo", tmp_path / "a.gguf", **made, device=DEVICE)
    ggufmill.quantize_model(FOLDER / "demo", tmp_path / "b.gguf", **made)
    a, b = open_gguf(tmp_path / "a.gguf"), open_gguf(tmp_path / "b.gguf")
    assert a.metadata[METADATA_KEY] == DEVICE
    assert METADATA_KEY not in b.metadata
    encoded = [tensor for tensor in a.tensors.values() if tensor.type.name in TYPES_ON_DEVICES]
    assert encoded
    for tensor in encoded:
        same = tensor.data == b.tensors[tensor.name].data
        assert same.mean() > 0.99
