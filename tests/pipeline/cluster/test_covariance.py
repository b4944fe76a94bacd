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


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """The scheduler file of a cluster with three workers."""
    with processes(tmp_path_factory.mktemp("dask")) as running:
        for name in ("a", "b", "c"):
            running.worker(name)
        running.wait_for_workers(3)
        yield str(running.file)


@pytest.mark.parametrize(("cluster", "memory", "groups"), [("local:1", None, 1), ("three", None, 3)])
def test_same_bytes(expected, tmp_path, three, cluster, memory, groups):
    reports = []
    options = {"memory": memory, "progress": lambda report: reports.append((report.done, report.total))}
    result = collect(tmp_path / "a", cluster=three if cluster == "three" else cluster, **options)
    assert contents(tmp_path / "a") == expected
    assert result.figures.chunks == 6
    assert reports[-1] == (6 * groups, 6 * groups)
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)


def test_experts_of_weighted_texts(tmp_path):
    options = {"covariance_experts": True, "covariance_bits": 32, "n_ctx": 32, "nextn": False}
    texts = [f"{TEXT}:3", str(FOLDER / "demo" / "heldout.txt")]
    for name, cluster in (("one", None), ("two", "local:2")):
        (tmp_path / name).mkdir()
        out = tmp_path / name / "a.imatrix"
        compute_imatrix(DEMO, texts, out, covariance=tmp_path / name / "a.cov", cluster=cluster, **{**RUN, **options})
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_workers_compute_no_more_gradients_at_a_time_than_their_memory_holds(monkeypatch):
    """As a single machine: a thread takes 3 GiB for some models."""
    from ggufmill.imatrix.covariance import gradient_run

    each, used = GroupCost(part=3 << 20, head=1 << 20, handed_over=1 << 20, products=0, written=0), []
    gradients = SimpleNamespace(threads=16, run=lambda *_: used.append(gradients.threads))
    monkeypatch.setattr(covariance, "models_here", lambda *_: nullcontext([None]))
    monkeypatch.setattr(covariance, "gradients_of", lambda model: gradients)
    monkeypatch.setattr(gradient_run, "group_cost", lambda *_: each)
    sums = covariance._Sums("job", 0, Mock(spec=GradientCollector, wanted=(), on_gradient=None))
    monkeypatch.setattr(covariance, "_sums_here", lambda *_: sums)
    for memory in (40 << 20, 28 << 20, 1 << 20):
        group = covariance._Group("job", 0, Mock(), (), np.dtype("i2"), memory)
        covariance._Windows(group, np.zeros((1, 8), np.int64), 0, 1, None, False).run()
    assert used == [3, 2, 1]


@pytest.mark.oracle
def test_gradients_of_weighted_texts(tmp_path):
    """Inputs and outputs are shared out, and the file is that of one machine."""
    pytest.importorskip("torch")
    options = {**RUN, "n_ctx": 32, "nextn": False, "curvature_rows": 64}
    texts = [f"{TEXT}:3", str(FOLDER / "demo" / "heldout.txt")]
    for name, cluster in (("one", None), ("two", "local:2")):
        (tmp_path / name).mkdir()
        out = tmp_path / name / "a.imatrix"
        compute_imatrix(DEMO, texts, out, curvature=tmp_path / name / "a.curv", cluster=cluster, **options)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def stop_after(state):
    """Progress that interrupts once the state is stored: windows of a cluster are added in order, and the first may be late."""

    def stop(progress):
        if state.exists():
            raise KeyboardInterrupt

    return stop


def stop_at_part(monkeypatch, number):
    """Interrupts before so many parts of the file are written."""
    write, count = CovarianceWriter.write_folded, 0

    def stopping(self, *arguments):
        nonlocal count
        count += 1
        if count == number:
            raise KeyboardInterrupt
        write(self, *arguments)

    monkeypatch.setattr(CovarianceWriter, "write_folded", stopping)


@pytest.mark.parametrize(("first", "then"), [(True, False), (True, True), (False, True)])
def test_goes_on_elsewhere(expected, tmp_path, three, first, then):
    """Interrupted while the importance matrix is collected, on a cluster or not."""
    stop = stop_after(tmp_path / "a.imatrix.state")
    with pytest.raises(KeyboardInterrupt):
        collect(tmp_path, cluster=three if first else None, output_frequency=1, progress=stop)
    collect(tmp_path, cluster=three if then else None, output_frequency=1, resume=True)
    assert contents(tmp_path) == expected


@pytest.mark.parametrize("then", [True, False])
def test_goes_on_with_the_groups_that_are_left(expected, tmp_path, three, monkeypatch, then):
    stop_at_part(monkeypatch, 20)
    with pytest.raises(KeyboardInterrupt):
        collect(tmp_path, cluster=three, memory=5 << 20)
    monkeypatch.undo()
    written = []
    write = CovarianceWriter.write_folded
    monkeypatch.setattr(CovarianceWriter, "write_folded", lambda self, *a: (written.append(a[0]), write(self, *a)))
    collect(tmp_path, cluster=three if then else None, resume=True)
    assert contents(tmp_path) == expected
    assert 0 < len(written) < 20


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_worker_is_killed(expected, tmp_path, caplog):
    folder = tmp_path / "dask"
    folder.mkdir()
    with processes(folder) as running:
        running.worker("good")
        running.worker("bad", at_first_windows(tmp_path / "marker", "os.kill(os.getpid(), signal.SIGKILL)"), "--no-nanny")
        running.wait_for_workers(2)
        collect(tmp_path / "a", cluster=str(running.file))
    assert (tmp_path / "marker").exists()
    assert contents(tmp_path / "a") == expected
    assert "worker bad at 127.0.0.1 is lost; others make its pieces again" in caplog.text
