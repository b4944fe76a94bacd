"""Collections in several passes, killed at any step and resumed: the files have the same bytes."""

import shutil

import numpy as np
import pytest
from killed_collections import STEPS, Killed, collect_though_killed

from ggufmill import compute_imatrix
from ggufmill.convert import open_source
from ggufmill.errors import FormatError, PlanError, UsageError
from ggufmill.imatrix.calibration import TextSegment, cut_windows
from ggufmill.imatrix.covariance import open_covariance
from ggufmill.imatrix.covariance.inputs import covariance_inputs
from ggufmill.imatrix.covariance.job import CovarianceJob, CovarianceOptions, split_into_passes
from ggufmill.imatrix.covariance.writer import CovarianceWriter
from ggufmill.recipes import FOLDER
from ggufmill.runtime import load_model

DEMO, TEXT = FOLDER / "demo", FOLDER / "demo/calibration.txt"
RUN = {"n_ctx": 96, "chunks": 6, "batch": 192, "threads": 2, "output_frequency": 2, "progress": False}
MEMORY = 9 << 20  # three passes


def collect(folder, **options):
    return compute_imatrix(DEMO, TEXT, folder / "a.imatrix", covariance=folder / "a.cov", **RUN, **options)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The bytes of both files after one pass."""
    folder = tmp_path_factory.mktemp("expected")
    result = collect(folder, memory="1G")
    assert result.as_json()["covariance"] == str(folder / "a.cov")
    assert sorted(path.name for path in folder.iterdir()) == ["a.cov", "a.imatrix"]
    return {name: (folder / name).read_bytes() for name in ("a.cov", "a.imatrix")}


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_passes_do_not_change_the_covariance(expected, tmp_path):
    reports = []
    options = {**RUN, "progress": lambda report: reports.append((report.done, report.total))}
    compute_imatrix(DEMO, TEXT, tmp_path / "a.imatrix", covariance=tmp_path / "a.cov", memory=MEMORY, **options)
    assert reports[-1] == (18, 18)
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)
    a, b = (open_covariance(path) for path in (tmp_path / "a.cov", write(tmp_path / "b.cov", expected["a.cov"])))
    assert a.inputs.keys() == b.inputs.keys()
    for name in a.inputs:
        assert np.array_equal(a.covariance_of(name).matrix, b.covariance_of(name).matrix), name


def write(path, data):
    path.write_bytes(data)
    return path


@pytest.mark.slow(keep=["CovarianceJob-commit_state-*", "CovarianceWriter-write-*"])
@pytest.mark.parametrize(
    ("owner", "step", "memory"),
    [(*step, MEMORY) for step in STEPS] + [(*step, "1G") for step in STEPS[:3]],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_killed_at_any_step(expected, tmp_path, monkeypatch, owner, step, memory):
    """Killed before the first call of a step, after the third, and before the sixth, and resumed each time."""
    collect_though_killed(
        monkeypatch, owner, step, tmp_path / "a.cov", lambda resume: collect(tmp_path, memory=memory, resume=resume)
    )
    assert contents(tmp_path) == expected


@pytest.mark.slow
def test_a_state_of_another_job_is_refused(expected, tmp_path, monkeypatch):
    monkeypatch.setattr(CovarianceWriter, "write", lambda *arguments: (_ for _ in ()).throw(Killed))
    with pytest.raises(Killed):
        collect(tmp_path, memory=MEMORY)
    monkeypatch.undo()
    with pytest.raises(PlanError, match="summed the covariance of another job"):
        collect(tmp_path, memory=MEMORY, resume=True, covariance_bits=32)
    with pytest.raises(PlanError, match="is left from an interrupted run"):
        collect(tmp_path, memory=MEMORY)
    state = tmp_path / "a.cov.state"
    data = bytearray(state.read_bytes())
    data[len(data) // 2] ^= 1
    state.write_bytes(data)
    with pytest.raises(FormatError, match=r"a\.cov\.state: not the state of a collection, or damaged"):
        collect(tmp_path, memory=MEMORY, resume=True)
    state.unlink()
    with pytest.raises(PlanError, match="the covariance of the 6 windows that the interrupted run had does not exist"):
        collect(tmp_path, memory=MEMORY, resume=True)
    collect(tmp_path, memory="1G", force=True)
    assert contents(tmp_path) == expected


def test_what_cannot_be_asked_for(tmp_path, monkeypatch):
    job = {"text": TEXT, "out": tmp_path / "a.imatrix", **RUN}
    cases = [
        ({"covariance_experts": True}, UsageError, "--covariance-experts"),
        ({"memory": "1G"}, UsageError, "--memory"),
        ({"covariance": tmp_path / "a.imatrix"}, PlanError, "cannot be the importance matrix and the covariance"),
        ({"covariance": TEXT}, PlanError, "is an input of this job"),
        ({"covariance": tmp_path / "a.cov", "covariance_bits": 8}, PlanError, "8 bits for a number of a covariance"),
        (
            {"covariance": tmp_path / "a.cov", "memory": "1M"},
            PlanError,
            r"takes [\d,]+ bytes while it is summed, more than the",
        ),
        ({"covariance": tmp_path / "no/a.cov"}, PlanError, "not a folder that can be written to"),
    ]
    for options, kind, message in cases:
        with pytest.raises(kind, match=message):
            compute_imatrix(DEMO, **job, **options)
    with pytest.raises(UsageError, match="say where that goes"):
        compute_imatrix(DEMO, TEXT, covariance=tmp_path / "a.cov", **RUN)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    with pytest.raises(PlanError, match="bytes too few free"):
        compute_imatrix(DEMO, covariance=tmp_path / "a.cov", **job)
    assert not list(tmp_path.iterdir())


def test_groups_of_inputs():
    model = load_model(open_source(DEMO))
    inputs = covariance_inputs(model.graph, experts=True)
    needed = sum(one.sums_bytes for one in inputs)
    for n_ctx in (512, 96):
        groups = split_into_passes(inputs, needed // 2, n_ctx)
        assert [one for group in groups for one in group] == inputs
        assert all(sum(one.sums_bytes for one in group) <= needed // 2 for group in groups)
    assert len(split_into_passes(inputs, 4 * needed, 512)) == 1


def test_expected_size(tmp_path):
    """The size that is said before work starts is that of the file."""
    model = load_model(open_source(DEMO))
    windows = cut_windows(model, [TextSegment(np.arange(300) % 1000)], 96)
    job = CovarianceJob(model, windows, tmp_path / "a.cov", CovarianceOptions(experts=True, bits=32))
    job.end_pass()
    job.finish()
    assert (tmp_path / "a.cov").stat().st_size == job.writer.nbytes


@pytest.mark.slow
def test_importance_matrix_does_not_depend_on_what_is_summed_beside_it(expected, tmp_path):
    """Inputs per head are asked for in every pass: sums of squares that a backend has without them are rounded otherwise."""
    whole = (tmp_path / "whole").mkdir() or collect(tmp_path / "whole", memory="1G")
    parts = (tmp_path / "parts").mkdir() or collect(tmp_path / "parts", memory=4 << 20)
    assert any(name.endswith("attn_v_b.weight") for name in whole.imatrix.entries)
    assert (tmp_path / "whole" / "a.imatrix").read_bytes() == (tmp_path / "parts" / "a.imatrix").read_bytes()
    assert parts.figures.chunks == 6
