"""`quantize --sequential`: matrices for what those before them, quantised, make of a text."""

import re
import sys
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")
from ggufmill import compute_imatrix, quantize_model, run_recipe
from ggufmill.errors import MillError, UsageError
from ggufmill.formats import open_gguf
from ggufmill.jobs.journal import Journal
from ggufmill.pipeline.common.reading import TORCH_BYTES, start_seconds
from ggufmill.pipeline.planning import Quantization
from ggufmill.pipeline.requests.quantize import QuantizeRequest
from ggufmill.pipeline.writing import sequential as module
from ggufmill.recipes import FOLDER
from ggufmill.runtime import load_model
from ggufmill.runtime.backends.torch import two_streams

pytestmark = pytest.mark.oracle

DEMO, TEXT = FOLDER / "demo", FOLDER / "demo/calibration.txt"
N_CTX, CHUNKS = 96, 8


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(module, "N_CTX", N_CTX)
    monkeypatch.setattr(two_streams, "GROUP_TOKENS", 2 * N_CTX)


@pytest.fixture(scope="module")
def moments(tmp_path_factory):
    """(importance matrix, covariance)."""
    folder = tmp_path_factory.mktemp("moments")
    files = folder / "a.imatrix", folder / "a.cov"
    run = {"n_ctx": N_CTX, "chunks": CHUNKS, "covariance_experts": True, "progress": False}
    compute_imatrix(DEMO, TEXT, files[0], covariance=files[1], **run)
    return files


def quantize(moments, out, **options):
    given = {"sequential": TEXT, "sequential_chunks": CHUNKS, "threads": 2, "effort": 0} | options
    return quantize_model(
        DEMO, out, custom_q=r"^blk\.0.*=iq2_k,^blk\.1.*ffn=q2_k_r4,^blk\.1.*attn=q4_0,^output=q3_K", imatrix=moments[0],
        covariance=moments[1], **given,
    )  # fmt: skip


@pytest.fixture(scope="module")
def written(moments, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "N_CTX", N_CTX)
        patch.setattr(two_streams, "GROUP_TOKENS", 2 * N_CTX)
        out = tmp_path_factory.mktemp("written") / "a.gguf"
        quantize(moments, out, threads=1, verify=True)
    return out


@pytest.mark.process
def test_the_workers_of_a_cluster_write_the_same_bytes(moments, written, cluster, tmp_path, monkeypatch):
    """Also of a job that was ended once; nothing is left beside the file."""
    out, original, calls = tmp_path / "a.gguf", Journal.add, []

    def killed(self, tensor, checksum):
        calls.append(tensor)
        original(self, tensor, checksum)
        if len(calls) == 30:
            raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "add", killed)
    with pytest.raises(KeyboardInterrupt):
        quantize(moments, out, threads=None, cluster=cluster)
    assert not out.exists()
    result = quantize(moments, out, threads=None, cluster=cluster, resume=True)
    assert result.resumed == 30
    assert len(result.shares) == 2
    assert out.read_bytes() == written.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["a.gguf"]


def test_sums_in_files(moments, written, tmp_path, monkeypatch):
    """Without memory for those of an input; experts are then encoded one at a time."""
    folders, original = [], two_streams._allocated
    monkeypatch.setattr(two_streams, "_allocated", lambda *given: folders.append(given[2]) or original(*given))
    quantize(moments, tmp_path / "a.gguf", memory=1 << 20)
    assert set(folders) == {None, tmp_path}
    assert (tmp_path / "a.gguf").read_bytes() == written.read_bytes()


