"""`tune`: norms and scales of a quantised file, its codes as they are."""

import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")
from ggufmill import compute_imatrix, hash_model, quantize_model, run_recipe, tune_model
from ggufmill.errors import MillError, UsageError
from ggufmill.formats import open_gguf
from ggufmill.jobs.journal import Journal
from ggufmill.pipeline import tune as module
from ggufmill.pipeline.tuning import descent, tuning
from ggufmill.pipeline.tuning.tuning import Tuning
from ggufmill.pipeline.writing import sequential
from ggufmill.recipes import FOLDER
from ggufmill.runtime import load_model
from ggufmill.runtime.backends.torch import parameter_gradients

pytestmark = pytest.mark.oracle

DEMO, TEXT = FOLDER / "demo", FOLDER / "demo/calibration.txt"
N_CTX, RATE = 48, 2e-3


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
        return tune_model(DEMO, quantised, out, **{"text": TEXT, "chunks": 8, "epochs": 2, "threads": 1} | options)


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
    assert different <= {each["name"] for each in result.as_json()["tensors"] if each["rule"] == "tuned"}


def test_the_same_bytes_for_any_number_of_threads(quantised, tuned, tmp_path):
    tune(quantised, tmp_path / "t.gguf", threads=3)
    assert (tmp_path / "t.gguf").read_bytes() == tuned[0].read_bytes()


def test_it_is_compared_with_what_it_was_made_from(quantised, tmp_path):
    """Norms and scales that were tuned are near those before; other weights are the same."""
    result = tune(quantised, tmp_path / "t.gguf", verify=True)
    assert result.tuned > 0
    checks = {check.name: check for check in result.verification.tensors}
    assert any(check.error > 0 for check in checks.values())
    assert checks["token_embd.weight"].same


def test_it_is_never_worse(quantised, tmp_path, monkeypatch, caplog):
    """Steps that lead away: what is written is what was given."""
    caplog.set_level("INFO", "ggufmill")
    monkeypatch.setattr(f"{__name__}.RATE", -0.05)
    result = tune(quantised, tmp_path / "t.gguf", epochs=1, norms_only=True)
    assert result.divergences[1] > result.divergences[0]
    assert result.tuned == 0
    assert "did not lower the KL divergence on the windows that judge" in caplog.text
    before, after = open_gguf(quantised), open_gguf(tmp_path / "t.gguf")
    assert all(np.array_equal(tensor.data, after.tensors[name].data) for name, tensor in before.tensors.items())


def test_norms_alone(quantised, tmp_path):
    result = tune(quantised, tmp_path / "t.gguf", norms_only=True, dry_run=True)
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
        Tuning(other, np.zeros((8, 4), np.int64)).weights_of(model)


@pytest.mark.parametrize("when", ["steps", "writing"])
def test_the_same_bytes_however_often_it_is_killed(quantised, tuned, tmp_path, monkeypatch, when):
    """Between steps, at the end of an epoch, and while what was tuned is written."""
    out, calls = tmp_path / "t.gguf", []
    owner, name = (descent.Descent, "_tell") if when == "steps" else (Journal, "add")
    killed = (2, 5, 7, 10) if when == "steps" else (40, 81, 90)
    original = getattr(owner, name)

    def counted(self, *given):
        calls.append(given)
        original(self, *given)
        if len(calls) in killed:
            raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, counted)
    monkeypatch.setattr(tuning, "_SHARE", 1e9)  # each step is worth keeping
    for attempt in range(len(killed) + 1):
        try:
            tune(quantised, out, resume=attempt > 0, threads=2)
        except KeyboardInterrupt:
            assert not out.exists()
    assert attempt == len(killed)
    assert out.read_bytes() == tuned[0].read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["t.gguf"]
    assert len(calls) == 12 or when == "writing"  # 7 of one that is not killed: no step that was kept is made again


