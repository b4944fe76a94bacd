"""Covariances that worker processes collect: the bytes of one machine, whatever is lost or interrupted on the way."""

import os
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

pytest.importorskip("distributed")

from cluster_processes import at_first_windows, processes

from ggufmill.imatrix.covariance.gradient_collector import GradientCollector
from ggufmill.imatrix.covariance.job import CovarianceJob
from ggufmill.imatrix.covariance.writer import CovarianceWriter
from ggufmill.pipeline.cluster import covariance
from ggufmill.pipeline.imatrix import compute_imatrix
from ggufmill.recipes import FOLDER
from ggufmill.runtime.output_gradients import GroupCost

pytestmark = pytest.mark.process

DEMO, TEXT = FOLDER / "demo", FOLDER / "demo" / "calibration.txt"
RUN = {"n_ctx": 96, "chunks": 6, "batch": 192, "output_frequency": 2, "progress": False}


def collect(folder, **options):
    folder.mkdir(exist_ok=True)
    return compute_imatrix(DEMO, TEXT, folder / "a.imatrix", covariance=folder / "a.cov", **{**RUN, **options})


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    collect(folder)
    return contents(folder)


@pytest.mark.parametrize(("workers", "groups"), [("local:1", 1), ("two", 2)])
def test_same_bytes(expected, tmp_path, cluster, workers, groups):
    reports = []
    options = {"progress": lambda report: reports.append((report.done, report.total))}
    result = collect(tmp_path / "a", cluster=cluster if workers == "two" else workers, **options)
    assert contents(tmp_path / "a") == expected
    assert result.figures.chunks == 6
    assert reports[-1] == (6 * groups, 6 * groups)
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)


def check_weighted_texts(folder, kind, cluster, **options):
    """Three windows of a text with a weight, then those of another."""
    (folder / "short.txt").write_text(TEXT.read_text("utf-8")[:400])
    texts, options = [f"{folder}/short.txt:3", str(FOLDER / "demo" / "heldout.txt")], {"n_ctx": 32, "nextn": False} | options
    for name, where in (("one", None), ("two", cluster)):
        (folder / name).mkdir()
        files = {kind: folder / name / "a.cov"}
        compute_imatrix(DEMO, texts, folder / name / "a.imatrix", cluster=where, **{**RUN, **files, **options})
    assert contents(folder / "one") == contents(folder / "two")


def test_experts_of_weighted_texts(tmp_path, cluster):
    check_weighted_texts(tmp_path, "covariance", cluster, covariance_experts=True, covariance_bits=32)


def test_workers_compute_no_more_gradients_at_a_time_than_their_memory_holds(monkeypatch):
    """As a single machine: a thread takes 3 GiB for some models."""
    from ggufmill.imatrix.covariance import gradient_run

    each, used = GroupCost(part=3 << 20, head=1 << 20, handed_over=1 << 20, products=0, written=0), []
    gradients = SimpleNamespace(threads=16, run=lambda *_: used.append(gradients.threads))
    monkeypatch.setattr(covariance, "models_here", lambda *_: nullcontext([None]))
    monkeypatch.setattr(covariance, "gradients_of", lambda model: gradients)
    monkeypatch.setattr(gradient_run, "group_cost", lambda *_: each)
    collector = Mock(spec=GradientCollector, wanted=(), on_gradient=None)
    monkeypatch.setattr(covariance, "_sums_here", lambda group, *_: covariance._Sums(group.job, 0, collector))
    for memory in (40 << 20, 28 << 20, 1 << 20):
        group = covariance._Group("job", 0, Mock(), (), np.dtype("i2"), memory)
        covariance._Windows(group, np.zeros((1, 8), np.int64), 0, 1, None, False).run()
    assert used == [3, 2, 1]


@pytest.mark.oracle
def test_gradients_of_weighted_texts(tmp_path, cluster):
    """Inputs and outputs are shared out, and the file is that of one machine."""
    pytest.importorskip("torch")
    check_weighted_texts(tmp_path, "curvature", cluster, curvature_rows=64)


def stop_after(state):
    """Progress that interrupts once the state is stored: windows of a cluster are added in order, and the first may be late."""

    def stop(progress):
        if state.exists():
            raise KeyboardInterrupt

    return stop


def stop_at_first_group(monkeypatch):
    """Interrupts once the first group is recorded, whichever that is. Returns what has the names of its inputs then."""
    record, finished = CovarianceJob.record_finished, []

    def stopping(self, names):
        record(self, names)
        finished.extend(names)
        raise KeyboardInterrupt

    monkeypatch.setattr(CovarianceJob, "record_finished", stopping)
    return finished


@pytest.mark.parametrize(("first", "then"), [(True, False), (True, True), (False, True)])
def test_goes_on_elsewhere(expected, tmp_path, cluster, first, then):
    """Interrupted while the importance matrix is collected, on a cluster or not."""
    stop = stop_after(tmp_path / "a.imatrix.state")
    with pytest.raises(KeyboardInterrupt):
        collect(tmp_path, cluster=cluster if first else None, output_frequency=1, progress=stop)
    collect(tmp_path, cluster=cluster if then else None, output_frequency=1, resume=True)
    assert contents(tmp_path) == expected


@pytest.mark.parametrize("then", [True, False])
def test_goes_on_with_the_groups_that_are_left(expected, tmp_path, cluster, monkeypatch, then):
    finished = stop_at_first_group(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        collect(tmp_path, cluster=cluster, memory=5 << 20)
    monkeypatch.undo()
    written = []
    write = CovarianceWriter.write_folded
    monkeypatch.setattr(CovarianceWriter, "write_folded", lambda self, *a: (written.append(a[0]), write(self, *a)))
    collect(tmp_path, cluster=cluster if then else None, resume=True)
    assert contents(tmp_path) == expected
    assert finished
    assert written
    assert not set(finished) & set(written)


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_worker_is_killed(expected, tmp_path, caplog):
    folder = tmp_path / "dask"
    folder.mkdir()
    with processes(folder) as running:
        running.worker("good")
        running.worker("bad", at_first_windows(tmp_path / "marker", "os.kill(os.getpid(), signal.SIGKILL)"))
        running.wait_for_workers(2)
        collect(tmp_path / "a", cluster=str(running.file))
    assert (tmp_path / "marker").exists()
    assert contents(tmp_path / "a") == expected
    assert "worker bad at 127.0.0.1 is lost; others make its pieces again" in caplog.text
