"""What may happen to a job: interruption at any moment, a full disk, a source that changes, shrinks or cannot be read.

Each time: one line, exit code 1, nothing under the final name; and --resume ends with the bytes of an undisturbed job.
"""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from failures import error_line

from ggufmill.formats import FormatError, open_gguf
from ggufmill.formats.safetensors import open_safetensors
from ggufmill.jobs.execute import execute
from ggufmill.operating_system.process import low_priority
from ggufmill.pipeline.writing import carry_out as writing
from ggufmill.quantize import verify as verifying
from ggufmill.recipes import FOLDER

fcntl = pytest.importorskip("fcntl")  # not on Windows
resource = pytest.importorskip("resource")  # not on Windows

MILL = [sys.executable, "-m", "ggufmill"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A checkpoint, a GGUF of it, a split one."""
    folder = tmp_path_factory.mktemp("sources")
    shutil.copytree(FOLDER / "demo", folder / "checkpoint")
    for out, more in (
        ("whole.gguf", ["--outtype", "q8_0"]),
        ("split.gguf", ["--outtype", "q8_0", "--split-max-tensors", "40"]),
    ):
        subprocess.run([*MILL, "convert", folder / "checkpoint", folder / out, *more], check=True, capture_output=True)
    return folder


# verb -> source, options
JOBS = {
    "quantize": ("checkpoint", ["q8_0", "--custom-q", "exps=q4_0"]),
    "convert": ("checkpoint", ["--outtype", "bf16"]),
    "repack": ("whole.gguf", []),
    "merge": ("split-00001-of-00002.gguf", []),
}


def largest(path):
    """The file that holds most of the weights: of a folder or of a split model, or the one that is given."""
    files = list(path.glob("*.safetensors")) if path.is_dir() else [path]
    return max(files, key=lambda p: p.stat().st_size)


@pytest.fixture(scope="module")
def calm(sources):
    """verb -> the bytes that an undisturbed job writes, each worked out once."""
    known = {}

    def of(verb):
        if verb not in known:
            source, options = JOBS[verb]
            out = sources / f"calm-{verb}.gguf"
            subprocess.run([*MILL, verb, sources / source, out, *options], check=True, capture_output=True)
            known[verb] = out.read_bytes()
        return known[verb]

    return of


@pytest.fixture(params=JOBS)
def job(request, sources, calm, tmp_path):
    """(command, source, the file's bytes from an undisturbed job)."""
    source, options = JOBS[request.param]
    return [request.param, sources / source, tmp_path / "out.gguf", *options], sources / source, calm(request.param)


@pytest.mark.process
def test_a_source_that_is_truncated(job, mill, tmp_path, monkeypatch):
    command, source, bytes_ = job
    file = largest(source)
    known, data = file.stat(), file.read_bytes()

    def shrinks(plan, **options):
        os.truncate(file, len(data) * 3 // 5)
        return execute(plan, **options)

    try:
        with monkeypatch.context() as patch:
            patch.setattr(writing, "execute", shrinks)
            line = error_line(mill(*command), tmp_path / "out.gguf")
        assert "has become shorter" in line
        assert "--resume continues" in line
    finally:
        file.write_bytes(data)
        os.utime(file, ns=(known.st_atime_ns, known.st_mtime_ns))
    code, _, err = mill(*command, "--resume")
    assert code == 0, err
    assert (tmp_path / "out.gguf").read_bytes() == bytes_


@pytest.mark.slow(keep=["convert"])
def test_resume_of_a_finished_job_does_nothing(job, mill, tmp_path):
    """`until ggufmill ... --resume; do :; done` ends. What another job may have written is not taken for the result."""
    command, source, bytes_ = job
    out = tmp_path / "out.gguf"
    assert mill(*command)[0] == 0
    written = (out.stat().st_ino, out.stat().st_mtime_ns)
    code, text, _ = mill(*command, "--resume")
    assert code == 0
    assert text.startswith(f"{out}: finished already, with ")
    assert (out.stat().st_ino, out.stat().st_mtime_ns) == written
    code, text, _ = mill(*command, "--resume", "--json", "--manifest")
    assert json.loads(text)["manifest"] == f"{out}.manifest"
    assert (tmp_path / "out.gguf.manifest").exists()
    assert mill(*command)[0] == 1
    os.utime(out, ns=(0, largest(source).stat().st_mtime_ns - 1))
    code, _, err = mill(*command, "--resume")
    assert (code, "exists; use --force to replace it" in err) == (1, True)
    out.write_bytes(bytes_[:-32] + b"GGUF")
    code, _, err = mill(*command, "--resume")
    assert (code, "exists; use --force to replace it" in err) == (1, True)
    assert mill(*command, "--resume", "--force")[0] == 0
    assert out.read_bytes() == bytes_


def test_a_source_that_changes(job, mill, tmp_path, monkeypatch):
    command, source, _ = job
    file = largest(source)
    known = file.stat()

    def changes(plan, **options):
        result = options.pop("verify_inputs")
        return execute(plan, verify_inputs=lambda: (os.utime(file), result()), **options)

    try:
        with monkeypatch.context() as patch:
            patch.setattr(writing, "execute", changes)
            assert "has changed while it was read" in error_line(mill(*command), tmp_path / "out.gguf")
        assert "belongs to a job with another source" in error_line(mill(*command, "--resume"), tmp_path / "out.gguf")
    finally:
        os.utime(file, ns=(known.st_atime_ns, known.st_mtime_ns))
    assert mill(*command, "--force")[0] == 0


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize(
    ("call", "code", "said"), [("preadv", errno.EIO, "Input/output"), ("pwrite", errno.ENOSPC, "No space")]
)
def test_read_errors_and_a_full_disk(job, mill, tmp_path, monkeypatch, call, code, said, direct):
    command, _, bytes_ = job
    if direct:
        monkeypatch.setattr("ggufmill.jobs.execute.MIN_DIRECT_BYTES", 0)
        monkeypatch.setattr("ggufmill.jobs.ordered_writer.MIN_TENSOR_BYTES", 1)
    real, calls = getattr(os, call), []

    def fails(*arguments):
        calls.append(1)
        if len(calls) > 30:
            raise OSError(code, os.strerror(code))
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(f"os.{call}", fails)
        line = error_line(mill(*command), tmp_path / "out.gguf")
    assert said in line
    assert "--resume continues" in line
    assert mill(*command, "--resume")[0] == 0
    assert (tmp_path / "out.gguf").read_bytes() == bytes_


def test_a_disk_that_is_too_small(job, mill, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("os.posix_fallocate", full)
        assert "cannot be allocated (No space left on device)" in error_line(mill(*job[0]), tmp_path / "out.gguf")
    assert os.listdir(tmp_path) == []


def test_the_limit_of_file_sizes(sources, tmp_path):
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    command = [*MILL, "repack", sources / "whole.gguf", tmp_path / "out.gguf"]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit, check=False)
    assert "File too large" in error_line((done.returncode, done.stdout, done.stderr), tmp_path / "out.gguf")


def is_locked(journal):
    """Whether a job has begun to write: it then holds the lock on its journal."""
    try:
        with journal.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


@pytest.mark.process(keep=["quantize-9"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_signals(job, tmp_path, number):
    """Sent at moments from the beginning of the writing on."""
    command, _, bytes_ = job
    out, journal, stopped = tmp_path / "out.gguf", tmp_path / "out.gguf.journal", 0
    for delay in (0.0, 0.05, 0.15):
        process = subprocess.Popen(
            low_priority([*MILL, *command, "--resume"]), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        while not is_locked(journal) and process.poll() is None:
            time.sleep(0.002)
        time.sleep(delay)
        process.send_signal(number)
        _, err = process.communicate(timeout=300)
        if process.returncode == 0 or (out.exists() and not journal.exists()):
            break
        stopped += 1
        assert "Traceback" not in err
        if out.exists():  # the last moment: all was written
            assert out.read_bytes() == bytes_
        elif number == signal.SIGINT:
            assert process.returncode == 130
            assert "interrupted; what was finished is kept, --resume continues it" in err
    assert stopped or command[0] == "merge"  # which is over in a moment
    if not out.exists() or journal.exists():
        subprocess.run([*MILL, *command, "--resume"], check=True, capture_output=True)
    assert out.read_bytes() == bytes_
    assert os.listdir(tmp_path) == ["out.gguf"]


# -- inputs that other programs end on


# -- what was written, looked at


def test_verify_finds_damage(job, mill, tmp_path, monkeypatch):
    command, _, _ = job

    def damages(plan, **options):
        result = execute(plan, **options)
        location, output = plan.locations[3], plan.outputs[3]
        with plan.files[location.file].path.open("r+b") as file:
            file.seek(location.offset)
            first = file.read(1)[0]
            file.seek(location.offset)
            file.write(bytes([first ^ 0x40]))
        named.append(output.name)
        return result

    named = []
    with monkeypatch.context() as patch:
        patch.setattr(writing, "execute", damages)
        code, text, err = mill(*command, "--verify", "--json")
    assert code == 1
    assert f"{named[0]} (" in err
    assert "bytes are not those that the source gives" in err
    figures = json.loads(text)["verification"]
    assert [t["name"] for t in figures["tensors"] if t["problem"]] == named
    assert sum(t["problems"] for t in figures["types"]) == 1


def test_verify_finds_an_error_that_is_too_large(sources, mill, tmp_path, monkeypatch):
    command = ("quantize", sources / "checkpoint", tmp_path / "out.gguf", "q8_0", "--custom-q", "exps=q4_0", "--verify")
    code, text, _ = mill(*command)
    assert code == 0
    assert "expected below" in text
    monkeypatch.setattr(verifying, "ERROR_MARGIN", 0.1)
    code, _, err = mill(*command, "--force")
    assert code == 1
    assert "is expected" in err


def test_a_repack_and_a_copy_are_exact(sources, mill, tmp_path):
    code, text, _ = mill("repack", sources / "whole.gguf", tmp_path / "out.gguf", "--verify", "--manifest", "--json")
    result = json.loads(text)
    assert code == 0
    assert {t["kind"] for t in result["verification"]["tensors"]} == {"copy", "repack"}
    assert all(t["error"] == 0 for t in result["verification"]["tensors"])
    code, text, _ = mill("hash", tmp_path / "out.gguf", "--check", result["manifest"])
    assert code == 0
    assert text.count("Ok") == len(result["tensors"]) + 1
    parts = tmp_path / "parts-00001-of-00002.gguf"
    for command in (
        ("split", sources / "whole.gguf", tmp_path / "parts", "--split-max-tensors", 40),
        ("merge", parts, tmp_path / "merged.gguf"),
    ):
        code, text, _ = mill(*command, "--verify", "--manifest", "--json")
        result = json.loads(text)
        assert code == 0
        assert {t["kind"] for t in result["verification"]["tensors"]} == {"copy"}
        assert result["verification"]["problems"] == []
        assert mill("hash", result["files"][0]["path"], "--check", result["manifest"])[0] == 0
    assert (tmp_path / "merged.gguf").read_bytes() == (sources / "whole.gguf").read_bytes()


# -- files that are mapped


def test_a_mapped_file_that_shrinks_ends_in_an_error(sources, tmp_path):
    path = tmp_path / "a.gguf"
    shutil.copy(sources / "whole.gguf", path)
    info = list(open_gguf(path).tensors.values())[-1]
    os.truncate(path, info.offset)
    for look in (lambda: info.data.sum(), lambda: info.read(0, 1)):
        with pytest.raises(FormatError, match="has become shorter"):
            look()
    shutil.copytree(FOLDER / "demo", tmp_path / "demo")
    tensors = open_safetensors(tmp_path / "demo")
    tensor = max(tensors.values(), key=lambda t: t.offset + t.nbytes)
    assert tensor.data.size
    os.truncate(tensor.path, tensor.offset)
    for look in (lambda: tensor.data.sum(), lambda: tensor.rows(0, 1)):
        with pytest.raises(FormatError, match="has become shorter"):
            look()


@pytest.mark.parametrize(
    "name", ["../out.safetensors", "/etc/passwd", "..", "", "sub/x.safetensors", ".\\..\\x", "a\0b", 5, None]
)
def test_an_index_cannot_name_files_elsewhere(tmp_path, name):
    (tmp_path / "out.safetensors").write_bytes(b"x")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(FormatError, match="is not the name of a shard|shards are missing"):
        open_safetensors(folder)
