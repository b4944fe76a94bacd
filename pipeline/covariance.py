"""Covariances of the inputs of a model's matrices, in `ggufmill imatrix`: collected, shown, merged."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import PlanError, UsageError
from ..imatrix.calibration import Calibration
from ..imatrix.collect_state import CollectState
from ..imatrix.covariance.files import Origin, open_covariance
from ..imatrix.covariance.job import BITS, CovarianceJob, CovarianceOptions, CurvatureOptions, state_path
from ..imatrix.covariance.merge import merge_files
from ..imatrix.covariance.outputs import outputs_of
from ..imatrix.covariance.statistics import InputStatistics, statistics
from ..runtime import Model
from .cluster.covariance import SharedCovariance
from .common.arguments import as_paths, check_folder, check_new, refuse_inputs
from .common.collection_forecast import seen_by
from .common.figures import duration, size_text
from .common.memory import memory_budget
from .common.messages import note, warn
from .common.progress import OnProgress, Stage, reporting
from .common.shown import shown


def check_covariance(
    out: str | Path | None,
    imatrix: Path | None,
    inputs: Sequence[Path],
    resume: bool,
    force: bool,
    has_more: bool,
    option: str = "--covariance",
) -> Path | None:
    """The file to write, after a check of what is there. has_more: whether other importance matrices are added; option: that
    named the file.

    Raises PlanError for a file that must not be written, UsageError for what cannot be combined with a covariance.
    """
    if out is None:
        return None
    path = Path(out)
    if imatrix is None:
        raise UsageError(f"{option} is written together with an importance matrix: say where that goes (-o)")
    if has_more:
        raise UsageError("--in-file adds importance matrices only: collect without it, and use `imatrix merge` afterwards")
    if path.resolve() == imatrix.resolve():
        raise PlanError(f"{path} cannot be the importance matrix and the covariance")
    state = state_path(path)
    refuse_inputs([path, state], inputs)
    if path.exists() and not force and not (resume and (state.exists() or imatrix.exists())):
        raise PlanError(f"{path} exists; use --force to replace it")
    check_folder(path)
    return path


def plan_covariance(
    model: Model,
    windows: Calibration,
    path: Path,
    experts: bool = False,
    bits: int | None = None,
    memory: int | None = None,
    *,
    on_cluster: bool = False,
    curvature: CurvatureOptions | None = None,
) -> CovarianceJob:
    """The job, of which nothing is done. on_cluster: workers do it, whose memory counts instead of this machine's. curvature:
    what is collected of gradients too.

    Raises PlanError for too little memory, a number of bits that there is not, and for gradients without torch, of a model that
    has none, or on a cluster.
    """
    if curvature is not None and on_cluster:
        raise PlanError(
            "--curvature is collected on one machine: leave out --cluster, or collect parts of the text and merge them"
        )
    if bits is not None and bits not in BITS:
        raise PlanError(f"{bits} bits for a number of a covariance; there are {' and '.join(map(str, BITS))}")
    if on_cluster:
        memory = sys.maxsize
    elif memory is None:
        memory = memory_budget(None)
    return CovarianceJob(model, windows, path, CovarianceOptions(experts, bits or 16, memory, curvature))


def begin_covariance(job: CovarianceJob, state: CollectState | None = None, *, on_cluster: bool = False) -> CovarianceJob:
    """The job, continued where `state` is that of an interrupted importance matrix. Says what it takes, unless the workers of a
    cluster are going to do it, which are not known yet.

    Raises PlanError for too little disk space, or the state of another job.
    """
    if state is None:
        job.start_afresh()
    if on_cluster:
        job.writer.check_space()
        if state is not None:
            job.resume_finished()
        return job
    job.writer.check_space(2 * job.sums_bytes)
    outputs = outputs_of(job.inputs)
    columns = [one.columns for one in job.inputs if one not in outputs]
    more = f", second moments of gradients at {len(outputs)} outputs" if outputs else ""
    passes = f"{len(job.passes)} passes over the text" if len(job.passes) > 1 else "one pass"
    running, summing = job.expected_seconds()
    note(
        f"covariance of {len(columns)} inputs of {min(columns)} to {max(columns)} columns{more}: the file takes "
        f"{size_text(job.writer.nbytes)}, the sums {size_text(job.sums_bytes)} of memory, in {passes}; "
        f"about {duration(running)} for running the text, {duration(summing)} for the sums"
    )
    if few := seen_by(job).remark:
        warn([few])
    if state is not None:
        job.resume(state.done)
    return job


def finish_covariance(job: CovarianceJob, shared: SharedCovariance | None, state_frequency: int, stage: Stage) -> None:
    """Sums and writes what is left when the importance matrix is complete. shared: the workers that do it."""
    if shared is not None:
        shared.finish(lambda: stage.reach(*shared.reached))
        return
    total = len(job.passes) * job.window_count
    while True:
        if not job.is_beside:
            before = job.number * job.window_count
            job.run_pass(state_frequency, lambda done, before=before: stage.reach(before + done, total))
        is_last = job.is_last
        job.end_pass()
        if is_last:
            return


@shown
@dataclass(frozen=True)
class MergedCovariance:
    """A covariance file that was made of others. path: where it is; inputs: how many it has; chunks: windows of all texts;
    outputs: tensors with second moments of gradients."""

    path: Path
    inputs: int
    chunks: int
    outputs: int = 0

    def as_json(self) -> dict[str, Any]:
        """What --json prints: the fields."""
        return {"path": str(self.path), "inputs": self.inputs, "outputs": self.outputs, "chunks": self.chunks}


def merge_covariance(
    files: Sequence[str | Path], out: str | Path, *, force: bool = False, progress: OnProgress | bool | None = None
) -> MergedCovariance:
    """Merges covariances that were collected from parts of a text, or from several texts, each weighed by its tokens.

    files  what `compute_imatrix` wrote to `covariance`; out: the file to write; force: an existing one is replaced
    progress  called with `Progress` reports, stage 'covariances' in bytes

    Returns a `MergedCovariance`. Raises FormatError for a file that is none or is damaged, MillError for files of different
    models.

    Example:
        >>> from ggufmill import compute_imatrix, merge_covariance
        >>> from ggufmill.recipes import FOLDER
        >>> demo, text = FOLDER / "demo", FOLDER / "demo" / "calibration.txt"
        >>> _ = compute_imatrix(demo, text, "1.imatrix", covariance="1.cov", n_ctx=64, chunks=1, force=True)
        >>> _ = compute_imatrix(demo, text, "2.imatrix", covariance="2.cov", n_ctx=64, chunks=1, from_chunk=1, force=True)
        >>> merge_covariance(["1.cov", "2.cov"], "both.cov", force=True).chunks
        2
    """
    out = Path(out)
    opened = [open_covariance(path) for path in files]
    refuse_inputs([out], as_paths(files))
    check_new(out, force)
    with reporting(progress) as report:
        stage = Stage(report, "covariances")
        writer = merge_files(opened, out, lambda done, total, name: stage.reach(done, total, name))
    merged = open_covariance(writer.path)
    return MergedCovariance(out, len(merged.inputs), merged.model.chunk_count, len(merged.outputs))


@shown
@dataclass(frozen=True)
class CovarianceStatistics:
    """Statistics of a covariance file.

    path, nbytes  the file and its size
    model         what it was collected from
    inputs        an `InputStatistics` for each
    """

    path: Path
    nbytes: int
    model: Origin
    inputs: list[InputStatistics]

    def as_json(self) -> dict[str, Any]:
        """What --json prints: path, nbytes, architecture, model, datasets, chunk_count, chunk_size, inputs."""
        origin = {**asdict(self.model), "datasets": list(self.model.datasets)}
        return {"path": str(self.path), "nbytes": self.nbytes, **origin, "inputs": [asdict(one) for one in self.inputs]}


def show_covariance(file: str | Path, *, progress: OnProgress | bool | None = None) -> CovarianceStatistics:
    """Reads a covariance file: of every input its size, the tokens seen, and how correlated its columns are.

    progress: called with `Progress` reports, stage 'covariances' in bytes

    Returns a `CovarianceStatistics`. Raises FormatError for a file that is none, or is damaged.

    Example:
        >>> from ggufmill import compute_imatrix, show_covariance
        >>> from ggufmill.recipes import FOLDER
        >>> demo, text = FOLDER / "demo", FOLDER / "demo" / "calibration.txt"
        >>> _ = compute_imatrix(demo, text, "demo.imatrix", covariance="demo.cov", n_ctx=64, chunks=1, force=True)
        >>> first = show_covariance("demo.cov").inputs[0]
        >>> first.name, first.columns
        ('output.weight', 256)
    """
    opened = open_covariance(file)
    with reporting(progress) as report:
        stage = Stage(report, "covariances", sum(stored.nbytes for stored, _ in opened.entries.values()))
        return CovarianceStatistics(
            opened.path, opened.path.stat().st_size, opened.model, list(statistics(opened, stage.advance))
        )
