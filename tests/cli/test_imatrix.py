"""imatrix as a user calls it: computing, interrupting, showing, merging, converting, and quantising with the result."""

import io
import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from commands import exit_code

from ggufmill.errors import MillError
from ggufmill.formats.gguf_header import header_bytes
from ggufmill.imatrix import Imatrix, load
from ggufmill.jobs.lock import output_lock
from ggufmill.operating_system.process import low_priority
from ggufmill.recipes import FOLDER

DEMO, TEXT = FOLDER / "demo", FOLDER / "demo/calibration.txt"
SHORT = ("-c", 128, "-b", 256, "-t", 1)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """One of a run over twelve windows."""
    out = tmp_path_factory.mktemp("imatrix") / "demo.imatrix"
    assert exit_code("imatrix", DEMO, "-f", TEXT, "-o", out, "--chunks", 12, "--process-output", *SHORT) == 0
    return out


def test_computing_reports_coverage(mill, tmp_path):
    pytest.importorskip("matplotlib")
    out, plot = tmp_path / "a.dat", tmp_path / "a.png"
    options = ("--chunks", 1, "--process-embedding", "--plot", plot, "-c", 16, "-t", 1)
    code, text, err = mill("imatrix", DEMO, "-f", TEXT, "-o", out, *options)
    assert code == 0
    assert "without data" in text
    assert "perplexity" in text
    assert "fewer than 32: quantisation fills them up with the mean" in err
    assert "embeddings and output matrix are usually without data; to collect it: --process-output for output" in err
    assert "warning: without data" not in err
    assert "a.dat does not keep how many tokens each expert" in err
    assert plot.read_bytes()[:4] == b"\x89PNG"
    code, text, _ = mill("imatrix", DEMO, "-f", TEXT, "-o", out, *options, "--force", "--json")
    result = json.loads(text)
    assert {"entries", "chunks", "perplexity", "coverage", "starved_experts", "sparse_experts", "remarks"} <= result.keys()
    row = result["coverage"][1]
    assert (row["layer"], row["experts"], len(row["tokens"])) == (1, 8, 8)
    assert sum(row["tokens"]) == 16 * 2
    assert not list(tmp_path.glob("*.state"))


@pytest.mark.process
def test_killed_and_resumed_gives_the_same_bytes(mill, made, tmp_path):
    """SIGKILL once there is something to resume."""
    out, state = tmp_path / "demo.imatrix", tmp_path / "demo.imatrix.state"
    job = ["imatrix", DEMO, "-f", TEXT, "-o", out, "--chunks", 12, "--process-output", *SHORT, "--output-frequency", 1]
    command = low_priority([sys.executable, "-m", "ggufmill", *map(str, job)])
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while process.poll() is None and not state.exists():
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert state.exists(), "it was done before it could be killed"
    assert not out.exists()
    code, _, err = mill(*job)
    assert code == 1
    assert "is left from an interrupted run; --resume continues it" in err
    assert mill(*job, "--resume")[0] == 0
    assert out.read_bytes() == made.read_bytes()
    assert not state.exists()
    code, printed, _ = mill(*job, "--resume")
    assert code == 0
    assert "finished already" in printed
    assert json.loads(mill(*job, "--resume", "--json")[1])["finished_before"] is True
    job[job.index("--chunks") + 1] = 11
    code, _, err = mill(*job, "--resume")
    assert code == 1
    assert "is of other texts or windows, and nothing can be resumed" in err
    assert out.read_bytes() == made.read_bytes()


@pytest.mark.process
@pytest.mark.parametrize(("argument", "name"), [("-", "standard input"), ("-:3", "standard input"), ("fifo:3", "pipe")])
def test_a_text_of_a_pipe_is_named_alike_in_every_run(mill, tmp_path, monkeypatch, argument, name):
    """The same bytes as from a file of that name; what is interrupted is known by its tokens, what is finished is not."""
    data, windows = TEXT.read_bytes()[:4000], ("--chunks", 2, *SHORT)
    (tmp_path / name).write_bytes(data)
    weight = argument[-2:] if ":" in argument else ""
    assert mill("imatrix", DEMO, "-f", f"{tmp_path / name}{weight}", "-o", tmp_path / "file.imatrix", *windows)[0] == 0
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), "utf-8"))
    if name == "pipe":
        os.mkfifo("fifo")
        Thread(target=Path("fifo").write_bytes, args=(data,)).start()
    assert mill("imatrix", DEMO, "-f", argument, "-o", "pipe.imatrix", *windows)[0] == 0
    assert load(tmp_path / "pipe.imatrix").datasets == [name]
    assert Path("pipe.imatrix").read_bytes() == Path("file.imatrix").read_bytes()
    code, _, err = mill("imatrix", DEMO, "-f", f"{tmp_path / name}{weight}", "-o", "pipe.imatrix", *windows, "--resume")
    assert code == 1
    assert f"whether it is of what {name} holds now is not known; use --force" in err


