"""What a number of effort stands for: how much text, which statistics, how wide a search."""

from __future__ import annotations

import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from ...data_classes import dataclass
from ...errors import PlanError, installation
from ...imatrix.calibration import Calibration
from ...imatrix.covariance.job import CovarianceJob, CurvatureOptions
from ...runtime import Model
from ..collecting.moments import plan_covariance
from ..common.figures import size_text
from ..common.messages import note


@dataclass(frozen=True)
class Effort:
    """What is done at a level of effort.

    number     --effort, which with covariance or curvature is that of `quantize` too
    data       '', 'imatrix', 'covariance' (with an imatrix) or 'curvature' (with both)
    windows    of calibration text, None: all
    search     keys of [search] beside text and ctx
    judged     windows of held-out text, None: all
    """

    number: int
    data: str
    windows: int | None
    search: dict[str, int]
    judged: int | None

    @property
    def needs_text(self) -> bool:
        """Whether calibration text is read."""
        return self.data != ""


LEVELS = (
    Effort(0, "", 0, {"rows": 32}, 16),
    Effort(1, "imatrix", 50, {"rows": 32, "chunks": 2, "measurements": 16}, 16),
    Effort(2, "covariance", 100, {"rows": 64, "chunks": 4, "measurements": 32}, 32),
    Effort(3, "curvature", 200, {"rows": 64, "chunks": 8, "measurements": 64}, 64),
    Effort(4, "curvature", None, {"rows": 64, "chunks": 8, "measurements": 128, "refine": 1}, None),
)
_MOST_PASSES = 8  # over the text, where memory for sums is short
_DISK_SHARE = 0.5  # of what is free, for a file of second moments


class PlannedCollection(NamedTuple):
    """The level with what this machine can collect, and the collection of second moments, of which nothing is done."""

    level: Effort
    job: CovarianceJob | None


def plan_collection(
    level: Effort, model: Model, windows: Calibration, folder: Path, *, on_cluster: bool = False
) -> PlannedCollection:
    """What can be collected: curvature needs torch, and its file and that of covariances have to fit the disk, their sums the
    memory. What is left out is a note."""
    wanted = {"curvature": ("curvature", "covariance"), "covariance": ("covariance",)}.get(level.data, ())
    for data in wanted:
        try:
            job = _planned(data, model, windows, folder, on_cluster)
        except PlanError as error:
            note(f"note: without {data}: {error}")
        else:
            return PlannedCollection(replace(level, data=data), job)
    return PlannedCollection(replace(level, data="imatrix") if wanted else level, None)


def _planned(data: str, model: Model, windows: Calibration, folder: Path, on_cluster: bool) -> CovarianceJob:
    """Raises PlanError where it cannot be collected."""
    if data == "curvature" and find_spec("torch") is None:
        raise PlanError(f"it needs torch ({installation('torch')})")
    curvature = CurvatureOptions() if data == "curvature" else None
    job = plan_covariance(model, windows, folder / "planned", on_cluster=on_cluster, curvature=curvature)
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free, needed = shutil.disk_usage(there).free, job.writer.nbytes + 2 * job.sums_bytes
    if needed > _DISK_SHARE * free:
        raise PlanError(f"its file would take {size_text(needed)} of the {size_text(free)} that are free on the disk")
    if len(job.passes) > _MOST_PASSES:
        raise PlanError(f"with this memory the text would be read {len(job.passes)} times")
    return job
