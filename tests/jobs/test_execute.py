import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from itertools import pairwise

import numpy as np
import pytest
from planned_jobs import failing, interrupted_plan, output, plan_of

from ggufmill.formats import MillError, PlanError, open_gguf
from ggufmill.formats.file_range import range_checksum
from ggufmill.jobs.code_digest import code_digest
from ggufmill.jobs.execute import execute, row_chunks
from ggufmill.jobs.journal import Journal, journal_path
from ggufmill.jobs.ordered_writer import OrderedWriter, Sink
from ggufmill.jobs.plan import parse_size
from ggufmill.jobs.preflight import preflight
from ggufmill.operating_system import files


def test_a_job_writes_what_was_planned(tmp_path):
    outputs = [output("a", (256, 40)), output("b", (512, 8, 3), "q4_k_r4"), output("c", (7,)), output("d", (3000, 1000), "f16")]
    plan = plan_of(tmp_path, outputs)
    seen = []
    result = execute(plan, threads=2, progress=lambda n, name: seen.append(n))
    assert sum(seen) == plan.total_bytes
    assert (tmp_path / "out.gguf").stat().st_size == plan.file_bytes == result.nbytes
    assert os.listdir(tmp_path) == ["out.gguf"]
    file = open_gguf(tmp_path / "out.gguf")
    for o, location in zip(plan.outputs, plan.locations, strict=True):
        info = file.tensors[o.name]
        assert info.offset == location.offset
        assert np.array_equal(info.data, o.produce(0, info.n_rows))


def test_what_planning_took_goes_back_before_memory_stays(tmp_path, monkeypatch):
    """Timing types with covariances left 70 MiB with the process, for the whole job."""
    called = []
    for name in ("trim_free_memory", "retain_free_memory"):
        monkeypatch.setattr(f"ggufmill.jobs.execute.{name}", lambda name=name: called.append(name))
    execute(plan_of(tmp_path, [output("a", (256, 4))]), threads=1)
    assert called == ["trim_free_memory", "retain_free_memory", "trim_free_memory"]


