"""What is refused before a job writes anything, and what of its files is there already."""

import os
import time

import pytest
from planned_jobs import output, plan_of

from ggufmill.formats import PlanError
from ggufmill.jobs.execute import execute
from ggufmill.jobs.journal import journal_path
from ggufmill.jobs.preflight import complete_files, is_complete, preflight


def test_preflight_refusals(tmp_path, monkeypatch):
    plan = plan_of(tmp_path, [output("a", (256, 16))])
    with pytest.raises(PlanError, match="is an input"):
        preflight(plan, inputs=[tmp_path / "." / "out.gguf"])
    (tmp_path / "out.gguf").write_bytes(b"precious")
    with pytest.raises(PlanError, match="exists; use --force"):
        preflight(plan)
    preflight(plan, force=True)
    assert (tmp_path / "out.gguf").read_bytes() == b"precious"
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(PlanError, match="bytes too few free"):
        preflight(plan, force=True)


def test_outputs_that_are_links_folders_or_pipes_are_refused(tmp_path):
    plan = plan_of(tmp_path, [output("a", (256, 16))])
    source = tmp_path / "source.gguf"
    source.write_bytes(b"precious")
    part, journal, out = tmp_path / "out.gguf.part", journal_path(plan), tmp_path / "out.gguf"
    for path in (part, journal, out):
        path.symlink_to(source)
        with pytest.raises(PlanError, match="is an input"):
            preflight(plan, force=True, inputs=[source])
        if path is not out:
            with pytest.raises(PlanError, match="is a link"):
                preflight(plan, force=True)
        path.unlink()
        path.mkdir()
        with pytest.raises(PlanError, match="is a folder"):
            preflight(plan, force=True)
        path.rmdir()
    os.mkfifo(out)
    with pytest.raises(PlanError, match="device or pipe"):
        preflight(plan, force=True)
    out.unlink()
    part.symlink_to(source)
    execute(plan)
    assert source.read_bytes() == b"precious"


def test_existing_files_stay(tmp_path):
    outputs = [output(f"t{i}", (256, 16)) for i in range(4)]
    plan = plan_of(tmp_path, outputs, split_max_tensors=1)
    execute(plan)
    before = [f.path.read_bytes() for f in plan.files]
    for index in (1, 3):
        plan.files[index].path.unlink()
    stat_before = plan.files[2].path.stat()
    calls = []

    def produce(start, stop):
        calls.append(1)
        return output("t", (256, 16)).produce(start, stop)

    again = plan_of(tmp_path, [output(o.name, o.shape, produce=produce) for o in outputs], split_max_tensors=1)
    existing = complete_files(again)
    assert existing == {0, 2}
    preflight(again, existing=existing)
    seen = []
    execute(again, existing=existing, progress=lambda n, name: seen.append(n))
    assert [f.path.read_bytes() for f in plan.files] == before
    assert len(calls) == 2
    assert sum(seen) == again.total_bytes
    assert plan.files[2].path.stat() == stat_before
    other = plan_of(tmp_path, [output(o.name, (256, 17)) for o in outputs], split_max_tensors=1)
    with pytest.raises(PlanError, match="is not what this job would write"):
        complete_files(other)


def test_is_complete(tmp_path):
    """Decided by the headers of all files, by what an unfinished job leaves beside them, and by the times of the inputs."""
    source = tmp_path / "source"
    source.write_bytes(b"")
    outputs = [output(f"t{i}", (256, 16)) for i in range(2)]
    plan = plan_of(tmp_path, outputs, split_max_tensors=1)
    assert not is_complete(plan, [source])
    execute(plan)
    assert is_complete(plan, [source, tmp_path / "deleted"])
    assert not is_complete(plan_of(tmp_path, [output(o.name, (256, 17)) for o in outputs], split_max_tensors=1))
    now = time.time_ns()
    for file in plan.files:
        os.utime(file.path, ns=(0, now - 60 * 10**9))
    os.utime(source, ns=(0, now - 59 * 10**9))
    assert not is_complete(plan, [source])
    os.utime(source, ns=(0, now + 3600 * 10**9))  # a clock that was wrong
    assert is_complete(plan, [source])
    assert is_complete(plan)
    journal_path(plan).write_text("")
    assert not is_complete(plan)
    journal_path(plan).unlink()
    plan.files[1].path.unlink()
    assert not is_complete(plan)
    plan.files[1].path.mkdir()
    assert not is_complete(plan)
