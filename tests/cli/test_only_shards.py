"""quantize --only-shards: machines that share nothing divide a job."""

import json
import os
import shutil

import pytest

from ggufmill.formats.hashes import hash_file
from ggufmill.operating_system import files

SPLIT = ("--split-max-tensors", 4)


@pytest.fixture
def checkpoint(tiny_llama, write_checkpoint, tmp_path):
    return write_checkpoint(tmp_path / "model", *tiny_llama(hidden_size=64, intermediate_size=128))


@pytest.fixture
def whole(mill, checkpoint, tmp_path):
    """Folder of the files that one machine makes."""
    (tmp_path / "whole").mkdir()
    assert mill("quantize", checkpoint, tmp_path / "whole" / "q.gguf", "q4_0", *SPLIT, "--manifest")[0] == 0
    return tmp_path / "whole"


def parts_of(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.gguf"))}


def test_two_machines_make_the_files_of_one(mill, checkpoint, whole, tmp_path):
    count = len(parts_of(whole))
    assert count >= 4
    for number, chosen in enumerate((f"2,4-{count}", "1,3")):
        own = tmp_path / f"machine{number}"
        source = shutil.copytree(checkpoint, own / "model")  # same names and bytes, other folder and other times
        for path in source.iterdir():
            os.utime(path, ns=(number * 10**9, number * 10**9))
        arguments = ("quantize", source, own / "q.gguf", "q4_0", *SPLIT, "--only-shards", chosen)
        code, _, err = mill(*arguments, "--manifest", "--verify")
        assert (code, err) == (0, err)
        assert not list(own.glob("*.part"))
        assert mill(*arguments, "--resume")[0] == 0  # finished before
        assert "exists; use --force" in mill(*arguments)[2]
    joined = tmp_path / "joined"
    joined.mkdir()
    manifest = ""
    for path in sorted(tmp_path.glob("machine*/*")):
        if path.suffix == ".gguf":
            shutil.copy(path, joined)
        elif path.suffix == ".manifest":
            manifest += path.read_text()
    assert parts_of(joined) == parts_of(whole)
    first = joined / min(parts_of(joined))
    assert mill("hash", first, "--check", next(whole.glob("*.manifest")))[0] == 0
    (tmp_path / "all.manifest").write_text(manifest)
    assert mill("hash", first, "--check", tmp_path / "all.manifest")[0] == 0
    assert mill("merge", first, tmp_path / "joined.gguf")[0] == 0
    assert mill("quantize", checkpoint, tmp_path / "one.gguf", "q4_0")[0] == 0
    assert (tmp_path / "joined.gguf").read_bytes() == (tmp_path / "one.gguf").read_bytes()


def test_a_missing_and_a_foreign_file_are_named(mill, checkpoint, whole, tmp_path):
    names = list(parts_of(whole))
    (whole / names[2]).rename(tmp_path / names[2])
    manifest = next(whole.glob("*.manifest"))
    for command in (("merge", whole / names[0], tmp_path / "m.gguf"), ("hash", whole / names[0], "--check", manifest)):
        code, _, err = mill(*command)
        assert (code, "1 of" in err and names[2] in err) == (1, True)
    arguments = ("quantize", checkpoint, whole / "q.gguf", "q4_0", *SPLIT, "--only-shards", "3")
    for other in (("--custom-q", "ffn_down=q4_1"), ("--override-kv", "general.author=str:Other")):
        assert mill(*arguments, *other, "--force")[0] == 0
        for command in (("merge", whole / names[0], tmp_path / "m.gguf"), ("hash", whole / names[0], "--check", manifest)):
            code, _, err = mill(*command)
            assert (code, f"{names[2]} was written by another plan" in err) == (1, True)
    assert not (tmp_path / "m.gguf").exists()
    assert mill(*arguments, "--force")[0] == 0
    assert mill("hash", whole / names[0], "--check", manifest)[0] == 0


def test_an_interrupted_part_goes_on(mill, checkpoint, whole, tmp_path, monkeypatch):
    write, calls = files.write_at, []

    def failing(fd, data, offset):
        calls.append(offset)
        if len(calls) > 5:
            raise OSError(28, "No space left on device")
        return write(fd, data, offset)

    arguments = ("quantize", checkpoint, tmp_path / "q.gguf", "q4_0", *SPLIT, "--only-shards", "2-3")
    monkeypatch.setattr(files, "write_at", failing)  # one call for each tensor
    code, _, err = mill(*arguments, "-t", 1)
    assert (code, "5 of 8 tensors are kept; --resume continues" in err) == (1, True)
    assert "left from an unfinished job" in mill(*arguments)[2]
    monkeypatch.undo()
    code, _, err = mill(*arguments, "--resume")
    assert (code, "5 of 8 tensors were there" in err) == (0, True)
    made = parts_of(tmp_path)
    assert len(made) == 2
    assert made.items() <= parts_of(whole).items()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((*SPLIT, "--only-shards", "3-1"), "'3-1' is no list of files of a split; write for example 1,4,6-9"),
        ((*SPLIT, "--only-shards", "0"), "counted from 1"),
        ((*SPLIT, "--only-shards", "1,77"), "there is no file 77; the output is split into files 1 to"),
        (("--only-shards", "1"), "say how it is split"),
        ((*SPLIT, "--only-shards", "1", "--delete-source-shards"), "deletes what files outside of --only-shards"),
        ((*SPLIT, "--only-shards", "1", "--target-bpw", "4.5"), "ggufmill search"),
    ],
)
def test_refusals(mill, checkpoint, tmp_path, options, message):
    type = () if "--target-bpw" in options else ("q4_0",)
    before = set(tmp_path.iterdir())
    code, _, err = mill("quantize", checkpoint, tmp_path / "q.gguf", *type, *options)
    assert code in (1, 2)
    assert message in err
    assert len(err.strip().splitlines()) <= 3
    assert set(tmp_path.iterdir()) == before


def test_the_plan_of_a_part(mill, checkpoint, tmp_path):
    """--dry-run counts what this machine writes."""
    arguments = ("quantize", checkpoint, tmp_path / "q.gguf", "q4_0", *SPLIT, "--dry-run", "--no-timing", "--json")
    whole = json.loads(mill(*arguments)[1])
    part = json.loads(mill(*arguments, "--only-shards", "2")[1])
    assert part["files"] == whole["files"][1:2]
    assert part["tensors"] == [{**t, "file": 0} for t in whole["tensors"] if t["file"] == 1]
    assert part["disk"]["needed"] == whole["files"][1]["nbytes"]


def test_a_manifest_takes_no_second_reading(mill, checkpoint, tmp_path, monkeypatch):
    """What is written now is hashed on its way; with --resume, which finds files that are done, they are read."""
    job = ("quantize", checkpoint, tmp_path / "q.gguf", "q4_0", *SPLIT, "--manifest")
    read = []
    monkeypatch.setattr("ggufmill.pipeline.writing.checks.hash_file", lambda *a, **k: read.append(a) or hash_file(*a, **k))
    assert mill(*job)[0] == 0
    manifest = next(tmp_path.glob("*.manifest"))
    written = manifest.read_text()
    assert not read
    assert mill(*job, "--resume")[0] == 0
    assert read
    assert manifest.read_text() == written