def test_chunks_respect_matrices_and_groups():
    cases = [((4096, 700, 3), "f32"), ((7168, 168), "q8_0_r8"), ((2_000_000, 48), "bf16_r16"), ((64, 100_000), "f32")]
    for shape, type_name in cases:
        o = output("t", shape, type_name)
        rows = shape[1]
        chunks = list(row_chunks(o))
        assert chunks[0][0] == 0
        assert all(a[1] == b[0] for a, b in pairwise(chunks))
        assert chunks[-1][1] == rows * (shape[2] if len(shape) > 2 else 1)
        assert all(start // rows == (stop - 1) // rows for start, stop in chunks)
        assert all(start % o.type.rows == 0 and stop % o.type.rows == 0 for start, stop in chunks)


def test_producers_say_how_many_elements_are_made_at_once():
    def produce(start, stop):
        raise AssertionError

    produce.elements_at_once = 1 << 23
    assert list(row_chunks(output("t", (4096, 5000), "f32", produce=produce))) == [(0, 2048), (2048, 4096), (4096, 5000)]


def test_a_failure_keeps_complete_tensors(tmp_path):
    outputs = [output(f"t{i}", (256, 16)) for i in range(4)]
    outputs[2] = output("t2", (256, 16), produce=failing(0))
    plan = plan_of(tmp_path, outputs)
    with pytest.raises(MillError, match=r"nan \(\d of 4 tensors are kept; --resume continues\)"):
        execute(plan, threads=1)
    assert not (tmp_path / "out.gguf").exists()
    with pytest.raises(PlanError, match="unfinished job"):
        preflight(plan)
    outputs[2] = output("t2", (256, 16))
    repaired = plan_of(tmp_path, outputs)
    preflight(repaired, resume=True)
    assert execute(repaired, resume=True, threads=1).resumed >= 2
    uninterrupted = plan_of(tmp_path / "x", [output(f"t{i}", (256, 16)) for i in range(4)])
    preflight(uninterrupted)
    execute(uninterrupted)
    assert (tmp_path / "x/out.gguf").read_bytes() == (tmp_path / "out.gguf").read_bytes()


def test_resuming_another_job_is_refused(tmp_path):
    outputs = [output("a", (256, 16)), output("b", (256, 16), produce=failing(0))]
    with pytest.raises(MillError):
        execute(plan_of(tmp_path, outputs), threads=1)
    other = plan_of(tmp_path, [output("a", (256, 16), rule="another"), output("b", (256, 16))])
    with pytest.raises(PlanError, match="another source, recipe"):
        execute(other, resume=True)
    execute(other, force=True)
    assert (tmp_path / "out.gguf").exists()


SCRIPT = textwrap.dedent("""
    import sys, time
    import numpy as np
    from ggufmill.formats import TYPES
    from ggufmill.jobs.execute import execute
    from ggufmill.jobs.outputs import Output
    from ggufmill.jobs.plan import make_plan

    def output(i):
        def produce(start, stop):
            time.sleep(0.02)
            return np.random.default_rng(i).integers(0, 256, (64, 4096), np.uint8)[start:stop]
        return Output(f"t{i}", (1024, 64), "f32", TYPES["f32"], "test", produce)

    plan = make_plan([output(i) for i in range(40)], {}, sys.argv[1], split_max_tensors=25)
    print("ready", flush=True)
    execute(plan, threads=2, resume=True)
""")


def test_sigkill_at_any_moment(tmp_path):
    """Killed repeatedly at arbitrary moments, the job ends with the bytes of an uninterrupted one."""

    def start(folder):
        command = [sys.executable, "-c", SCRIPT, str(folder / "out.gguf")]
        return subprocess.Popen(command, stdout=subprocess.PIPE, cwd=tmp_path)

    (tmp_path / "uninterrupted").mkdir()
    (tmp_path / "killed").mkdir()
    assert start(tmp_path / "uninterrupted").wait(60) == 0
    delays, kills = iter([0.0, 0.01, 0.03, 0.05, 0.02]), 0
    while True:
        process = start(tmp_path / "killed")
        process.stdout.readline()
        delay = next(delays, None)
        if delay is None:
            assert process.wait(60) == 0
            break
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        kills += process.wait(60) == -signal.SIGKILL
    assert kills >= 3
    for name in ("out-00001-of-00002.gguf", "out-00002-of-00002.gguf"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "uninterrupted" / name).read_bytes()
    assert len(os.listdir(tmp_path / "killed")) == 2


def test_killed_between_the_renames(tmp_path, monkeypatch):
    outputs = [output(f"t{i}", (256, 16)) for i in range(4)]
    plan = plan_of(tmp_path, outputs, split_max_tensors=2)
    execute(plan)
    before = [f.path.read_bytes() for f in plan.files]
    written = [{"tensor": f"t{i}", "xxh3": "0"} for i in range(4)]
    lines = [{"fingerprint": plan.fingerprint, "code": code_digest()}, *written, {"event": "complete"}]
    journal_path(plan).write_text("".join(json.dumps(line) + "\n" for line in lines))
    plan.files[1].path.rename(plan.files[1].path.with_suffix(".gguf.part"))
    # Nothing is left to be written: no space is asked for, and nothing is made again.
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 0}))
    preflight(plan, resume=True)
    again = plan_of(tmp_path, [output(f"t{i}", (256, 16), produce=failing(0)) for i in range(4)], split_max_tensors=2)
    execute(again, resume=True)
    assert [f.path.read_bytes() for f in plan.files] == before
    assert len(os.listdir(tmp_path)) == 2