def test_two_jobs_do_not_write_one_imatrix(mill, tmp_path):
    out = tmp_path / "demo.imatrix"
    with output_lock(out):
        code, _, err = mill("imatrix", DEMO, "-f", TEXT, "-o", out, "--chunks", 2, *SHORT)
    assert code == 1
    assert "another job is writing" in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("covariance", [False, True])
def test_the_output_is_locked_until_the_last_save(mill, tmp_path, monkeypatch, covariance):
    from ggufmill.imatrix.covariance.job import CovarianceJob

    out, tried = tmp_path / "demo.imatrix", []

    def with_another_job(save):
        def wrapped(*arguments):
            with pytest.raises(MillError, match="another job is writing"), output_lock(out):
                pass
            tried.append(save.__name__)
            return save(*arguments)

        return wrapped

    for owner, name in ((Imatrix, "save"), (CovarianceJob, "finish")):
        monkeypatch.setattr(owner, name, with_another_job(getattr(owner, name)))
    more = ("--covariance", tmp_path / "demo.cov") if covariance else ()
    assert mill("imatrix", DEMO, "-f", TEXT, "-o", out, "--chunks", 1, *SHORT, *more)[0] == 0
    assert tried == ["save", "finish"][: 1 + covariance]
    assert not out.with_name("demo.imatrix.lock").exists()


def test_a_full_disk_at_a_save_does_not_end_the_job(mill, tmp_path, monkeypatch):
    from ggufmill.imatrix.collect_state import CollectState

    def full(state, path):
        raise MillError(f"{path} cannot be written: No space left on device")

    monkeypatch.setattr(CollectState, "save", full)
    out = tmp_path / "demo.imatrix"
    code, _, err = mill("imatrix", DEMO, "-f", TEXT, "-o", out, "--chunks", 2, *SHORT, "--output-frequency", 1)
    assert code == 0
    assert "No space left on device; the work continues, but there is less to resume from" in err
    assert [path.name for path in tmp_path.iterdir()] == ["demo.imatrix"]


def test_an_interrupted_collection_says_how_to_continue(mill, tmp_path, monkeypatch):
    from ggufmill.imatrix.collect_state import CollectState

    save = CollectState.save

    def save_and_stop(self, path):
        save(self, path)
        raise KeyboardInterrupt

    monkeypatch.setattr(CollectState, "save", save_and_stop)
    code, _, err = mill("imatrix", DEMO, "-f", TEXT, "-o", tmp_path / "a", "--chunks", 9, *SHORT, "-ofreq", 2)
    assert code == 130
    assert err.splitlines()[-1].endswith("the same command with --resume continues")
    assert "interrupted; 3 windows are kept in " in err


def test_parts_and_snapshots(mill, made, tmp_path):
    job = ("imatrix", DEMO, "-f", TEXT, "--process-output", *SHORT)
    assert mill(*job, "-o", tmp_path / "a.imatrix", "--chunks", 5, "--save-frequency", 2)[0] == 0
    assert load(tmp_path / "a.at_3.imatrix").chunk_count == 3
    first = ("--in-file", tmp_path / "a.imatrix")
    assert mill(*job, "-o", tmp_path / "b.imatrix", "--from-chunk", 5, "--chunks", 7, *first)[0] == 0
    assert mill(*job, "-o", tmp_path / "c.imatrix", "--from-chunk", 5, "--chunks", 7)[0] == 0
    assert mill("imatrix", *first, "--in-file", tmp_path / "c.imatrix", "-o", tmp_path / "d.imatrix")[0] == 0
    assert (tmp_path / "b.imatrix").read_bytes() == (tmp_path / "d.imatrix").read_bytes()
    whole, joined = load(made), load(tmp_path / "d.imatrix")
    assert joined.chunk_count == whole.chunk_count == 12
    code, text, _ = mill("imatrix", "show", made, tmp_path / "d.imatrix", "--json")
    result = json.loads(text)["comparison"]
    assert code == 0
    assert (result["only_first"], result["only_second"], result["unlike"]) == ([], [], [])
    assert min(d["cosine"] for d in result["differences"]) > 0.99999


