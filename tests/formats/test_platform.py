"""The fall-backs for systems that lack a call, tried by taking the call away."""

import errno
import os

import numpy as np
import pytest

from ggufmill.formats import TYPES, open_gguf, platform
from ggufmill.formats.file_range import range_checksum, read_range
from ggufmill.jobs.execute import execute
from ggufmill.jobs.plan import Output, make_plan

LINUX_ONLY = ("sched_getaffinity", "posix_fallocate", "preadv", "pread", "pwrite")


@pytest.fixture
def other_system(monkeypatch):
    """A system without fcntl, positioned reads and writes, reservation of disk space, and functions of the C library."""
    for name in LINUX_ONLY:
        monkeypatch.delattr(os, name, raising=False)
    monkeypatch.setattr(platform, "fcntl", None)
    monkeypatch.setattr(platform, "_O_DIRECT", 0)
    monkeypatch.setattr(platform, "c_function", lambda name: None)


def plan_of(path):
    draw = np.random.default_rng(0)
    data = [draw.integers(0, 256, (300, 4096), np.uint8) for _ in range(4)]
    outputs = [
        Output(f"t{i}", (1024, 300), "f32", TYPES["f32"], "test", lambda start, stop, i=i: data[i][start:stop])
        for i in range(4)
    ]
    return make_plan(outputs, {}, path, split_max_tensors=2), data


@pytest.mark.parametrize("threads", [1, 4])
def test_a_job_writes_the_same_without_linux_calls(tmp_path, other_system, threads, monkeypatch):
    monkeypatch.setattr("ggufmill.jobs.execute.CHUNK_ELEMENTS", 20 << 10)
    plan, data = plan_of(tmp_path / "out.gguf")
    result = execute(plan, threads=threads)
    tensors = open_gguf(result.paths[0]).tensors
    for i, expected in enumerate(data):
        info = tensors[f"t{i}"]
        assert np.array_equal(info.data, expected)
        assert np.array_equal(info.read(7, 90), expected[7:90])
        assert range_checksum(info.path, info.offset, info.nbytes) == result.checksums[f"t{i}"]


def test_reads_without_preadv(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(bytes(range(256)))
    expected = read_range(tmp_path / "file", 10, 200)
    for name in ("preadv", "pread"):
        monkeypatch.delattr(os, name)
        assert np.array_equal(read_range(tmp_path / "file", 10, 200), expected)


def test_available_cpus(monkeypatch):
    count = platform.available_cpus()
    assert 1 <= count <= (os.cpu_count() or 1)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert platform.available_cpus() >= count
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert platform.available_cpus() == 1


@pytest.mark.parametrize(("code", "is_refused"), [(errno.EOPNOTSUPP, False), (errno.EINVAL, False), (errno.ENOSPC, True)])
def test_allocate_where_the_file_system_cannot(tmp_path, monkeypatch, code, is_refused):
    def fail(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with (tmp_path / "file").open("wb") as file:
        if is_refused:
            with pytest.raises(OSError, match="No space"):
                platform.allocate(file.fileno(), 1000)
        else:
            platform.allocate(file.fileno(), 1000)
            assert os.fstat(file.fileno()).st_size == 1000


def test_locks(tmp_path, monkeypatch):
    if platform.fcntl is None:
        pytest.skip("this system has no advisory locks")
    with (tmp_path / "file").open("wb") as first, (tmp_path / "file").open("rb") as second:
        assert platform.lock_file(first)
        assert not platform.lock_file(second)
        assert not platform.lock_file(second, shared=True)
        first.close()
        assert platform.lock_file(second, shared=True)

    def unsupported(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(platform.fcntl, "flock", unsupported)
    with (tmp_path / "file").open("rb") as file:
        assert platform.lock_file(file)


def test_allocated_bytes_of_a_file_with_holes(tmp_path):
    with (tmp_path / "file").open("wb") as file:
        file.truncate(1 << 20)
    assert platform.allocated_bytes(tmp_path / "file") < 1 << 20
