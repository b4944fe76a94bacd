"""Covariances of the inputs of a model's matrices, in `ggufmill imatrix`: collected beside an importance matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ..errors import PlanError, UsageError
from ..imatrix.calibration import Calibration
from ..imatrix.collect_state import CollectState
from ..imatrix.covariance.job import BITS, CovarianceJob, CovarianceOptions, state_path
from ..runtime import Model
from ..runtime.available_memory import free_bytes
from .common.arguments import check_folder, refuse_inputs
from .common.messages import gib, note

_MEMORY = 8 << 30  # for sums, where the system does not say what is free


def check_covariance(
    out: str | Path | None, imatrix: Path | None, inputs: Sequence[Path], resume: bool, force: bool, has_more: bool
) -> Path | None:
    """The file to write, after a check of what is there. has_more: whether other importance matrices are added.

    Raises PlanError for a file that must not be written, UsageError for what cannot be combined with a covariance.
    """
    if out is None:
        return None
    path = Path(out)
    if imatrix is None:
        raise UsageError("--covariance is written beside an importance matrix: say where that goes (-o)")
    if has_more:
        raise UsageError("--in-file adds importance matrices only: collect without it, and use `imatrix merge` afterwards")
    if path.resolve() == imatrix.resolve():
        raise PlanError(f"{path} cannot be the importance matrix and the covariance")
    state = state_path(path)
    refuse_inputs([path, state], inputs)
    if path.exists() and not force and not (resume and state.exists()):
        raise PlanError(f"{path} exists; use --force to replace it")
    check_folder(path)
    return path


def begin_covariance(
    model: Model,
    windows: Calibration,
    path: Path,
    experts: bool,
    bits: int | None,
    memory: int | None,
    state: CollectState | None,
) -> CovarianceJob:
    """The job, continued where `state` is that of an interrupted importance matrix. Says what it takes.

    Raises PlanError for too little disk space or memory, or the state of another job.
    """
    if bits is not None and bits not in BITS:
        raise PlanError(f"{bits} bits for a number of a covariance; there are {' and '.join(map(str, BITS))}")
    if memory is None:
        free = free_bytes()
        memory = free // 2 if free is not None else _MEMORY
    job = CovarianceJob(model, windows, path, CovarianceOptions(experts, bits or 16, memory))
    if state is None:
        job.start_afresh()
    job.writer.check_space(2 * job.sums_bytes)
    columns = [one.columns for one in job.inputs]
    passes = f"{len(job.passes)} passes over the text" if len(job.passes) > 1 else "one pass"
    note(
        f"covariance of {len(columns)} inputs of {min(columns)} to {max(columns)} columns: the file takes "
        f"{gib(job.writer.nbytes)}, the sums {gib(job.sums_bytes)} of memory, in {passes}"
    )
    if state is not None:
        job.resume(state.done)
    return job


def finish_passes(job: CovarianceJob, state_frequency: int, on_window: Callable[[int], None]) -> None:
    """Ends the pass that has run, and runs the others. on_window: called with the windows that are done in all passes."""
    while True:
        if job.number:
            before = job.number * job.window_count
            job.run_pass(state_frequency, lambda done, before=before: on_window(before + done))
        is_last = job.is_last
        job.end_pass()
        if is_last:
            return
