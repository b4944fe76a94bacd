"""The demo checkpoint, and GGUF files of it, made by the library alone."""

from types import SimpleNamespace

import pytest
from cluster_processes import processes

from ggufmill import convert_model, quantize_model
from ggufmill.pipeline.common.progress import COMPILE
from ggufmill.recipes import FOLDER


@pytest.fixture(scope="session")
def demo():
    """Paths of the demo checkpoint and its texts."""
    folder = FOLDER / "demo"
    return SimpleNamespace(model=folder, calibration=folder / "calibration.txt", heldout=folder / "heldout.txt")


@pytest.fixture(scope="session")
def models(demo, tmp_path_factory):
    """The demo model as bf16 and as q4_0, as GGUF files."""
    folder = tmp_path_factory.mktemp("models")
    convert_model(demo.model, folder / "bf16.gguf")
    quantize_model(demo.model, folder / "q4.gguf", "q4_0", pure=True)
    return SimpleNamespace(bf16=folder / "bf16.gguf", q4=folder / "q4.gguf")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The scheduler file of a cluster with two workers, a and b."""
    with processes(tmp_path_factory.mktemp("dask")) as running:
        running.worker("a")
        running.worker("b")
        running.wait_for_workers(2)
        yield str(running.file)


@pytest.fixture
def reports():
    """A list of progress reports, with `stages()` after checking that every stage only rises, up to its total."""

    class Reports(list):
        def __call__(self, progress):
            self.append(progress)

        def stages(self):
            runs = []
            for report in self:
                if report.stage == COMPILE:
                    continue  # it comes within any other
                begins = report.done == 0 and not report.share
                if begins or not runs or runs[-1][-1].stage != report.stage:
                    runs.append([])
                runs[-1].append(report)
            for run in runs:
                done = [report.done for report in run]
                assert done == sorted(done), run[0].stage
                assert run[0].done == 0
                assert all(report.total is None or report.done <= report.total for report in run)
                assert run[-1].done == run[-1].total, run[-1]
            return [run[0].stage for run in runs]

    return Reports()