def test_what_comes_out_is_nearer_to_the_model(moments, written, tmp_path):
    """On text that was not read."""
    out = tmp_path / "plain.gguf"
    quantize(moments, out, sequential=None, sequential_chunks=None)
    plain, followed = open_gguf(out), open_gguf(written)
    different = {name for name, tensor in plain.tensors.items() if not np.array_equal(tensor.data, followed.tensors[name].data)}
    assert {"blk.0.ffn_down.weight", "blk.1.ffn_gate_exps.weight", "output.weight"} <= different
    assert all(plain.tensors[name].type == tensor.type for name, tensor in followed.tensors.items())
    assert followed.metadata["quantize.covariance.sequential"] == "calibration.txt"
    base = load_model(DEMO, threads=1, exact=True)
    text = (DEMO / "heldout.txt").read_text("utf-8")[:9000]
    windows = np.array(base.tokenizer.encode(text)[: 6 * 256], np.int64).reshape(6, 256)
    expected = np.concatenate(base.hidden_of_windows(windows))
    errors = []
    for path in (out, written):
        found = load_model(path, threads=1, exact=True).hidden_of_windows(windows)
        errors.append(float(np.square(np.concatenate(found) - expected).sum()))
    assert errors[1] < 0.97 * errors[0]


def test_too_little_text_changes_nothing(moments, tmp_path):
    """A window has fewer tokens in either half than half the columns: weights and covariances stay the collected ones."""
    paths = tmp_path / "a.gguf", tmp_path / "b.gguf"
    quantize(moments, paths[0], sequential=None, sequential_chunks=None)
    quantize(moments, paths[1], sequential_chunks=1)
    plain, followed = map(open_gguf, paths)
    assert all(np.array_equal(tensor.data, followed.tensors[name].data) for name, tensor in plain.tensors.items())


def test_the_same_bytes_however_often_it_is_killed(moments, written, tmp_path, monkeypatch):
    out, original, calls = tmp_path / "a.gguf", Journal.add, []

    def killed(self, tensor, checksum):
        calls.append(tensor)
        original(self, tensor, checksum)
        if len(calls) in (20, 30, 31, 60):
            raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "add", killed)
    for attempt in range(6):
        try:
            result = quantize(moments, out, threads=3, resume=attempt > 0)
            break
        except KeyboardInterrupt:
            assert not out.exists()
    assert attempt > 2
    assert 0 < result.resumed < len(result.plan.outputs)
    assert out.read_bytes() == written.read_bytes()


def test_values_in_files(moments, written, tmp_path, monkeypatch):
    folders, original = [], two_streams._allocated
    monkeypatch.setattr(module, "free_bytes", lambda: 1 << 20)
    monkeypatch.setattr(two_streams, "_allocated", lambda *given: folders.append(given[2]) or original(*given))
    quantize(moments, tmp_path / "a.gguf")
    assert set(folders) == {tmp_path, None}  # of values, and of sums
    assert (tmp_path / "a.gguf").read_bytes() == written.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["a.gguf"]


def test_a_dry_run_has_the_time_and_memory_of_streams(moments, tmp_path):
    forecasts = [quantize(moments, tmp_path / "a.gguf", dry_run=True, no_timing=each).forecast for each in (False, True)]
    timed, untimed = forecasts
    assert {"torch", "streams"} < set(timed.seconds)
    assert timed.seconds["start"] >= start_seconds([load_model(DEMO)]) / timed.threads  # it loads models, too
    assert untimed.seconds is None
    assert timed.memory == untimed.memory > TORCH_BYTES


def test_dry_run_says_what_it_takes(moments, tmp_path, caplog):
    caplog.set_level("INFO", "ggufmill")
    quantize(moments, tmp_path / "a.gguf", dry_run=True)
    said = caplog.text
    assert f"8 windows of {N_CTX} tokens; both streams of activations take " in said
    assert re.search(
        r"the moments of an input up to \d+\.\d+ MiB of memory, streams and sums about [\d.]+ s beside encoding", said
    )
    assert not list(tmp_path.iterdir())


