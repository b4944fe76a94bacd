"""The fall-backs for systems that lack a call, tried by taking the call away."""

import errno
import os

import numpy as np
import pytest

from ggufmill.formats import TYPES, open_gguf
from ggufmill.formats.file_range import range_checksum, read_range
from ggufmill.jobs.execute import execute
from ggufmill.jobs.outputs import Output
from ggufmill.jobs.plan import make_plan
from ggufmill.operating_system import files, processors

LINUX_ONLY = ("sched_getaffinity", "posix_fallocate", "preadv", "pread", "pwrite")


@pytest.fixture
def other_system(monkeypatch):
    """A system without fcntl, positioned reads and writes, reservation of disk space, and functions of the C library."""
    for name in LINUX_ONLY:
        monkeypatch.delattr(os, name, raising=False)
    monkeypatch.setattr(files, "fcntl", None)
    monkeypatch.setattr(files, "msvcrt", None)
    monkeypatch.setattr(files, "_O_DIRECT", 0)
    monkeypatch.setattr(files, "c_function", lambda name: None)


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
    count = processors.available_cpus()
    assert 1 <= count <= (os.cpu_count() or 1)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert processors.available_cpus() >= count
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert processors.available_cpus() == 1


@pytest.mark.parametrize(("code", "is_refused"), [(errno.EOPNOTSUPP, False), (errno.EINVAL, False), (errno.ENOSPC, True)])
def test_space_where_the_file_system_cannot(tmp_path, monkeypatch, code, is_refused):
    def fail(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with (tmp_path / "file").open("wb") as file:
        if is_refused:
            with pytest.raises(OSError, match="No space"):
                files.reserve_space(file.fileno(), 1000)
        else:
            files.reserve_space(file.fileno(), 1000)
            assert os.fstat(file.fileno()).st_size == 1000


def test_locks(tmp_path, monkeypatch):
    if files.fcntl is None:
        pytest.skip("this system has no advisory locks")
    with (tmp_path / "file").open("wb") as first, (tmp_path / "file").open("rb") as second:
        assert files.lock_file(first)
        assert not files.lock_file(second)
        assert not files.lock_file(second, shared=True)
        first.close()
        assert files.lock_file(second, shared=True)

    def unsupported(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(files.fcntl, "flock", unsupported)
    with (tmp_path / "file").open("rb") as file:
        assert files.lock_file(file)


def test_allocated_bytes_of_a_file_with_holes(tmp_path):
    with (tmp_path / "file").open("wb") as file:
        file.truncate(1 << 20)
    assert files.allocated_bytes(tmp_path / "file") < 1 << 20


class FakeMsvcrt:
    """Locks of byte ranges as Windows has them: mandatory, of a handle, gone when it is closed."""

    LK_NBLCK, LK_UNLCK = 2, 0

    def __init__(self):
        self.locks = {}  # (device, inode, position) -> descriptor

    def locking(self, fd, mode, nbytes):
        assert nbytes == 1
        status = os.fstat(fd)
        key = (status.st_dev, status.st_ino, os.lseek(fd, 0, os.SEEK_CUR))
        if mode == self.LK_UNLCK:
            assert self.locks.pop(key) == fd
        elif self.locks.setdefault(key, fd) != fd:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))


def test_locks_of_windows(tmp_path, monkeypatch):
    fake = FakeMsvcrt()
    monkeypatch.setattr(files, "fcntl", None)
    monkeypatch.setattr(files, "msvcrt", fake)
    (tmp_path / "file").write_bytes(b"text")
    with (tmp_path / "file").open("r+b", buffering=0) as first, (tmp_path / "file").open("rb", buffering=0) as second:
        first.seek(2)
        assert files.lock_file(second, shared=True)
        assert files.lock_file(first)
        assert not files.lock_file(second)
        assert not files.lock_file(second, shared=True)
        assert first.tell() == 2
        assert min(position for _, _, position in fake.locks) > 1 << 30
        fake.locks.clear()  # as closing does
        assert files.lock_file(second)


@pytest.mark.parametrize("can_open_folders", [True, False])
def test_locked_folders(tmp_path, monkeypatch, can_open_folders):
    real = os.open

    def open_(path, *arguments):
        if not can_open_folders and os.path.isdir(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, *arguments)

    monkeypatch.setattr(os, "open", open_)
    with files.locked_folder(tmp_path) as first:
        assert first
        with files.locked_folder(tmp_path) as second:
            assert not second
    with files.locked_folder(tmp_path) as again:
        assert again
    assert os.listdir(tmp_path) == []
    files.sync_folder(tmp_path)


def test_syncing_past_the_cache_of_the_disk(tmp_path, monkeypatch):
    """As macOS asks for it; a file system that does not know it gets an ordinary fsync."""

    class Fcntl:
        F_FULLFSYNC = 51
        refuses = False

        def fcntl(self, fd, command):
            if self.refuses:
                raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
            calls.append(command)

    calls, fake = [], Fcntl()
    monkeypatch.setattr(files, "fcntl", fake)
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append("fsync"))
    files.sync_file(0)
    fake.refuses = True
    files.sync_file(0)
    assert calls == [51, "fsync"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="locks of Windows are others")
@pytest.mark.parametrize(("code", "is_free"), [(errno.ENOLCK, True), (errno.EOPNOTSUPP, True), (errno.EWOULDBLOCK, False)])
def test_a_file_system_without_locks_is_no_other_job(tmp_path, monkeypatch, code, is_free):
    class Fcntl:
        LOCK_SH, LOCK_EX, LOCK_NB = 1, 2, 4

        def flock(self, file, how):
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(files, "fcntl", Fcntl())
    with (tmp_path / "journal").open("w") as file:
        assert files.lock_file(file) is is_free