def test_a_state_of_another_job_is_not_used(quantised, tuned, tmp_path, monkeypatch):
    out = tmp_path / "t.gguf"
    monkeypatch.setattr(tuning, "_SHARE", 1e9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(descent.Descent, "_end_epoch", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            tune(quantised, out, norms_only=True)
    assert out.with_name("t.gguf.tuning").exists()
    tune(quantised, out, force=True)
    assert out.read_bytes() == tuned[0].read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["t.gguf"]


def test_on_a_device(quantised, tuned, tmp_path, monkeypatch):
    """torch's `cpu` in the place of one: groups one after the other, and nothing but what may lies elsewhere."""
    moved, original = [], parameter_gradients.Gradients.__init__
    monkeypatch.setattr(
        parameter_gradients.Gradients, "__init__", lambda self, *given: (moved.append(given[2]), original(self, *given))[1]
    )
    result = tune(quantised, tmp_path / "t.gguf", device="cpu")
    assert {*map(str, moved)} - {"meta"} == {"cpu"}  # what a pass takes is counted on shapes alone
    assert result.divergences == tuned[1].divergences
    assert (tmp_path / "t.gguf").read_bytes() == tuned[0].read_bytes()


def test_several_texts_in_equal_shares(quantised, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(module, "Tuning", lambda *given: seen.append(given[1]) or Tuning(*given))
    texts = [TEXT, FOLDER / "demo/heldout.txt"]
    result = tune(quantised, tmp_path / "t.gguf", text=texts, chunks=9, dry_run=True)
    for text, part in zip(texts, (slice(0, 4), slice(4, 9)), strict=True):
        tune(quantised, tmp_path / "t.gguf", text=text, chunks=8, dry_run=True)
        assert np.array_equal(seen[0][part], seen.pop()[: part.stop - part.start])
    assert result.plan.metadata["quantize.tuning.dataset"] == "calibration.txt, heldout.txt"


def test_dry_run_says_what_it_takes(quantised, tmp_path, caplog):
    caplog.set_level("INFO", "ggufmill")
    tune(quantised, tmp_path / "t.gguf", dry_run=True)
    assert re.search(
        r"1 judge; about [\d.]+ MiB of memory beside both models \([\d.]+ [KM]iB .*\), about [\d.]+ s", caplog.text
    )
    assert not list(tmp_path.iterdir())


def test_at_the_end_of_the_highest_effort(quantised, tmp_path, caplog):
    """Of `quantize`: another file than without, of which the manifest is."""
    caplog.set_level("INFO", "ggufmill")
    files = tmp_path / "a.imatrix", tmp_path / "a.cov"
    compute_imatrix(DEMO, TEXT, files[0], covariance=files[1], n_ctx=64, chunks=8, progress=False)
    given = {"custom_q": r"^blk\.0\.=q4_0", "covariance": files[1], "sequential": TEXT, "sequential_chunks": 8, "threads": 2}
    plain, tuned = (tmp_path / f"{name}.gguf" for name in ("plain", "tuned"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequential, "N_CTX", 64)
        quantize_model(DEMO, plain, effort=4, **given)
        manifest = quantize_model(DEMO, tuned, effort=4, tune=True, verify=True, manifest=True, **given).manifest
        assert "KL divergence on the windows that judge" in caplog.text
        hash_model(tuned, check=manifest)  # raises for a difference
    before, after = open_gguf(plain).tensors, open_gguf(tuned).tensors
    different = {name for name, tensor in after.items() if not np.array_equal(before[name].data, tensor.data)}
    assert {"blk.0.attn_norm.weight", "blk.0.ffn_down.weight"} <= different
    with pytest.raises(UsageError, match="--tune does nothing without --sequential or --effort 4"):
        quantize_model(DEMO, tmp_path / "b.gguf", "q4_0", covariance=files[1], tune=True)


@pytest.mark.parametrize(
    ("chunks", "has_torch", "message"),
    [
        (7, True, "fills 7 windows of 512 tokens; tuning needs 8"),
        (0, True, "one window needs 512"),
        (8, False, "needs torch"),
    ],
)
def test_a_recipe_that_cannot_be_done_to_its_end_does_nothing(tmp_path, monkeypatch, chunks, has_torch, message):
    """What the order of the model and tuning need is looked for before second moments are collected."""
    from ggufmill.pipeline.stages import run

    text, recipe, out = tmp_path / "short.txt", tmp_path / "r.toml", tmp_path / "out"
    text.write_text(TEXT.read_text("utf-8") if chunks else "A short text.\n")
    if not has_torch:
        monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(run.Run, "importance", lambda _: pytest.fail("collects"))
    recipe.write_text(
        f'[source]\nmodel = "{DEMO}"\n[imatrix]\ntext = "{TEXT}"\nchunks = 1\ncovariance = true\n'
        f'[quantize]\nrules = "^blk=q4_0"\nsequential = "{text}"\nsequential_chunks = {chunks or 8}\n'
        "effort = 4\ntune = true\n"
    )
    with pytest.raises(MillError, match=message):
        run_recipe(recipe, out, progress=False)
    assert not list(out.glob("*.imatrix"))
    assert not list(out.glob("*.gguf"))


def test_without_torch(quantised, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MillError, match="tune needs torch"):
        tune(quantised, tmp_path / "t.gguf")


def test_a_dry_run_says_what_tuning_takes_after_encoding_in_order(tmp_path):
    """Of a file that is not written yet nothing was said."""
    given = {"covariance": tmp_path / "d.cov", "imatrix": tmp_path / "d.imatrix", "threads": 1}
    compute_imatrix(DEMO, TEXT, given["imatrix"], covariance=given["covariance"], n_ctx=N_CTX, chunks=2)
    asked = {"effort": 4, "sequential": TEXT, "sequential_chunks": 8, "dry_run": True}
    plain, tuned = (
        quantize_model(DEMO, tmp_path / "q.gguf", "q4_0", **given, **asked, tune=tune).forecast for tune in (False, True)
    )
    assert tuned.seconds["tune"] > 0
    assert tuned.total > plain.total
