import errno
import os
import threading
import time

import numpy as np
import pytest

from ggufmill.formats import open_gguf
from ggufmill.formats.types import TYPES
from ggufmill.jobs import direct_io, execute
from ggufmill.jobs.direct_io import BLOCK, DirectWriter
from ggufmill.jobs.journal import journal_path
from ggufmill.jobs.ordered_writer import OrderedWriter, Sink
from ggufmill.jobs.outputs import Output
from ggufmill.jobs.plan import make_plan
from ggufmill.operating_system import files

SIZE = 40 * BLOCK


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch):
    monkeypatch.setattr(direct_io, "BUFFER_BYTES", 3 * BLOCK)
    monkeypatch.setattr(direct_io, "TRIAL_BYTES", 6 * BLOCK)
    monkeypatch.setattr(direct_io, "SLOW", 0)


@pytest.fixture
def file(tmp_path):
    """A file full of ones: (its descriptor, a function that reads its content)."""
    path = tmp_path / "file"
    path.write_bytes(b"\1" * SIZE)
    fd = os.open(path, os.O_RDWR)
    yield fd, path.read_bytes
    os.close(fd)


def write(writer, fd, offset, data, cuts):
    writer.start(fd, offset)
    for piece in np.split(data, cuts):
        writer.write(memoryview(piece))
    writer.flush()


def runs(seed, count=60):
    """(offset, bytes, positions at which to cut them): overlapping runs of many sizes, some of them aligned to blocks."""
    draw = np.random.default_rng(seed)
    for _ in range(count):
        offset, n = int(draw.integers(0, SIZE - 1)), int(draw.choice([1, 100, BLOCK, 3 * BLOCK, 9 * BLOCK, 12345]))
        offset = offset // BLOCK * BLOCK if draw.random() < 0.3 else offset
        data = draw.integers(0, 256, min(n, SIZE - offset), np.uint8)
        yield offset, data, np.sort(draw.integers(0, data.size + 1, 3))


def is_direct(fd):
    flags = files.fcntl.fcntl(fd, files.fcntl.F_GETFL)
    return bool(flags & files._O_DIRECT)


def check_runs(writer, file, seed):
    fd, content = file
    expected = np.ones(SIZE, np.uint8)
    for offset, data, cuts in runs(seed):
        write(writer, fd, offset, data, cuts)
        expected[offset : offset + data.size] = data
        assert content() == expected.tobytes()
    assert not is_direct(fd)


def test_runs_of_any_size_at_any_offset(file):
    check_runs(DirectWriter(), file, 1)


def test_complete_blocks_are_written_with_o_direct(file, monkeypatch):
    """Complete blocks with O_DIRECT, from aligned memory; the rest without."""
    writes, real = [], os.pwrite

    def pwrite(fd, data, offset):
        writes.append((is_direct(fd), offset, len(data)))
        assert not is_direct(fd) or np.frombuffer(data, np.uint8).ctypes.data % BLOCK == 0
        return real(fd, data, offset)

    writer = DirectWriter()
    if not writer.usable:
        pytest.skip("there is no O_DIRECT on this system")
    monkeypatch.setattr(files.os, "pwrite", pwrite)
    data = np.arange(10 * BLOCK, dtype=np.uint32).astype(np.uint8)
    write(writer, file[0], 100, data, [5, 3000, 9 * BLOCK])
    if not writer.usable:
        pytest.skip("this file system has no direct writing")
    end = 100 + data.size
    blocks = [(True, BLOCK * i, 3 * BLOCK) for i in (1, 4, 7)]
    assert [w for w in writes if w[0]] == blocks
    assert sorted(w[1] for w in writes if not w[0])[0] == 100
    assert sum(w[2] for w in writes) == data.size
    assert file[1]()[100:end] == data.tobytes()


@pytest.mark.parametrize("call", ["fcntl", "pwrite"])
def test_a_file_system_without_direct_io(file, monkeypatch, call):
    fcntl = files.fcntl
    module = fcntl if call == "fcntl" else files.os
    real, real_fcntl = getattr(module, call), fcntl.fcntl

    def refuse(fd, *arguments):
        if call == "fcntl":
            refused = arguments[0] == fcntl.F_SETFL and arguments[1] & files._O_DIRECT
        else:
            refused = real_fcntl(fd, fcntl.F_GETFL) & files._O_DIRECT
        if refused:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, *arguments)

    monkeypatch.setattr(module, call, refuse)
    writer = DirectWriter()
    check_runs(writer, file, 2)
    assert not writer.usable