def cut(part):
    os.truncate(part, os.path.getsize(part) // 2)


def replace(part):
    data = part.read_bytes()
    part.unlink()
    part.write_bytes(data)


@pytest.mark.skipif(os.name != "posix", reason="open files cannot be removed elsewhere")
@pytest.mark.parametrize(("change", "said"), [(cut, "cut"), (replace, "removed or replaced"), (os.unlink, "removed")])
@pytest.mark.parametrize("files", [1, 2])
def test_a_part_that_another_program_changes(tmp_path, change, said, files):
    """Without looking, what is written later gives the file its planned size again, with zeros where it was cut."""
    names = [f"t{i}" for i in range(6)]

    def plan_with(act):
        def rows(start, stop):
            act()
            return output("t4", (256, 16)).produce(start, stop)

        outputs = [output(name, (256, 16), produce=rows if name == "t4" else None) for name in names]
        return plan_of(tmp_path, outputs, split_max_tensors=6 // files)

    plan = plan_with(lambda: change(plan.files[-1].part))
    with pytest.raises(MillError, match=rf"part was {said}.*--resume continues"):
        execute(plan, threads=1)
    execute(plan_with(lambda: None), resume=True)
    written = [path.read_bytes() for path in sorted(tmp_path.glob("*.gguf"))]
    (tmp_path / "new").mkdir()
    undisturbed = execute(plan_of(tmp_path / "new", [output(n, (256, 16)) for n in names], split_max_tensors=6 // files))
    assert written == [path.read_bytes() for path in undisturbed.paths]


def test_a_name_that_cannot_be_given(tmp_path, monkeypatch):
    def fails(old, new):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(old), None, str(new))

    plan = plan_of(tmp_path, [output("a", (256, 40))])
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fails)
        with pytest.raises(MillError, match=r"out\.gguf\.part: Input/output error .*--resume continues"):
            execute(plan)
    execute(plan_of(tmp_path, [output("a", (256, 40), produce=failing(0))]), resume=True)
    assert os.listdir(tmp_path) == ["out.gguf"]


def test_the_names_of_the_parts_are_on_disk_before_the_journal_calls_them_complete(tmp_path, monkeypatch):
    """Else a power cut may leave the journal alone: there is nothing to give a name to, and the source may be deleted."""
    calls, complete = [], Journal.complete
    monkeypatch.setattr("ggufmill.jobs.execute.sync_folder", lambda folder: calls.append(sorted(os.listdir(folder))))
    monkeypatch.setattr(Journal, "complete", lambda self: (calls.append("complete"), complete(self)))
    execute(plan_of(tmp_path, [output("a", (256, 40))]))
    assert calls == [["out.gguf.journal", "out.gguf.part"], "complete", ["out.gguf", "out.gguf.journal"]]


def test_an_output_that_is_replaced_stays_until_the_end(tmp_path):
    """--force, killed before there is a .part, then --resume: the old output is not taken for the new one's part."""
    plan = plan_of(tmp_path, [output("a", (256, 16), produce=failing(0))])
    (tmp_path / "out.gguf").write_bytes(b"precious")
    lines = [{"fingerprint": plan.fingerprint, "code": code_digest()}]
    journal_path(plan).write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(MillError, match="nan"):
        execute(plan, resume=True)
    assert (tmp_path / "out.gguf").read_bytes() == b"precious"


def test_what_a_failed_sync_may_have_lost_is_written_again(tmp_path, monkeypatch):
    made, real, fail = [], files.sync_file, [True]

    def counting(name):
        return output(
            name, (256, 16), produce=lambda start, stop: (made.append(name), np.zeros((stop - start, 1024), np.uint8))[1]
        )

    def sync(fd):
        if fail[0]:
            raise OSError(errno.EIO, "Input/output error")
        real(fd)

    monkeypatch.setattr("ggufmill.jobs.execute.sync_file", sync)
    with pytest.raises(MillError, match="Input/output error"):
        execute(plan_of(tmp_path, [counting(name) for name in "abc"]), threads=1)
    assert made == ["a", "b", "c"]
    fail[0] = False
    result = execute(plan_of(tmp_path, [counting(name) for name in "abc"]), resume=True, threads=1)
    assert result.resumed == 0
    assert made == ["a", "b", "c"] * 2


def test_a_part_with_another_name_is_not_written_through(tmp_path):
    plan = interrupted_plan(tmp_path)
    os.link(tmp_path / "out.gguf.part", tmp_path / "mine")
    mine = (tmp_path / "mine").read_bytes()
    with pytest.raises(PlanError, match="hard link"):
        preflight(plan, resume=True)
    preflight(plan, force=True)
    execute(plan, force=True)
    assert (tmp_path / "mine").read_bytes() == mine != (tmp_path / "out.gguf").read_bytes()


@pytest.mark.parametrize(
    ("text", "size"),
    [("50G", 50 * 10**9), ("512MiB", 512 << 20), ("1.5 GB", 1_500_000_000), ("7B", 7), ("7000000", 7_000_000), ("3k", 3000)],
)
def test_parse_size(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "G", "-5G", "5X", "1..2G", "0", "7", "3.2"])
def test_parse_size_refuses(text):
    with pytest.raises(PlanError):
        parse_size(text)


def test_a_tensor_larger_than_a_split(tmp_path):
    with pytest.raises(PlanError, match="alone takes"):
        plan_of(tmp_path, [output("a", (256, 16))], split_max_size=1000)


def test_checksums_match_the_file(tmp_path):
    plan = plan_of(tmp_path, [output("a", (256, 40)), output("b", (300, 7000)), output("c", (7,))])
    result = execute(plan, threads=3)
    for o, location in zip(plan.outputs, plan.locations, strict=True):
        assert result.checksums[o.name] == range_checksum(tmp_path / "out.gguf", location.offset, o.nbytes)


def test_chunks_in_any_order_are_written_in_order(tmp_path):
    draw = np.random.default_rng(5)
    path = tmp_path / "file"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    data = [draw.integers(0, 256, size, np.uint8) for size in draw.integers(1, 5000, 60)]
    owner = np.sort(draw.integers(0, 6, 60))
    sizes = [sum(d.size for d, o in zip(data, owner, strict=True) if o == i) for i in range(6)]
    starts = np.cumsum([0, *sizes])
    sinks = [Sink(f"t{i}", fd, int(starts[i]), sizes[i]) for i in range(6)]
    done, written = [], []
    writer = OrderedWriter(60, lambda sink: done.append(sink.name), lambda count, name: written.append(count))
    for number in draw.permutation(60):
        writer.slots.acquire()
        writer.put(int(number), sinks[owner[number]], data[number])
    os.close(fd)
    assert path.read_bytes() == b"".join(d.tobytes() for d in data)
    assert done == [f"t{i}" for i in range(6)]
    assert sum(written) == sum(sizes)


def test_a_failed_chunk_fails_its_tensor_only(tmp_path):
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    bad, good = Sink("bad", fd, 0, 20), Sink("good", fd, 20, 10)
    done = []
    writer = OrderedWriter(3, lambda sink: done.append(sink.name), lambda count, name: None)
    ten = np.arange(10, dtype=np.uint8)
    writer.put(2, good, ten)
    writer.fail(0, bad, MillError("no"))
    writer.put(1, bad, ten)
    os.close(fd)
    assert done == ["good"]
    assert [str(e) for e in writer.failures] == ["no"]


def test_a_first_shard_without_tensors(tmp_path):
    outputs = [output(f"t{i}", (256, 16)) for i in range(4)]
    plan = plan_of(tmp_path, outputs, split_max_tensors=2, tensor_first_split=False)
    assert [location.file for location in plan.locations] == [1, 1, 2, 2]
    execute(plan)
    file = open_gguf(plan.files[0].path)
    assert (len(file.paths), list(file.tensors)) == (3, ["t0", "t1", "t2", "t3"])
    assert file.metadata["general.architecture"] == "test"
    with pytest.raises(PlanError, match="first shard without tensors is for a split output"):
        plan_of(tmp_path, outputs, tensor_first_split=False)


def test_shards_of_another_split(tmp_path):
    outputs = [output(f"t{i}", (256, 16)) for i in range(4)]
    plan = plan_of(tmp_path, [*outputs, output("extra", (256, 16))], shards={"t0": 0, "t1": 2, "t2": 2, "t3": 3})
    assert [location.file for location in plan.locations] == [0, 2, 2, 3, 3]
    assert len(plan.files) == 4
    with pytest.raises(PlanError, match="its split cannot be kept"):
        plan_of(tmp_path, outputs, shards={"t0": 1, "t1": 0, "t2": 1, "t3": 1})
    with pytest.raises(PlanError, match="as in the source"):
        plan_of(tmp_path, outputs, shards={"t0": 0}, split_max_tensors=2)


def test_on_finished_is_called_for_every_tensor(tmp_path):
    calls = []
    plan = plan_of(tmp_path, [output(f"t{i}", (256, 16)) for i in range(4)])
    execute(plan, threads=2, on_finished=lambda done, sync: calls.append((len(done), sync())))
    assert [n for n, _ in calls] == [0, 1, 2, 3, 4]
    assert (tmp_path / "out.gguf").stat().st_size == plan.file_bytes
