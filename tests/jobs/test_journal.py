"""The journal of a job: what is believed of it, and whom it keeps out."""

import json
import os

import numpy as np
import pytest
from planned_jobs import failing, interrupted_plan, output, plan_of

from ggufmill.formats import MillError, PlanError, open_gguf
from ggufmill.jobs.execute import execute
from ggufmill.jobs.journal import Journal, journal_path
from ggufmill.jobs.preflight import preflight
from ggufmill.operating_system import files


def test_resume_verifies_the_journal(tmp_path):
    """Tensors whose bytes a power cut lost are written again, an incomplete last line of the journal is dropped."""
    outputs = [output("a", (256, 16)), output("b", (256, 16)), output("c", (256, 16), produce=failing(0))]
    with pytest.raises(MillError):
        execute(plan_of(tmp_path, outputs), threads=1)
    plan = plan_of(tmp_path, [output(n, (256, 16)) for n in "abc"])
    part = tmp_path / "out.gguf.part"
    with part.open("r+b") as file:
        file.seek(plan.locations[0].offset + 100)
        file.write(b"\x77\x77")
    with journal_path(plan).open("a") as journal:
        journal.write('{"tensor": "c", "xx')
    assert execute(plan, resume=True).resumed == 1
    data = open_gguf(tmp_path / "out.gguf").tensors
    assert all(np.array_equal(data[o.name].data, o.produce(0, 16)) for o in plan.outputs)


@pytest.mark.parametrize("kept", [0, 60, 180])
def test_a_journal_of_which_a_power_cut_lost_some_bytes(tmp_path, kept):
    """They read as zeros; what comes before is still true."""
    with pytest.raises(MillError):
        execute(plan_of(tmp_path, [output("a", (256, 16)), output("b", (256, 16), produce=failing(0))]), threads=1)
    plan = plan_of(tmp_path, [output(n, (256, 16)) for n in "ab"])
    journal = journal_path(plan).read_bytes()
    journal_path(plan).write_bytes(journal[:kept] + bytes(40) + journal[kept + 40 :])
    execute(plan, resume=True)
    data = open_gguf(tmp_path / "out.gguf").tensors
    assert all(np.array_equal(data[o.name].data, o.produce(0, 16)) for o in plan.outputs)


@pytest.mark.parametrize("events", [("complete",), ("synced", "complete")])
def test_a_journal_that_calls_itself_complete_too_early(tmp_path, events):
    shapes = {f"t{i}": (256, 16) for i in range(4)}
    broken = plan_of(tmp_path, [output(n, shape, produce=failing(0) if n == "t2" else None) for n, shape in shapes.items()])
    with pytest.raises(MillError, match="are kept"):
        execute(broken, threads=1)
    with journal_path(broken).open("a") as journal:
        journal.writelines(json.dumps({"event": event}) + "\n" for event in events)
    plan = plan_of(tmp_path, [output(name, shape) for name, shape in shapes.items()])
    assert 0 < execute(plan, resume=True).resumed < 4
    written = plan.files[0].path.read_bytes()
    (tmp_path / "new").mkdir()
    assert written == execute(plan_of(tmp_path / "new", plan.outputs)).paths[0].read_bytes()


def test_other_code_does_not_continue_a_job(tmp_path, monkeypatch):
    plan = interrupted_plan(tmp_path)
    monkeypatch.setattr("ggufmill.jobs.journal.code_digest", lambda: "another")
    with pytest.raises(PlanError, match="other code of this program"):
        execute(plan, resume=True)


def test_the_lock_of_a_journal_that_was_removed_protects_nothing(tmp_path, monkeypatch):
    """A job opens the journal, waits, and locks it when the first job has ended and a third one has begun."""
    plan, real = plan_of(tmp_path, [output("a", (256, 16))]), files.lock_file
    journals = []

    def lock(file, **options):
        monkeypatch.setattr("ggufmill.jobs.lock.lock_file", real)
        journal_path(plan).unlink()
        journals.append(Journal(plan))  # of the third job
        return real(file, **options)

    monkeypatch.setattr("ggufmill.jobs.lock.lock_file", lock)
    with pytest.raises(PlanError, match="another job is writing"):
        Journal(plan)
    journals[0].close()


def test_a_journal_that_somebody_deletes_does_not_fail_the_job(tmp_path):
    def produce(start, stop):
        journal_path(plan).unlink(missing_ok=True)
        return np.zeros((stop - start, 1024), np.uint8)

    plan = plan_of(tmp_path, [output("a", (256, 16), produce=produce)])
    execute(plan)
    assert os.listdir(tmp_path) == ["out.gguf"]


@pytest.mark.parametrize("junk", [b"junk\n", b"[]\n", b"\xff\xfe\n", b'{"a": 1}\n', b'{"fingerprint": "x"}\n5\n'])
def test_a_damaged_journal(tmp_path, junk):
    plan = plan_of(tmp_path, [output("a", (256, 16))])
    journal_path(plan).write_bytes(junk)
    with pytest.raises(PlanError, match="damaged|another source"):
        execute(plan, resume=True)
    preflight(plan, force=True)
    execute(plan, force=True)
    assert (tmp_path / "out.gguf").exists()


def test_two_jobs_do_not_write_one_file(tmp_path):
    inner = []

    def produce(start, stop):
        if not inner:
            inner.append(1)
            with pytest.raises(PlanError, match="another job is writing"):
                preflight(plan_of(tmp_path, [output("a", (256, 16))]))
            with pytest.raises(PlanError, match="another job is writing"):
                execute(plan_of(tmp_path, [output("a", (256, 16))]), threads=1)
        return np.zeros((stop - start, 1024), np.uint8)

    execute(plan_of(tmp_path, [output("a", (256, 16), produce=produce)]), threads=1)
    assert inner