def test_short_writes(file, monkeypatch):
    real = os.pwrite
    draw = np.random.default_rng(3)
    monkeypatch.setattr(files.os, "pwrite", lambda fd, data, at: real(fd, data[: draw.integers(1, len(data) + 1)], at))
    check_runs(DirectWriter(), file, 4)


def test_a_full_disk_raises(file, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = DirectWriter()
    writer.start(file[0], 0)
    monkeypatch.setattr(files.os, "pwrite", full)
    writer.write(memoryview(bytes(4 * BLOCK)))
    with pytest.raises(OSError, match="No space"):
        writer.write(memoryview(bytes(4 * BLOCK)))
    monkeypatch.undo()
    write(writer, file[0], BLOCK, np.full(BLOCK, 7, np.uint8), [])
    assert file[1]() == b"\1" * BLOCK + b"\7" * BLOCK + b"\1" * (SIZE - 2 * BLOCK)


def test_an_interrupt_while_it_waits_leaves_nothing_that_is_written_later(file, monkeypatch):
    real, goes_on = os.pwrite, threading.Event()

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "pwrite", lambda *arguments: goes_on.wait(60) and real(*arguments))
    writer = DirectWriter()
    writer.start(file[0], 0)
    writer.write(memoryview(bytes(3 * BLOCK)))
    with monkeypatch.context() as patch:
        patch.setattr(direct_io.Future, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            writer.flush()
    assert file[1]() == b"\1" * SIZE
    goes_on.set()
    writer.wait()
    assert file[1]() == bytes(3 * BLOCK) + b"\1" * (SIZE - 3 * BLOCK)


def test_a_slow_disk_is_written_through_the_cache(file, monkeypatch):
    monkeypatch.setattr(direct_io, "SLOW", 1e300)
    writer = DirectWriter()
    if not writer.usable:
        pytest.skip("there is no O_DIRECT on this system")
    write(writer, file[0], 0, np.ones(3 * BLOCK, np.uint8), [])
    assert writer.usable  # not yet judged
    check_runs(writer, file, 5)
    assert not writer.usable


def test_writes_to_a_file_do_not_overlap(tmp_path, monkeypatch):
    """Blocks of a tensor that failed are written to the end before those of the next, which may go through the cache; and a
    tensor is finished when its last block is written."""
    monkeypatch.setattr("ggufmill.jobs.ordered_writer.MIN_TENSOR_BYTES", 10 * BLOCK)
    running, real = [], os.pwrite

    def pwrite(fd, data, offset):
        running.append(offset)
        time.sleep(0.02)
        assert running == [offset]
        try:
            return real(fd, data, offset)
        finally:
            running.remove(offset)

    monkeypatch.setattr(files.os, "pwrite", pwrite)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    bad, small, whole = (
        Sink("bad", fd, 0, 20 * BLOCK),
        Sink("small", fd, 20 * BLOCK, 77),
        Sink("whole", fd, 21 * BLOCK, 12 * BLOCK),
    )
    done = []
    writer = OrderedWriter(9, lambda sink: done.append((sink.name, *running)), lambda count, name: None, direct=True)
    writer.put(0, bad, np.full(7 * BLOCK, 1, np.uint8))
    writer.fail(1, bad, ValueError())
    writer.put(2, small, np.full(77, 2, np.uint8))
    writer.put(3, whole, np.full(12 * BLOCK, 3, np.uint8))
    writer.close()
    assert running == []
    os.close(fd)
    assert (done, len(writer.failures)) == ([("small",), ("whole",)], 1)
    content = (tmp_path / "file").read_bytes()
    assert content[20 * BLOCK :] == b"\2" * 77 + bytes(BLOCK - 77) + b"\3" * 12 * BLOCK


def test_closing_waits_for_what_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("ggufmill.jobs.ordered_writer.MIN_TENSOR_BYTES", 1)
    written, real, goes_on = [], os.pwrite, threading.Event()

    def pwrite(fd, data, offset):
        assert goes_on.wait(60)
        time.sleep(0.01)
        written.append(offset)
        return real(fd, data, offset)

    monkeypatch.setattr(files.os, "pwrite", pwrite)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    writer = OrderedWriter(9, lambda sink: None, lambda count, name: None, direct=True)
    writer.put(0, Sink("some", fd, 0, 9 * BLOCK), np.full(4 * BLOCK, 1, np.uint8))
    assert written == []  # by another thread, while this one goes on
    goes_on.set()
    writer.close()
    assert written
    os.close(fd)


def test_what_threads_bring_after_the_end_is_not_written(tmp_path, monkeypatch):
    """They go on for a moment after an interrupt: the files are closed then."""
    begun, goes_on, real = threading.Event(), threading.Event(), os.pwrite

    def pwrite(*arguments):
        begun.set()
        assert goes_on.wait(60)
        return real(*arguments)

    monkeypatch.setattr(files.os, "pwrite", pwrite)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    sink, done = Sink("some", fd, 0, 2 * BLOCK), []
    writer = OrderedWriter(9, lambda sink: done.append(sink.name), lambda count, name: None)
    bringing = threading.Thread(target=writer.put, args=(0, sink, np.full(BLOCK, 1, np.uint8)))
    bringing.start()
    assert begun.wait(60)
    closing = threading.Thread(target=writer.close)
    closing.start()
    writer.put(1, sink, np.full(BLOCK, 2, np.uint8))  # the other thread is to write it
    while not writer._is_closed:
        time.sleep(0.001)
    assert closing.is_alive()
    goes_on.set()
    closing.join(60)
    assert not closing.is_alive()
    os.close(fd)
    bringing.join(60)
    writer.put(2, sink, np.full(BLOCK, 3, np.uint8))
    assert (done, writer.failures) == ([], [])
    assert (tmp_path / "file").read_bytes() == b"\1" * BLOCK


def test_buffered_bytes_of_a_failed_tensor_are_dropped(tmp_path, monkeypatch):
    """They are not written into the tensors after it."""
    monkeypatch.setattr("ggufmill.jobs.ordered_writer.MIN_TENSOR_BYTES", 1)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    bad, good = Sink("bad", fd, 0, 300), Sink("good", fd, 300, 2 * BLOCK)
    done = []
    writer = OrderedWriter(9, lambda sink: done.append(sink.name), lambda count, name: None, direct=True)
    writer.put(0, bad, np.full(100, 1, np.uint8))
    writer.fail(1, bad, ValueError())
    writer.put(2, bad, np.full(100, 1, np.uint8))
    for number in (3, 4):
        writer.put(number, good, np.full(BLOCK, number, np.uint8))
    os.close(fd)
    assert done == ["good"]
    assert (tmp_path / "file").read_bytes()[300:] == b"\3" * BLOCK + b"\4" * BLOCK


@pytest.mark.parametrize("threads", [1, 3])
def test_a_job_writes_the_same_with_and_without_direct_io(tmp_path, monkeypatch, threads):
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
    cached = execute.execute(job("cached"), threads=threads)
    monkeypatch.setattr(execute, "MIN_DIRECT_BYTES", 0)
    monkeypatch.setattr("ggufmill.jobs.ordered_writer.MIN_TENSOR_BYTES", BLOCK)
    plan = job("direct", broken=4)
    with pytest.raises(ValueError, match="broken"):
        execute.execute(plan, threads=threads)
    assert journal_path(plan).exists()
    synced = []
    on_finished = (lambda done, sync: synced.append(sync())) if threads > 1 else None  # with it nothing is allocated in advance
    resumed = execute.execute(job("direct"), threads=threads, resume=True, on_finished=on_finished)
    assert len(synced) == (1 + len(shapes) - resumed.resumed if on_finished else 0)
    assert resumed.resumed >= 3
    assert resumed.checksums == cached.checksums
    for one, other in zip(cached.paths, resumed.paths, strict=True):
        assert one.read_bytes() == other.read_bytes()
    tensors = open_gguf(resumed.paths[0]).tensors
    assert all(tensors[f"t{i}"].data.tobytes() == d.tobytes() for i, d in enumerate(data))