class TestTheHighestEffort:
    """4 is what 3 does, in the order of the model."""

    def test_the_same_bytes_as_by_hand(self, moments, tmp_path):
        common = {"imatrix": moments[0], "covariance": moments[1], "sequential_chunks": 2, "threads": 2}
        paths = tmp_path / "a.gguf", tmp_path / "b.gguf"
        quantize_model(DEMO, paths[0], custom_q="blk.0.*ffn=q4_0", effort=3, sequential="bundled", **common)
        quantize_model(DEMO, paths[1], custom_q="blk.0.*ffn=q4_0", effort=4, **common)
        assert paths[0].read_bytes() == paths[1].read_bytes()
        assert open_gguf(paths[1]).metadata["quantize.covariance.sequential"] == "bundled.jsonl"

    def test_its_text_is_that_of_the_importance_matrix(self, moments, tmp_path):
        recipe = tmp_path / "r.toml"
        (tmp_path / "t.txt").write_text("text " * 900)
        recipe.write_text('[imatrix]\ntext = ["t.txt:2", "bundled"]\nctx = 48\nchunks = 20\n[quantize]\ntype = "q4_0"\n')
        given = QuantizeRequest(DEMO, tmp_path / "a.gguf", recipe=recipe, curvature="a.curv", effort=4)
        request = Quantization(given).request
        assert (request.sequential, request.sequential_chunks) == (tmp_path / "t.txt", 10)
        assert Quantization(replace(given, sequential=TEXT)).request.sequential == TEXT
        assert Quantization(replace(given, effort=3)).request.sequential is None

    def test_without_torch(self, moments, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "torch", None)
        with pytest.raises(MillError, match="--effort 4 needs torch"):
            quantize_model(DEMO, tmp_path / "a.gguf", "q4_0", covariance=moments[1], effort=4)
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"cluster": "local:1", "cluster_output": "collect"}, UsageError, "--sequential on a cluster .* shared"),
        ({"effort": 4, "sequential": None, "only_shards": "1"}, UsageError, "--effort 4 encodes .*: leave out --only-shards"),
        ({"only_shards": "1", "split_max_tensors": 8}, UsageError, "leave out --only-shards"),
        ({"sequential": "nothing.txt"}, MillError, "nothing.txt"),
        ({"sequential": None}, UsageError, "--sequential-chunks does nothing without --sequential"),
        ({"covariance": None}, UsageError, "--sequential does nothing without --covariance or --curvature"),
    ],
    ids=str,
)
def test_what_is_refused(moments, tmp_path, options, error, message):
    arguments = {"imatrix": moments[0], "covariance": moments[1], "sequential": TEXT, "sequential_chunks": 2} | options
    with pytest.raises(error, match=message):
        quantize_model(DEMO, tmp_path / "a.gguf", "q4_0", **arguments)
    assert not list(tmp_path.iterdir())


def test_in_a_recipe(moments, tmp_path):
    """Beside a model that the recipe names; it verifies what it wrote."""
    recipe, direct = tmp_path / "r.toml", tmp_path / "direct.gguf"
    keys = 'type = "q4_0"\ncovariance = "{}"\nsequential = "{}"\nsequential_chunks = 4\neffort = 0\n'
    model = f'[source]\nmodel = "{DEMO}"\n'
    recipe.write_text(model + "[quantize]\n" + keys.format(moments[1], TEXT))
    run_recipe(recipe, tmp_path / "out", progress=False)
    quantize_model(DEMO, direct, "q4_0", covariance=moments[1], sequential=TEXT, sequential_chunks=4, effort=0)
    made, expected = open_gguf(next((tmp_path / "out").glob("*.gguf"))), open_gguf(direct)
    for name, tensor in expected.tensors.items():
        assert np.array_equal(made.tensors[name].data, tensor.data), name
    recipe.write_text(model + '[quantize]\ntype = "q4_0"\nsequential = "a.txt"\n')
    with pytest.raises(MillError, match="sequential needs covariance or curvature"):
        run_recipe(recipe, tmp_path / "other", progress=False)
