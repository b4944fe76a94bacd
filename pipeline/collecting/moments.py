"""Second moments of a model's inputs, and of gradients at its outputs, beside an importance matrix: checked, planned, begun."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ...errors import MillError, PlanError, UsageError
from ...imatrix.calibration import Calibration
from ...imatrix.collect_state import CollectState
from ...imatrix.covariance.inputs import Input
from ...imatrix.covariance.job import BITS, CovarianceJob, CovarianceOptions, CurvatureOptions, state_path
from ...imatrix.covariance.outputs import MatrixOutput, outputs_of
from ...quantize.covariance.matrix.covariance_matrix import Covariance
from ...quantize.covariance.source import CollectedInput, CollectedOutput, Covariances, Curvature, PreparedCache
from ...runtime import Model
from ..cluster.covariance import SharedCovariance
from ..common.arguments import check_folder, refuse_inputs
from ..common.figures import duration, size_text
from ..common.memory import memory_budget
from ..common.messages import note, warn
from ..common.progress import Stage
from .forecast import seen_by, shares


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

    Raises PlanError for too little memory, a number of bits that there is not, and for gradients without torch, or of a model
    that has none.
    """
    if bits is not None and bits not in BITS:
        raise PlanError(f"{bits} bits for a number of a covariance; there are {' and '.join(map(str, BITS))}")
    if on_cluster:
        memory = sys.maxsize
    elif memory is None:
        memory = memory_budget(None)
    return CovarianceJob(model, windows, path, CovarianceOptions(experts, bits or 16, memory, curvature))


def expected_covariances(model: Model, inputs: Sequence[Input], windows: Calibration, path: Path, effort: int) -> Covariances:
    """What is known of covariances (and, with outputs, of curvature) before these inputs are collected from these windows into
    a file: for plans and forecasts. Nothing can be encoded with them."""
    tokens, outputs = windows.windows.size, {one.weight: one for one in outputs_of(inputs)}
    seen = {one.name: int(share * tokens) for one, share in zip(inputs, shares(model, inputs), strict=True)}
    of_tensor = {name: one for one in inputs if not isinstance(one, MatrixOutput) for name in one.tensors}

    def input_of(name: str) -> CollectedInput | None:
        one = of_tensor.get(name)
        return CollectedInput(one.columns, np.full(one.matrices, seen[one.name]), one.columns**2) if one is not None else None

    def output_of(name: str) -> CollectedOutput | None:
        one = outputs.get(name)
        return CollectedOutput(one.blocks, np.full((one.stack, one.blocks.count), seen[one.name])) if one is not None else None

    def gradient_of(name: str, matrix: int, block: int) -> Covariance:
        raise MillError(f"{path}: nothing is collected yet")

    def key_of(name: str, matrix: int) -> tuple[str, int]:
        one = of_tensor.get(name)
        return (name, 0) if one is None else (one.name, matrix if one.matrices > 1 else 0)

    metadata = {
        "quantize.covariance.file": path.name,
        "quantize.covariance.dataset": ", ".join(windows.datasets),
        "quantize.covariance.entries_count": np.int32(len(of_tensor)),
        "quantize.covariance.chunks_count": np.int32(len(windows.windows)),
    }
    cache = PreparedCache(lambda name, matrix: None, memory_budget(None), key_of=key_of, retains=True)
    return Covariances(
        input_of, cache, "", metadata, effort, curvature=Curvature(output_of, gradient_of, tokens) if outputs else None
    )


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
    running, summing, _ = job.expected_seconds()
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


def time_shares(job: CovarianceJob) -> Callable[[float], float]:
    """Windows of all passes -> share of their time. A pass over gradients takes many times what others take."""
    seconds, count = job.pass_seconds(), job.window_count

    def passed(done: float) -> float:
        number = min(int(done // count), len(seconds) - 1)
        return (sum(seconds[:number]) + seconds[number] * (done / count - number)) / sum(seconds)

    return passed


def finish_covariance(job: CovarianceJob, shared: SharedCovariance | None, state_frequency: int, stage: Stage) -> None:
    """Sums and writes what is left when the importance matrix is complete. shared: the workers that do it."""
    if shared is not None:
        shared.finish(lambda: stage.reach(*shared.reached))
        return
    total = len(job.passes) * job.window_count
    while True:
        if not job.is_beside:
            before = job.number * job.window_count
            stage.time_from(before + job.windows)
            job.run_pass(state_frequency, lambda done, before=before: stage.reach_share(before + done, total))
        is_last = job.is_last
        job.end_pass(lambda name: stage.within(0, f"writing {name}"))
        if is_last:
            return
