"""What `run` does about damaged, missing and foreign files, interruptions, and a second run in its folder."""

import errno
import json
import os
import signal
import time
from contextlib import nullcontext

import pytest

from ggufmill import run_recipe
from ggufmill.formats import MillError, open_gguf
from ggufmill.recipes import FOLDER

SHORT = """
[source]
model = "{demo}"
[quantize]
type = "q8_0"
rules = "exps=q4_0"
"""
IMATRIX = """
[imatrix]
text = "{demo}/calibration.txt"
ctx = 64
chunks = 2
"""


@pytest.fixture
def short(tmp_path):
    """A recipe that quantises only, or with the tables given besides."""

    def write(more="", **changes):
        text = SHORT + more
        for old, new in changes.items():
            assert old in text
            text = text.replace(old, new)
        (tmp_path / "short.toml").write_text(text.replace("{demo}", str(FOLDER / "demo")))
        return tmp_path / "short.toml"

    return write


@pytest.mark.slow
def test_the_imatrix_of_the_run_serves_types_that_need_one(short, tmp_path, mill):
    hard = {"exps=q4_0": "attn_q_a.weight=iq2_xxs"}
    out = tmp_path / "out"
    for table in ("", "[imatrix]\n"):
        code, _, err = mill("run", short(table, **hard), "-o", out)
        assert code == 1
        assert "needs importance data" in err
    planned = json.loads(mill("run", short(IMATRIX, **hard), "-o", out, "--dry-run", "--json")[1])
    assert {"iq2_xxs", "q8_0"} <= planned["types"].keys()
    assert not out.exists()
    code, text, err = mill("run", short(IMATRIX, **hard), "-o", out, "--json")
    assert code == 0, err
    assert json.loads(text)["imatrix"] == str(out / "short.imatrix")
    assert (out / "short.gguf").stat().st_size == planned["file_bytes"]
    result = open_gguf(out / "short.gguf")
    assert result.tensors["blk.2.attn_q_a.weight"].type.name == "iq2_xxs"

    given = short(f"[imatrix]\nfile = '{out / 'short.imatrix'}'\n", **hard)
    code, text, err = mill("run", given, "-o", tmp_path / "again", "--json")
    assert code == 0, err
    assert json.loads(text)["imatrix"] == str(out / "short.imatrix")
    again = open_gguf(tmp_path / "again/short.gguf")
    assert all((t.data == result.tensors[n].data).all() for n, t in again.tensors.items())


@pytest.mark.slow
def test_a_damaged_output_is_written_again(short, tmp_path, mill):
    recipe, file = short(), tmp_path / "out/short.gguf"
    assert mill("run", recipe, "-o", tmp_path / "out")[0] == 0
    whole = file.read_bytes()

    os.utime(file, ns=(1, 1))
    code, _, err = mill("run", recipe, "-o", tmp_path / "out")
    assert code == 0
    assert "done before" in err
    state = json.loads((tmp_path / "out/state.json").read_text())
    assert state["quantize"]["files"][0]["mtime_ns"] == 1  # not read again next time

    flipped = bytearray(whole)
    flipped[-100] ^= 1
    for damaged, said in ((whole[:-5000], "bytes, not the"), (bytes(flipped), "has changed since"), (None, "is gone")):
        file.write_bytes(damaged) if damaged is not None else file.unlink()
        code, _, err = mill("run", recipe, "-o", tmp_path / "out")
        assert code == 0
        assert said in err
        assert "done before" not in err
        assert file.read_bytes() == whole


@pytest.mark.slow
@pytest.mark.parametrize("junk", [b"junk", b"[]", b"\xff\xfe", b'{"quantize": 5}', b'{"quantize": {"key": 1}}', b"[" * 9999])
def test_a_damaged_state_is_ignored(short, tmp_path, mill, junk):
    assert mill("run", short(), "-o", tmp_path / "out")[0] == 0
    (tmp_path / "out/state.json").write_bytes(junk)
    code, _, err = mill("run", short(), "-o", tmp_path / "out")
    assert code == 1
    assert "state.json is damaged" in err
    assert "short.gguf exists; use --force" in err.splitlines()[-1]
    code, _, err = mill("run", short(), "-o", tmp_path / "out", "--force")
    assert code == 0
    assert "done before, nothing" in mill("run", short(), "-o", tmp_path / "out")[2]


def test_the_imatrix_is_computed_again_for_other_tokens(short, tmp_path, mill):
    (tmp_path / "a.txt").write_text("some words of a text " * 40)
    named = {"{demo}/calibration.txt": "a.txt", "chunks = 2": "chunks = 1"}

    def again(**changes):
        code, _, err = mill("run", short(IMATRIX, **named, **changes), "-o", tmp_path / "out")
        assert code == 0, err
        return "imatrix: done before" not in err

    assert again()
    assert not again()
    assert not again(**{"exps=q4_0": "exps=q5_0"})
    assert again(**{"ctx = 64": "ctx = 65"})
    assert again(**{"[quantize]": "[convert]\nmla_layout = 'mainline'\n[quantize]"})
    (tmp_path / "a.txt").write_text("other words of a text " * 40)
    assert again()
    (tmp_path / "a.txt").rename(tmp_path / "b.txt")  # the name is in the file
    named["{demo}/calibration.txt"] = "b.txt"
    assert again()


