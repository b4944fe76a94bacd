"""`merge --delete-splits`: each shard goes once its tensors are on disk, and the job goes on from any moment."""

import os
from pathlib import Path

import numpy as np
import pytest
from commands import exit_code

from ggufmill.convert.hub.delete_shards import ShardDeleter
from ggufmill.formats import TYPES, FormatError, open_gguf
from ggufmill.formats.deleted_shards import record_path
from ggufmill.formats.gguf_header import header_bytes

N_SHARDS = 4


@pytest.fixture
def whole(tmp_path):
    """A GGUF with a tensor whose factors lie beside it, in another shard."""
    shapes = {f"blk.{i}.ffn_up.weight": (64, 32) for i in range(7)} | {"blk.0.ffn_up.scale": (1,)}
    metadata = {"general.architecture": "llama", "tokenizer.ggml.tokens": [f"token {i}" for i in range(500)]}
    tensors = [(name, shape, TYPES["f32"]) for name, shape in shapes.items()]
    header, _, size = header_bytes(metadata, tensors, 32)
    data = np.random.default_rng(1).bytes(size - len(header) - 28) + bytes(28)  # a scale is 4 bytes
    path = tmp_path / "whole.gguf"
    path.write_bytes(header + data)
    return path


def split(whole):
    assert exit_code("split", whole, whole.with_name("part"), "--split-max-tensors", "2", "--force") == 0
    return sorted(whole.parent.glob("part-*.gguf"))


@pytest.fixture
def parts(whole):
    found = split(whole)
    assert len(found) == N_SHARDS
    return found


def interrupt_after(monkeypatch, n_tensors, at_deletion=lambda: None):
    """Has the job stop when so many tensors are complete, and delete nothing after that, as if it were killed; at_deletion is
    called when shards may have been deleted."""
    original, stopped = ShardDeleter.__call__, []

    def call(self, done, sync):
        if not stopped:
            original(self, done, sync)
            at_deletion()
        if len(done) >= n_tensors:
            stopped.append(True)
            raise KeyboardInterrupt

    monkeypatch.setattr(ShardDeleter, "__call__", call)


def test_the_shards_are_deleted_and_the_output_is_the_same(whole, parts, tmp_path, capsys):
    job = ("merge", *parts, tmp_path / "out.gguf", "--delete-splits")
    assert exit_code(*job) == 0
    assert (tmp_path / "out.gguf").read_bytes() == whole.read_bytes()
    assert not list(tmp_path.glob("part*"))
    capsys.readouterr()
    assert exit_code(*job, "--resume") == 0
    assert "finished already, and the shards it was made of are deleted" in capsys.readouterr().out
    assert exit_code(*job, "--resume", "--force") == 1
    assert f"{N_SHARDS} of {N_SHARDS} shards are missing" in capsys.readouterr().err
    assert (tmp_path / "out.gguf").read_bytes() == whole.read_bytes()


@pytest.mark.parametrize(("n_tensors", "left"), [(0, 4), (1, 4), (2, 3), (5, 2), (7, 1), (8, 0)])
def test_an_interrupted_job_goes_on_without_the_deleted_shards(whole, parts, tmp_path, monkeypatch, n_tensors, left):
    job = ("merge", parts[0], tmp_path / "out.gguf", "--delete-splits", "--threads", 1)
    maps, held = Path("/proc/self/maps"), []

    def deleted_but_mapped():
        lines = maps.read_text("utf-8").splitlines() if maps.exists() else []
        held.extend(line for line in lines if str(tmp_path / "part") in line)

    with monkeypatch.context() as patch:
        interrupt_after(patch, n_tensors, deleted_but_mapped)
        assert exit_code(*job) == 130
    assert held == []  # a mapping would keep the space of a deleted file
    assert sum(path.exists() for path in parts) == left
    assert [record_path(path).exists() for path in parts] == [not path.exists() for path in parts]
    assert not (tmp_path / "out.gguf").exists()
    assert exit_code(*job, "--resume") == 0
    assert (tmp_path / "out.gguf").read_bytes() == whole.read_bytes()
    assert not list(tmp_path.glob("part*"))


@pytest.fixture
def interrupted(parts, tmp_path, monkeypatch):
    """The job, of whose four shards two are deleted."""
    job = ("merge", parts[0], tmp_path / "out.gguf", "--delete-splits", "--threads", 1)
    with monkeypatch.context() as patch:
        interrupt_after(patch, 5)
        assert exit_code(*job) == 130
    return job


def test_what_would_lose_tensors_is_refused(interrupted, whole, parts, tmp_path, capsys):
    refused = {
        ("--force",): "was deleted by a job that used it",
        ("--force", "--resume"): "was deleted by a job that used it",
        (): "was deleted by a job that used it",
    }
    for options, reason in refused.items():
        capsys.readouterr()
        assert exit_code(*interrupted, *options) == 1
        assert reason in capsys.readouterr().err
    assert exit_code("merge", parts[0], tmp_path / "out.gguf", "--resume") == 1
    assert "deleted by `merge --delete-splits`, which --resume continues" in capsys.readouterr().err
    assert exit_code("merge", parts[0], tmp_path / "other.gguf", "--delete-splits", "--resume") == 1
    assert "was deleted by a job that used it" in capsys.readouterr().err
    with pytest.raises(FormatError, match="2 of 4 shards are missing"):
        open_gguf(parts[0])
    assert exit_code(*interrupted, "--resume") == 0
    assert (tmp_path / "out.gguf").read_bytes() == whole.read_bytes()


def test_tensors_that_are_nowhere_any_more_are_named(interrupted, tmp_path, capsys):
    """The output has been damaged since, and what it was made of is deleted."""
    part = tmp_path / "out.gguf.part"
    with part.open("r+b") as file:
        file.seek(open_gguf(tmp_path / "whole.gguf").tensors["blk.0.ffn_up.weight"].offset)
        file.write(b"damage")
    assert exit_code(*interrupted, "--resume") == 1
    assert "was deleted when its tensors had been written" in capsys.readouterr().err


def test_a_damaged_record_is_one_line(interrupted, parts, capsys):
    record = record_path(parts[0])
    record.write_bytes(record.read_bytes()[:-100])
    assert exit_code(*interrupted, "--resume") == 1
    assert f"{record}: damaged" in capsys.readouterr().err


def test_a_kill_between_the_removals_of_records(whole, parts, tmp_path, monkeypatch, capsys):
    job = ("merge", parts[0], tmp_path / "out.gguf", "--delete-splits")
    with monkeypatch.context() as patch:
        patch.setattr(ShardDeleter, "close", lambda self: self._records[0].unlink())
        assert exit_code(*job) == 0
    assert len(list(tmp_path.glob("part*"))) == N_SHARDS - 1
    assert exit_code(*job, "--resume") == 0
    assert "finished already" in capsys.readouterr().out
    assert not list(tmp_path.glob("part*"))


def test_refused_before_anything_is_written(whole, parts, tmp_path, capsys):
    job = ("merge", parts[0], tmp_path / "out.gguf", "--delete-splits")
    assert exit_code(*job, "--verify") == 1
    assert "--verify compares with the source" in capsys.readouterr().err
    os.link(parts[2], tmp_path / "second name")
    assert exit_code(*job) == 1
    assert "another name too (a hard link)" in capsys.readouterr().err
    assert exit_code("merge", whole, tmp_path / "out.gguf", "--delete-splits") == 1
    assert "is one file already" in capsys.readouterr().err
    assert all(path.exists() for path in parts)
    assert not (tmp_path / "out.gguf").exists()
