import errno
import os

import numpy as np
import pytest

from ggufmill.formats import open_gguf
from ggufmill.formats.types import TYPES
from ggufmill.jobs import direct_io as direct
from ggufmill.jobs import execute
from ggufmill.jobs.direct_io import BLOCK, DirectWriter
from ggufmill.jobs.execute import journal_path
from ggufmill.jobs.ordered_writer import OrderedWriter, Sink
from ggufmill.jobs.plan import Output, make_plan

SIZE = 40 * BLOCK


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(direct, "BUFFER_BYTES", 3 * BLOCK)
    monkeypatch.setattr(direct, "TRIAL_BYTES", 6 * BLOCK)
    monkeypatch.setattr(direct, "SLOW", 0)


@pytest.fixture
def file(tmp_path):
    """A file full of ones; (its handle, what it holds now)."""
    path = tmp_path / "file"
    path.write_bytes(b"\1" * SIZE)
    handle = os.open(path, os.O_RDWR)
    yield handle, path.read_bytes
    os.close(handle)


def write(writer, handle, at, data, cuts):
    writer.begin(handle, at)
    for piece in np.split(data, cuts):
        writer.put(memoryview(piece))
    writer.end()


def runs(seed, count=60):
    """(first byte, bytes, where they are cut), overlapping runs of all sizes at any place, some of them on whole blocks."""
    draw = np.random.default_rng(seed)
    for _ in range(count):
        at, n = int(draw.integers(0, SIZE - 1)), int(draw.choice([1, 100, BLOCK, 3 * BLOCK, 9 * BLOCK, 12345]))
        at = at // BLOCK * BLOCK if draw.random() < 0.3 else at
        data = draw.integers(0, 256, min(n, SIZE - at), np.uint8)
        yield at, data, np.sort(draw.integers(0, data.size + 1, 3))


def check(writer, file, seed):
    handle, content = file
    expected = np.ones(SIZE, np.uint8)
    for at, data, cuts in runs(seed):
        write(writer, handle, at, data, cuts)
        expected[at : at + data.size] = data
        assert content() == expected.tobytes()
    flags = os.O_DIRECT if hasattr(os, "O_DIRECT") else 0
    assert not direct.fcntl.fcntl(handle, direct.fcntl.F_GETFL) & flags


def test_any_run_at_any_place(file):
    check(DirectWriter(), file, 1)


def test_blocks_are_written_past_the_cache(file, monkeypatch):
    """Whole blocks with O_DIRECT, from memory that is aligned to them; the rest without."""
    seen, real = [], os.pwrite

    def pwrite(handle, data, at):
        is_direct = bool(direct.fcntl.fcntl(handle, direct.fcntl.F_GETFL) & os.O_DIRECT)
        seen.append((is_direct, at, len(data)))
        assert not is_direct or np.frombuffer(data, np.uint8).ctypes.data % BLOCK == 0
        return real(handle, data, at)

    writer = DirectWriter()
    if not writer.usable:
        pytest.skip("there is no O_DIRECT on this system")
    monkeypatch.setattr(direct.os, "pwrite", pwrite)
    data = np.arange(10 * BLOCK, dtype=np.uint32).astype(np.uint8)
    write(writer, file[0], 100, data, [5, 3000, 9 * BLOCK])
    if not writer.usable:
        pytest.skip("this file system has no direct writing")
    end = 100 + data.size
    inner = [(True, BLOCK * i, 3 * BLOCK) for i in (1, 4, 7)]
    assert [s for s in seen if s[0]] == inner
    assert sorted(s[1] for s in seen if not s[0])[0] == 100
    assert sum(s[2] for s in seen) == data.size
    assert file[1]()[100:end] == data.tobytes()


@pytest.mark.parametrize("call", ["fcntl", "pwrite"])
def test_a_file_system_that_cannot(file, monkeypatch, call):
    module = direct.fcntl if call == "fcntl" else direct.os
    real, ask = getattr(module, call), direct.fcntl.fcntl

    def is_direct(handle):
        return call == "pwrite" and ask(handle, direct.fcntl.F_GETFL) & direct._O_DIRECT

    def refuses(handle, *arguments):
        sets = call == "fcntl" and arguments[0] == direct.fcntl.F_SETFL and arguments[1] & direct._O_DIRECT
        if sets or is_direct(handle):
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(handle, *arguments)

    monkeypatch.setattr(module, call, refuses)
    writer = DirectWriter()
    check(writer, file, 2)
    assert not writer.usable


