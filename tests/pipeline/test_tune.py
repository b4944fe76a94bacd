"""`tune`: norms and scales of a quantised file, its codes as they are."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")
from ggufmill import quantize_model, tune_model
from ggufmill.errors import MillError
from ggufmill.formats import open_gguf
from ggufmill.pipeline import tune as module
from ggufmill.pipeline.tuning import descent
from ggufmill.recipes import FOLDER
from ggufmill.runtime import load_model

pytestmark = pytest.mark.oracle

DEMO, TEXT = FOLDER / "demo", FOLDER / "demo/calibration.txt"
N_CTX, RATE = 64, 2e-3


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    out = tmp_path_factory.mktemp("quantised") / "q.gguf"
    quantize_model(DEMO, out, custom_q=r"^blk\..*exps=q4_1,^blk\.=q4_0")
    data = out.read_bytes()
    for name, tensor in open_gguf(out).tensors.items():  # something that a few steps can mend
        if name.endswith(("attn_norm.weight", "ffn_norm.weight")):
            gains = np.ascontiguousarray(tensor.data)
            data = data.replace(gains.tobytes(), (gains.view("<f4") * np.float32(1.03)).tobytes())
    out.write_bytes(data)
    return out


def tune(quantised, out, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "N_CTX", N_CTX)
        patch.setattr(descent, "_RATE", RATE)
        return tune_model(DEMO, quantised, out, **{"text": TEXT, "chunks": 24, "epochs": 2, "threads": 1} | options)


@pytest.fixture(scope="module")
def tuned(quantised, tmp_path_factory):
    out = tmp_path_factory.mktemp("tuned") / "t.gguf"
    return out, tune(quantised, out)


def test_it_comes_nearer_and_keeps_its_codes(quantised, tuned):
    out, result = tuned
    assert len(result.divergences) == 3
    assert min(result.divergences[1:]) < 0.99 * result.divergences[0]
    before, after = open_gguf(quantised), open_gguf(out)
    different = {n for n, tensor in before.tensors.items() if not np.array_equal(tensor.data, after.tensors[n].data)}
    assert len(different) == result.tuned
    assert {"output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ffn_down.weight", "blk.1.ffn_up_exps.weight"} <= different
    assert not {"token_embd.weight", "blk.1.ffn_gate_inp.weight"} & different
    for name in ("blk.0.ffn_down.weight", "blk.1.ffn_up_exps.weight"):
        kept = 2 if "exps" not in name else 4  # bytes of the scale, and of the offset beside it
        codes = [file.tensors[name].data.reshape(-1, 16 + kept)[:, kept:] for file in (before, after)]
        assert np.array_equal(*codes)
    assert after.metadata["quantize.tuning.dataset"] == "calibration.txt"
    assert {each["name"] for each in result.as_json()["tensors"] if each["rule"] == "tuned"} == different


def test_the_same_bytes_for_any_number_of_threads(quantised, tuned, tmp_path):
    tune(quantised, tmp_path / "t.gguf", threads=3)
    assert (tmp_path / "t.gguf").read_bytes() == tuned[0].read_bytes()


def test_it_is_never_worse(quantised, tmp_path, monkeypatch, caplog):
    """Steps that lead away: what is written is what was given."""
    caplog.set_level("INFO", "ggufmill")
    monkeypatch.setattr(f"{__name__}.RATE", -0.05)
    result = tune(quantised, tmp_path / "t.gguf", chunks=8, epochs=1, norms_only=True)
    assert result.divergences[1] > result.divergences[0]
    assert result.tuned == 0
    assert "did not lower the KL divergence on the windows that judge" in caplog.text
    before, after = open_gguf(quantised), open_gguf(tmp_path / "t.gguf")
    assert all(np.array_equal(tensor.data, after.tensors[name].data) for name, tensor in before.tensors.items())


def test_norms_alone(quantised, tmp_path):
    result = tune(quantised, tmp_path / "t.gguf", chunks=8, norms_only=True, dry_run=True)
    kinds = {each["type"] for each in result.as_json()["tensors"] if each["rule"] == "tuned"}
    assert kinds == {"f32"}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text": "nothing.txt"}, "there is no such file"),
        ({"text": __file__, "chunks": 8}, None),
        ({"keep_split": True}, "there is no split to keep"),
    ],
    ids=str,
)
def test_what_is_refused(quantised, tmp_path, options, message):
    if message is None:
        short = tmp_path / "short.txt"
        short.write_text("word " * 150)
        options, message = {"text": short}, "tuning needs 8, of which one judges"
    with pytest.raises(MillError, match=message):
        tune(quantised, tmp_path / "t.gguf", **options, dry_run=True)
    assert not (tmp_path / "t.gguf").exists()


def test_of_another_model(quantised):
    model = load_model(quantised, threads=1)
    other = SimpleNamespace(graph=SimpleNamespace(n_vocab=32000, architecture="llama"), source=model.source)
    with pytest.raises(MillError, match="of llama with 32,000: it was not made of that model"):
        module._windows(other, model, TEXT, 8)


def test_without_torch(quantised, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MillError, match="tune needs torch"):
        tune(quantised, tmp_path / "t.gguf")
