"""Memory of whole jobs, which is what --dry-run says: peaks of processes of their own, looked at while they run."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ggufmill.formats import TYPES
from ggufmill.imatrix.covariance.files import Origin
from ggufmill.imatrix.covariance.writer import CovarianceWriter, PlannedInput
from ggufmill.jobs.execute import execute
from ggufmill.jobs.outputs import Output
from ggufmill.jobs.plan import make_plan
from ggufmill.operating_system.process import low_priority
from ggufmill.quantize.covariance.matrix.triangles import FoldedCovariance, triangle_size
from ggufmill.recipes import FOLDER
from ggufmill.runtime.evaluate import compare

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc"),
]
COLUMNS, ROWS = 5120, 256
NAME = "blk.0.ffn_down.weight"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model of one matrix, and the covariance of its inputs."""
    folder, rng = tmp_path_factory.mktemp("memory"), np.random.default_rng(0)
    x = (rng.standard_normal((ROWS, COLUMNS)) * 0.02).astype(np.float32)
    keys = {"block_count": 1, "embedding_length": COLUMNS, "attention.head_count": 1, "feed_forward_length": COLUMNS}
    metadata = {"general.architecture": "llama"} | {f"llama.{key}": value for key, value in keys.items()}
    output = Output(NAME, (COLUMNS, ROWS), "f32", TYPES["f32"], "test", lambda start, stop: x[start:stop].view(np.uint8))
    execute(make_plan([output], metadata, folder / "m.gguf"), threads=1)
    writer = CovarianceWriter(folder / "m.cov", [PlannedInput((NAME,), COLUMNS, 1)], Origin("llama", "", ("a",), 20, 512))
    writer.begin()
    triangle = rng.integers(-300, 300, triangle_size(COLUMNS)).astype(np.int16)
    mean_squares = (rng.chisquare(2, COLUMNS) + 0.1).astype(np.float32)
    writer.write(NAME, 0, FoldedCovariance(triangle, mean_squares, 10240))
    writer.finish()
    return folder


def peak(*arguments):
    """The most memory that a job took, bytes: what is no file's (RssAnon, RssShmem)."""
    command, most = low_priority([sys.executable, "-m", "ggufmill", *map(str, arguments)]), 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as job:
        while job.poll() is None:
            status = Path(f"/proc/{job.pid}/status")
            kibibytes = re.findall(r"Rss(?:Anon|Shmem):\s+(\d+)", status.read_text("utf-8")) if status.exists() else []
            most = max(most, sum(map(int, kibibytes)) << 10)
            time.sleep(0.002)  # the most is there for some hundredths of a second
    assert job.returncode == 0
    return most


@pytest.fixture
def said(mill):
    """said(verb, ...): bytes of memory that --dry-run says."""

    def dry_run(*arguments):
        code, out, err = mill(*arguments, "--dry-run", "--json")
        assert code == 0, err
        return json.loads(out)["memory"]["peak"]

    return dry_run


@pytest.fixture
def said_and_taken(said):
    """What --dry-run says, and the most that the job took."""
    return lambda *arguments: (said(*arguments), peak(*arguments))


@pytest.mark.parametrize(("kind", "numbers"), [("iq3_k", 6), ("iq2_xxs", 8)])
def test_quantising_with_a_covariance(files, said_and_taken, kind, numbers):
    """H takes 4 bytes a number, its factors and a feedback matrix 2 each; nothing else of that size is there."""
    job = ("quantize", files / "m.gguf", files / f"{kind}.gguf", kind, "--pure", "--covariance", files / "m.cov", "-t", 2)
    said, taken = said_and_taken(*job)
    square = COLUMNS * COLUMNS
    assert numbers * square < taken < numbers * square + (180 << 20)
    assert 0.85 * taken < said < 1.15 * taken + (110 << 20)  # that two threads take for chunks, which this model does not fill


def test_merging_and_showing_covariances(files):
    """Of triangles no more than a block is in memory beside their files, and few rows as float32."""
    assert peak("imatrix", "show", files / "m.cov") < 95 << 20
    merged = ("imatrix", "merge", files / "m.cov", files / "m.cov", "-o", files / "both.cov")
    assert peak(*merged) < 165 << 20
    assert peak(*merged, "--force", "--memory", "100M") < 105 << 20


def test_converting_a_large_vocabulary(said_and_taken, tmp_path, monkeypatch):
    """Comparing a vocabulary with its tokenizer.json takes more than writing it, and nothing of that stays."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    from slices import write_slice

    small = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "num_experts": 8}
    write_slice(
        tmp_path / "m",
        "Qwen3-235B-A22B",
        changes=small | {"moe_intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 131072},
    )
    said, taken = said_and_taken("convert", tmp_path / "m", tmp_path / "a.gguf", "--outtype", "q8_0", "-t", 2)
    assert 0.85 * taken < said < 1.15 * taken
    assert taken < 400 << 20


DEMO, HELDOUT = FOLDER / "demo", ("-f", FOLDER / "demo" / "heldout.txt", "--chunks", 4, "-t", 2)
READING = {
    "one model": ("perplexity", DEMO),
    "a noise floor": ("perplexity", DEMO, "--kl-divergence", DEMO, "--noise-floor"),
    "many models and a noise floor": ("evaluate", "--against", DEMO, "--stock", "q8_0", "-o", "out"),
}


@pytest.mark.parametrize("job", READING)
def test_reading(said_and_taken, job, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said, taken = said_and_taken(*READING[job], *HELDOUT)
    assert 0.85 * taken < said < 1.15 * taken


@pytest.mark.parametrize("moments", ["", "--covariance", "--curvature"])
def test_collecting(said_and_taken, moments, tmp_path):
    if moments == "--curvature":
        pytest.importorskip("torch")
    text, more = DEMO / "calibration.txt", (moments, tmp_path / "a.cov") if moments else ()
    said, taken = said_and_taken("imatrix", "-m", DEMO, "-f", text, "--chunks", 4, "-o", tmp_path / "a.imatrix", "-t", 2, *more)
    assert 0.85 * taken < said < 1.15 * taken


READ = ("-f", FOLDER / "demo" / "heldout.txt", "--chunks", 16, "-b", 8192)


@pytest.mark.parametrize(("verb", "bound"), [("perplexity", 175), ("evaluate", 200)])
def test_fewer_windows_run_together_in_less_memory(said, verb, bound, tmp_path):
    judged = ("--against", DEMO, "--stock", "q8_0", "--no-noise-floor", "--no-plot", "-o", tmp_path / "out")
    job = (verb, *((DEMO,) if verb == "perplexity" else judged), *READ, "-t", 2)
    bounded = (*job, "--memory", f"{bound}M")
    assert said(*bounded) <= bound << 20 < said(*job, "--memory", "4G")
    assert peak(*bounded) < 1.15 * said(*bounded)


def test_fewer_threads_compare_weights_in_less_memory(said, monkeypatch):
    """Of tensors that are divided into many parts of the largest size."""
    monkeypatch.setattr(compare, "ROWS_BYTES", 1 << 14)
    monkeypatch.setattr(compare, "_WEIGHT_BYTES", compare.THREAD_BYTES)
    less, more = (said("compare", DEMO, DEMO, "-t", 16, "--memory", memory) for memory in ("300M", "4G"))
    assert less < 300 << 20 < more