def test_show(mill, made, tmp_path):
    pytest.importorskip("matplotlib")
    code, text, _ = mill("imatrix", "show", made, "--json", "--layer-similarity", "--plot", tmp_path / "a.png", "--top", 3)
    result = json.loads(text)
    assert code == 0
    entry = next(e for e in result["entries"] if e["name"] == "blk.1.ffn_up_exps.weight")
    sums, counts = load(made).entries["blk.1.ffn_up_exps.weight"]
    means = sums.sum(0, dtype=np.float64) / counts.sum()
    assert (entry["columns"], entry["matrices"], entry["fewest"]) == (256, 8, counts.min())
    assert entry["sum"] == pytest.approx(means.sum())
    assert entry["top"] == [[int(c), pytest.approx(means[c] / means.sum())] for c in np.argsort(-means)[:3]]
    shares = means / means.sum()
    assert entry["entropy"] == pytest.approx(-(shares * np.log2(shares)).sum())
    assert {s["layer"] for s in result["layer_similarity"]} == {1, 2, 3}
    assert all(0 <= s["cosine"] <= 1 for s in result["layer_similarity"])
    assert (tmp_path / "a.png").stat().st_size > 10_000
    code, text, _ = mill("imatrix", "show", made)
    assert "12 chunks of 128 tokens, text: calibration.txt" in text
    assert mill("imatrix", "show", made, made, "--plot", tmp_path / "b.png")[0] == 0


def test_converting_warns_of_what_the_format_loses(mill, made, tmp_path):
    code, _, err = mill("imatrix", "convert", made, tmp_path / "a.dat")
    assert code == 0
    assert "does not keep how many tokens each expert of 9 stacks saw" in err
    assert "does not keep the window of 128 tokens" in err
    code, _, err = mill("imatrix", "convert", tmp_path / "a.dat", tmp_path / "b.imatrix")
    assert code == 0
    assert "did not keep how many tokens each expert saw" in err
    a, b = load(made).means(), load(tmp_path / "b.imatrix").means()
    assert all(np.allclose(a[name].reshape(-1), b[name].reshape(-1), rtol=1e-6) for name in a)


def test_quantize_notes_the_coverage(mill, made, tmp_path):
    imatrix = load(made)
    imatrix.entries["blk.9.attn_q.weight"] = imatrix.entries.pop("blk.2.attn_output.weight")
    for layer in (1, 2):
        del imatrix.entries[f"blk.{layer}.attn_k_b.weight"]
        del imatrix.entries[f"blk.{layer}.ffn_gate_exps.weight"]
    sums, counts = (array.copy() for array in imatrix.entries["blk.3.ffn_down_exps.weight"])
    imatrix.entries["blk.3.ffn_down_exps.weight"] = sums, counts
    sums[5], counts[5] = 0, 0
    imatrix.save(tmp_path / "i.imatrix")
    code, _, err = mill("quantize", DEMO, tmp_path / "q.gguf", "iq4_k", "--imatrix", tmp_path / "i.imatrix", "--dry-run")
    assert code == 0
    assert "data for 47 of 51 weight tensors, 2 of them from a tensor with the same input" in err
    assert "none for attn_k_b (2 layers, 1 to 2), attn_output (layer 2)" in err
    assert "1 entries name no tensor of this model (first blk.9.attn_q.weight): not used" in err
    assert "1 of 24 experts saw no token, 0 fewer than 32 (the first: expert 5 of layer 3)" in err


def of(name, width=256, value=1.0, count=64):
    return {name: (np.full((1, width), value, np.float32), np.array([count]))}