def test_an_interrupted_run_offers_the_same_command(short, tmp_path, mill, monkeypatch, python_handlers):
    def interrupted(*_, **__):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    for options, offer in (((), "the same command"), (("--force",), "the same command without --force")):
        with monkeypatch.context() as patch:
            patch.setattr("ggufmill.pipeline.writing.carry_out.execute", interrupted)
            code, _, err = mill("run", short(), "-o", tmp_path / "out", *options)
        assert code == 128 + signal.SIGTERM
        assert err.splitlines()[-1] == f"ggufmill: interrupted; what was finished is kept, {offer} continues it"
    assert mill("run", short(), "-o", tmp_path / "out")[0] == 0


def test_an_interrupted_importance_matrix_is_resumed(short, tmp_path, monkeypatch):
    """From the last state, to the same bytes; one of another job counts as absent."""
    monkeypatch.setattr("ggufmill.pipeline.collecting.collection.OUTPUT_FREQUENCY", 1)
    recipe, counts = short(IMATRIX, **{"chunks = 2": "chunks = 4"}), []

    def made(out, stop=None):
        def watch(progress):
            if progress.stage == "imatrix":
                counts.append(progress.done)
                if progress.done == stop:
                    raise KeyboardInterrupt

        counts.clear()
        with pytest.raises(KeyboardInterrupt) if stop is not None else nullcontext():
            run_recipe(recipe, out, progress=watch)
        return out / "short.imatrix"

    whole = made(tmp_path / "whole").read_bytes()
    cut = made(tmp_path / "cut", stop=3)
    assert not cut.exists()
    assert cut.with_name("short.imatrix.state").exists()
    assert made(tmp_path / "cut").read_bytes() == whole
    assert min(count for count in counts if count) > 1
    assert not cut.with_name("short.imatrix.state").exists()
    made(tmp_path / "other", stop=3)
    short(IMATRIX.replace("ctx = 64", "ctx = 32"))
    assert made(tmp_path / "other").exists()
    assert 1 in counts


def test_one_run_at_a_time_in_a_folder(short, tmp_path, mill, monkeypatch):
    out, seen = tmp_path / "new" / "out", []

    def second(*_, **__):
        if not seen:
            seen.append(mill("run", short(), "-o", out, "--force"))
        raise MillError("the end")

    with monkeypatch.context() as patch:
        patch.setattr("ggufmill.pipeline.writing.carry_out.execute", second)
        assert mill("run", short(), "-o", out)[0] == 1
    code, _, err = seen[0]
    assert code == 1
    assert err.endswith(f"ggufmill: another run works in {out}; wait for its end, or give another folder (-o)\n")
    assert mill("run", short(), "-o", out)[0] == 0


def test_a_refused_run_leaves_no_folders(short, tmp_path, mill):
    assert mill("run", short(**{"exps=q4_0": "exps=iq2_xxs"}), "-o", tmp_path / "new" / "out")[0] == 1
    assert not (tmp_path / "new").exists()


def test_a_full_disk_is_named_and_nothing_is_left(short, tmp_path, mill, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    code, _, err = mill("run", short(), "-o", tmp_path / "out")
    assert code == 1
    assert err.splitlines()[-1] == f"ggufmill: {tmp_path}/out/state.json cannot be written: No space left on device"
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_run_never_overwrites_its_inputs(short, tmp_path, mill):
    out = tmp_path / "out"
    out.mkdir()
    words = "words of a text " * 100
    for name in (
        "short.imatrix",
        "report.md",
        "report.json",
        "report.html",
        "README.md",
        "state.json",
        "short.gguf",
        "short.gguf.part",
    ):
        (out / name).write_text(words)
        code, _, err = mill("run", short(IMATRIX, **{"{demo}/calibration.txt": f"out/{name}"}), "-o", out, "--force")
        assert code == 1
        assert f"{name} is an input of this job" in err
        assert (out / name).read_text() == words
        (out / name).unlink()


def test_a_damaged_checkpoint(tiny_llama, write_checkpoint, short, tmp_path, mill):
    config, tensors = tiny_llama(intermediate_size=64)
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = float("nan")
    write_checkpoint(tmp_path / "model", config, tensors)
    recipe = short(**{"{demo}": "model"})
    code, _, err = mill("run", recipe, "-o", tmp_path / "out")
    assert code == 1
    assert "--allow-nonfinite writes 0 instead" in err
    assert "the same command continues it" in err
    assert "--resume" not in err
    code, _, err = mill("run", recipe, "-o", tmp_path / "out", "--allow-nonfinite")
    assert code == 0
    assert "blk.0.ffn_up.weight: 1 weights were not finite and are written as 0" in err
