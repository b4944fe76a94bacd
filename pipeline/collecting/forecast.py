"""What collecting an importance matrix and covariances takes, said without doing it: `imatrix --dry-run`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, field
from math import ceil
from pathlib import Path
from typing import Any

from ...data_classes import dataclass
from ...imatrix.batch_sums import squaring_seconds
from ...imatrix.calibration import Calibration
from ...imatrix.collect import CollectOptions, Collector, entry_shapes, squared_numbers
from ...imatrix.covariance.collector import InputObserver
from ...imatrix.covariance.estimate import expected_seconds
from ...imatrix.covariance.inputs import Input
from ...imatrix.covariance.job import CovarianceJob
from ...imatrix.covariance.outputs import outputs_of
from ...imatrix.entries import MIN_TOKENS
from ...imatrix.files import file_size
from ...quantize.covariance.matrix.covariance_matrix import wanted_tokens
from ...quantize.covariance.matrix.triangles import triangle_size
from ...runtime import Model
from ...runtime.backends import CACHED_BYTES
from ...runtime.graph.ops import ExpertLinear
from ...simd.compile.compile_time import compilation_seconds
from ..common.forecast import Forecast, free_space
from ..common.reading import TORCH_BYTES, TORCH_STARTING, start_seconds, started_bytes, tokenising_bytes


@dataclass(frozen=True)
class GradientForecast:
    """outputs of tensors whose gradients are summed, and passes that do it, of those of the covariance; windows that are
    computed at a time; bytes of memory: for their sums (and rows that wait for them), for what is kept of the windows between
    layers, for what the threads work with, and for the weights, which need not be in memory but are slow to read again."""

    outputs: int
    passes: int
    windows_at_once: int
    sums_bytes: int
    kept_bytes: int
    working_bytes: int
    weights_bytes: int


@dataclass(frozen=True)
class Seen:
    """How many of a job's inputs (and outputs, block by block) will see enough tokens for more than their diagonals to be used.

    inputs   all; too_few: those that will not
    tokens   of the text; wanted: that would do for all of them, windows: as many as these are
    """

    inputs: int
    too_few: int
    tokens: int
    wanted: int
    windows: int

    @property
    def remark(self) -> str:
        """That some see too few, for people; '' if none does."""
        if not self.too_few:
            return ""
        return (
            f"{self.too_few} of {self.inputs} covariances will see fewer tokens than half their columns, so that only their "
            f"diagonals are used: {self.wanted:,} tokens, {self.windows:,} windows, do for all, these are {self.tokens:,}"
        )


@dataclass(frozen=True)
class ExpertForecast:
    """How many tokens the experts of a layer with the most of them will see, on average; used: experts of a token;
    wanted: tokens at the least."""

    experts: int
    used: int
    tokens: float
    wanted: int = MIN_TOKENS


@dataclass(frozen=True)
class CovarianceForecast:
    """Bytes of the file, of the sums in memory and of the state that --resume needs; inputs, and passes over the text; what
    gradients take, None if none are collected; what is seen of them."""

    inputs: int
    file_bytes: int
    sums_bytes: int
    state_bytes: int
    passes: int
    gradients: GradientForecast | None = None
    seen: Seen | None = None


@dataclass(frozen=True)
class CollectionForecast:
    """What a collection takes.

    memory_bytes  that are no file's, at the most; None: not known
    experts     what those of a layer see, None without
    entries     of the importance matrix; file_bytes: of its file, if every expert sees a token
    windows     of the text; tokens: in all of them
    covariance  the same of covariances, None if none are collected
    disk_free   bytes where the files go; None if unknown
    seconds     of running the text through the model in all passes; sum_seconds: of the sums, of squares and of covariances;
                rough estimates.
                starting: of the program, and of torch, by part
    threads     that share the work; idle: seconds of which they wait, added up
    """

    entries: int
    file_bytes: int
    windows: int
    tokens: int
    covariance: CovarianceForecast | None
    disk_free: int | None
    seconds: float
    sum_seconds: float
    experts: ExpertForecast | None = None
    memory_bytes: int | None = None
    threads: int = 1
    idle: float = 0.0
    starting: Mapping[str, float] = field(default_factory=dict)

    @property
    def disk_needed(self) -> int:
        """Bytes of all files, at the most: two states while one replaces the other."""
        more = self.covariance.file_bytes + 2 * self.covariance.state_bytes if self.covariance is not None else 0
        return self.file_bytes + more

    @property
    def forecast(self) -> Forecast:
        """Disk, memory and time alone."""
        disk, seconds = (self.disk_needed, self.disk_free), {**self.starting, "run": self.seconds, "sums": self.sum_seconds}
        return Forecast(*disk, seconds, memory=self.memory_bytes, threads=self.threads, idle=self.idle)

    def as_json(self) -> dict[str, Any]:
        """entries, file_bytes, windows, tokens, covariance (its fields, or null), disk, predicted (seconds)."""
        return {
            "entries": self.entries,
            "file_bytes": self.file_bytes,
            "windows": self.windows,
            "tokens": self.tokens,
            "experts": asdict(self.experts) if self.experts is not None else None,
            "covariance": asdict(self.covariance) if self.covariance is not None else None,
            "memory": None,
            **self.forecast.as_json(),
        }


def forecast_collection(
    model: Model, windows: Calibration, path: Path | None, options: CollectOptions, job: CovarianceJob | None
) -> CollectionForecast:
    """What collecting from these windows takes. path: of the importance matrix, None: not written; job: of covariances."""
    shapes, tokens, count = entry_shapes(model, options), windows.windows.size, len(windows.windows)
    chunks, nbytes = windows.weighted_count(count), 0
    if path is not None:
        nbytes = file_size(path.suffix, shapes, windows.datasets, chunks, windows.n_ctx)
    begun = time.process_time() - compilation_seconds()
    covariance, (seconds, sum_seconds), idle = None, expected_seconds(model, (), tokens, windows.n_ctx, 1), 0.0
    if job is not None:
        outputs = len(outputs_of(job.inputs))
        sizes = job.writer.nbytes, job.sums_bytes, job.sums_bytes
        gradients = _gradients(model, job, outputs) if outputs else None
        seen = seen_by(job)
        covariance = CovarianceForecast(len(job.inputs) - outputs, *sizes, len(job.passes), gradients, seen)
        seconds, sum_seconds, idle = job.expected_seconds()
    estimating = max(0.0, time.process_time() - compilation_seconds() - begun)  # covariances are timed alike before they begin
    threads, folder = model.workers.count, (path or Path("x")).parent
    sum_seconds += tokens * squared_numbers(model, options) * squaring_seconds() / threads
    starting = {"start": (start_seconds([model]) + (estimating if job is not None else 0.0)) / threads}
    if job is not None and job.curvature is not None:
        starting["torch"] = TORCH_STARTING / threads
    return CollectionForecast(
        len(shapes),
        nbytes,
        count,
        tokens,
        covariance,
        free_space(folder),
        seconds,
        sum_seconds,
        experts_of(model, tokens),
        _memory(model, windows, options, shapes.values(), job, covariance),
        threads,
        idle,
        starting,
    )


def _memory(
    model: Model,
    windows: Calibration,
    options: CollectOptions,
    shapes: Iterable[tuple[int, int]],
    job: CovarianceJob | None,
    covariance: CovarianceForecast | None,
) -> int | None:
    """Bytes of memory for what is summed, and for the pass with the most windows, its results included, or for the largest sum
    as it is written, when no pass is there any more; or for the pass over gradients, where that takes more, with what the model
    keeps of the pass before."""
    together = max((part.stop - part.start for part in windows.batches(model)), default=1)
    summed = [one for group in job.passes if not outputs_of(group) for one in group] if job is not None else []
    with model.observing(Collector(model, options)), model.observing(InputObserver(summed)) if summed else nullcontext():
        running = model.windows_bytes(together, windows.n_ctx)
    if running is None:
        return None
    entries = sum(matrices * columns for matrices, columns in shapes)
    most, back = running, covariance.gradients if covariance is not None else None
    if job is not None:
        folded = max(triangle_size(one.columns) for one in job.inputs) * job.writer.dtype.itemsize  # as it is written
        most = max(running, folded) + job.summing_bytes(gradients=False)
    if back is not None:
        most = TORCH_BYTES + max(most, min(CACHED_BYTES, running) + back.sums_bytes + back.kept_bytes + back.working_bytes)
    return max(tokenising_bytes([model]), started_bytes([model]) + 16 * entries + most)


def experts_of(model: Model, tokens: int) -> ExpertForecast | None:
    """What experts see of so many tokens; None for a model without."""
    stacks = [(op.weight.shape[2], op.routing.shape[0]) for op in model.graph.ops if isinstance(op, ExpertLinear)]
    if not stacks:
        return None
    experts, used = max(stacks)
    return ExpertForecast(experts, used, tokens * used / experts)


def shares(model: Model, inputs: Sequence[Input]) -> list[float]:
    """Of a text's tokens, the part that each input sees: those of experts are seen by some experts only."""
    experts = experts_of(model, 1)
    return [experts.tokens if experts is not None and one.is_stack_of_experts else 1.0 for one in inputs]


def seen_by(job: CovarianceJob) -> Seen:
    """What the inputs and outputs of a job see of its text."""
    tokens, n_ctx = job.calibration.windows.size, job.calibration.n_ctx
    wanted = [wanted_tokens(one.columns) / share for one, share in zip(job.inputs, shares(job.model, job.inputs), strict=True)]
    most = ceil(max(wanted))
    return Seen(len(wanted), sum(count > tokens for count in wanted), tokens, most, ceil(most / n_ctx))


def _gradients(model: Model, job: CovarianceJob, outputs: int) -> GradientForecast:
    run = job.gradients
    weights = sum(path.stat().st_size for path in model.stored.files)
    sizes = job.summing_bytes(gradients=True), run.kept_bytes, run.working_bytes, weights
    return GradientForecast(outputs, job.gradient_passes, run.windows_at_once, *sizes)