BAD = {
    "of another model": (of("blk.0.ffn_up.weight", 512), "entry blk.0.ffn_up.weight is 1 x 512, the tensor needs 1 x 256"),
    "other names": (of("model.layers.0.mlp.up_proj"), "none of its 1 entries (model.layers.0.mlp.up_proj, ...) names a tensor"),
    "no counts": (of("blk.0.ffn_up.weight", count=0), "every count is zero"),
    "NaN": (of("blk.0.ffn_up.weight", value=np.nan), "entry blk.0.ffn_up.weight holds NaN, infinite or negative sums"),
    "negative": (of("blk.0.ffn_up.weight", value=-1), "entry blk.0.ffn_up.weight holds NaN, infinite or negative sums"),
    "negative count": (of("blk.0.ffn_up.weight", count=-3), "entry blk.0.ffn_up.weight holds negative counts"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_refused_before_any_work(mill, tmp_path, case):
    entries, message = BAD[case]
    Imatrix(entries, ["t"], 1).save(tmp_path / "bad.imatrix")
    for job in (
        ("quantize", DEMO, tmp_path / "out.gguf", "iq4_k", "--imatrix", tmp_path / "bad.imatrix"),
        ("imatrix", DEMO, "-f", TEXT, "-o", tmp_path / "out", "--in-file", tmp_path / "bad.imatrix"),
    ):
        code, _, err = mill(*job)
        assert code == 1
        assert message in err
        assert len(err.strip().splitlines()) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["bad.imatrix"]


def test_headers_with_impossible_values_end_in_one_line(mill, tmp_path):
    old, new, odd = tmp_path / "old.dat", tmp_path / "new.gguf", tmp_path / "odd.gguf"
    Imatrix(of("blk.0.ffn_up.weight"), ["t"], 3).save(old)
    data = old.read_bytes()
    old.write_bytes(data.replace(struct.pack("<ii", 3, 1) + b"t", struct.pack("<ii", -7, 1) + b"t"))
    code, _, err = mill("imatrix", "convert", old, new)
    assert (code, "chunk_count is -7; a file can hold 0 to" in err, new.exists()) == (1, True, False)
    for value in (np.arange(2, dtype=np.int32), ["imatrix", "covariance"], np.float32("nan")):
        odd.write_bytes(header_bytes({"general.type": value}, [], 32)[0])
        code, _, err = mill("imatrix", "show", odd)
        assert (code, "internal error" in err, "its general.type is" in err) == (1, False, True)


REFUSED = [
    (["-o", "x"], 2, "nothing to do"),
    (["-f", "TEXT", "-o", "x"], 2, "a text (-f) needs a MODEL"),
    (["MODEL", "-f", "nothing", "-o", "x"], 1, "-f nothing: there is no such file"),
    (["MODEL", "-f", "TEXT:0", "-o", "x"], 1, "the weight '0' is no whole number"),
    (["MODEL", "-f", "TEXT", "-o", "x", "--from-chunk", "100000"], 1, "--from-chunk 100000: the text has only"),
    (["MODEL", "-f", "TEXT", "-o", "x", "--in-file", "TEXT"], 1, "not an imatrix"),
    (["MODEL", "-f", "TEXT", "-o", "TEXT"], 1, "is an input of this job"),
    (["merge", "TEXT", "TEXT", "-o", "x"], 1, "not an imatrix"),
]


@pytest.mark.parametrize(("arguments", "code", "message"), REFUSED, ids=lambda v: " ".join(v) if isinstance(v, list) else "")
def test_refusals(mill, tmp_path, monkeypatch, arguments, code, message):
    monkeypatch.chdir(tmp_path)
    given = [a.replace("MODEL", str(DEMO)).replace("TEXT", str(TEXT)) for a in arguments]
    got, out, err = mill("imatrix", *given)
    assert (got, out) == (code, "")
    assert message in err
    assert not list(tmp_path.iterdir())


@pytest.fixture
def demo_text(mill, tmp_path):
    """mill imatrix demo -f self, few windows, and the paths of the matrix and of the text that it wrote."""

    def compute(*more, out="m.imatrix"):
        path = tmp_path / out
        arguments = "imatrix", FOLDER / "demo", "-f", "self", "-o", path, "-c", 32, "--chunks", 4, *more
        return mill(*arguments), path, tmp_path / f"{out}.self.jsonl"

    return compute


def test_the_model_writes_its_own_text(demo_text, tmp_path):
    (code, _, err), matrix, text = demo_text()
    assert code == 0, err
    assert load(matrix).datasets == ["m.imatrix.self.jsonl"]
    before, first = text.stat().st_mtime_ns, matrix.read_bytes()
    (code, _, err), matrix, _ = demo_text("--force")
    assert code == 0
    assert "written before" in err
    assert (text.stat().st_mtime_ns, matrix.read_bytes()) == (before, first)
    (code, _, _), _, other = demo_text("--text-seed", 1, out="n.imatrix")
    assert code == 0
    assert other.read_bytes() != text.read_bytes()


def test_what_stands_in_the_way_of_its_own_text(demo_text, mill, tmp_path):
    (code, _, err), _, text = demo_text("--dry-run")
    assert code == 0, err
    assert not text.exists()
    text.write_text("mine", "utf-8")
    (code, _, err), _, _ = demo_text()
    assert code == 1
    assert "remove it" in err
    arguments = "imatrix", FOLDER / "demo", "-f", FOLDER / "demo/heldout.txt", "-o", tmp_path / "x", "--text-seed", 1
    assert "--text-seed does nothing without -f self" in mill(*arguments)[2]