def test_short_writes(file, monkeypatch):
    real = os.pwrite
    draw = np.random.default_rng(3)
    monkeypatch.setattr(direct.os, "pwrite", lambda h, data, at: real(h, data[: draw.integers(1, len(data) + 1)], at))
    check(DirectWriter(), file, 4)


def test_a_full_disk_is_told(file, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = DirectWriter()
    writer.begin(file[0], 0)
    monkeypatch.setattr(direct.os, "pwrite", full)
    with pytest.raises(OSError, match="No space"):
        writer.put(memoryview(bytes(4 * BLOCK)))
    monkeypatch.undo()
    write(writer, file[0], BLOCK, np.full(BLOCK, 7, np.uint8), [])
    assert file[1]() == b"\1" * BLOCK + b"\7" * BLOCK + b"\1" * (SIZE - 2 * BLOCK)


def test_a_slow_disk_is_left_to_the_cache(file, monkeypatch):
    monkeypatch.setattr(direct, "SLOW", 1e300)
    writer = DirectWriter()
    if not writer.usable:
        pytest.skip("there is no O_DIRECT on this system")
    write(writer, file[0], 0, np.ones(3 * BLOCK, np.uint8), [])
    assert writer.usable  # not yet judged
    check(writer, file, 5)
    assert not writer.usable


def test_a_failed_tensor_leaves_nothing_behind(tmp_path, monkeypatch):
    """What was gathered of it is not written into the tensors after it."""
    monkeypatch.setattr("ggufmill.jobs.ordered_writer.LEAST_BYTES", 1)
    handle = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    bad, good = Sink("bad", handle, 0, 300), Sink("good", handle, 300, 2 * BLOCK)
    done = []
    writer = OrderedWriter(9, lambda sink: done.append(sink.name), lambda count, name: None, direct=True)
    writer.put(0, bad, np.full(100, 1, np.uint8))
    writer.fail(1, bad, ValueError())
    writer.put(2, bad, np.full(100, 1, np.uint8))
    for number in (3, 4):
        writer.put(number, good, np.full(BLOCK, number, np.uint8))
    os.close(handle)
    assert done == ["good"]
    assert (tmp_path / "file").read_bytes()[300:] == b"\3" * BLOCK + b"\4" * BLOCK


@pytest.mark.parametrize("threads", [1, 3])
def test_a_job_writes_the_same_either_way(tmp_path, monkeypatch, threads):
    draw = np.random.default_rng(6)
    shapes = [(1000, 40), (7,), (4096, 64), (33, 5), (2048, 30, 3), (64, 2)]
    data = [draw.integers(0, 256, (int(np.prod(s[1:])), s[0] * 4), np.uint8) for s in shapes]

    def job(name, broken=None):
        def produce(i):
            def rows(start, stop):
                if i == broken:
                    raise ValueError("broken")
                return data[i][start:stop]

            return rows

        outputs = [Output(f"t{i}", s, "f32", TYPES["f32"], "test", produce(i)) for i, s in enumerate(shapes)]
        return make_plan(outputs, {}, tmp_path / name / "out.gguf", split_max_tensors=4)

    monkeypatch.setattr(execute, "CHUNK_ELEMENTS", 5000)
    usual = execute.execute(job("usual"), threads=threads)
    monkeypatch.setattr(execute, "DIRECT_BYTES", 0)
    monkeypatch.setattr("ggufmill.jobs.ordered_writer.LEAST_BYTES", BLOCK)
    plan = job("direct", broken=4)
    with pytest.raises(ValueError, match="broken"):
        execute.execute(plan, threads=threads)
    assert journal_path(plan).exists()
    synced = []
    finished = (lambda done, sync: synced.append(sync())) if threads > 1 else None  # then nothing is allocated beforehand
    resumed = execute.execute(job("direct"), threads=threads, resume=True, finished=finished)
    assert len(synced) == (1 + len(shapes) - resumed.resumed if finished else 0)
    assert resumed.resumed >= 3
    assert resumed.checksums == usual.checksums
    for one, other in zip(usual.paths, resumed.paths, strict=True):
        assert one.read_bytes() == other.read_bytes()
    tensors = open_gguf(resumed.paths[0]).tensors
    assert all(tensors[f"t{i}"].data.tobytes() == d.tobytes() for i, d in enumerate(data))
