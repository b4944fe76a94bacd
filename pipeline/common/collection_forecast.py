"""What collecting an importance matrix and covariances takes, said without doing it: `imatrix --dry-run`."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...imatrix.calibration import Calibration
from ...imatrix.collect import CollectOptions, entry_shapes
from ...imatrix.covariance.estimate import expected_seconds
from ...imatrix.covariance.job import CovarianceJob
from ...imatrix.covariance.outputs import outputs_of
from ...imatrix.files import file_size
from ...runtime import Model


@dataclass(frozen=True)
class GradientForecast:
    """outputs of tensors whose gradients are summed, and passes that do it, of those of the covariance; windows that are
    computed at a time; bytes of memory beside sums: for what is kept of these between layers, for what the threads work with,
    and for the weights, which need not be in memory but are slow to read again."""

    outputs: int
    passes: int
    windows_at_once: int
    kept_bytes: int
    working_bytes: int
    weights_bytes: int


@dataclass(frozen=True)
class CovarianceForecast:
    """Bytes of the file, of the sums in memory and of the state that --resume needs; inputs, and passes over the text; what
    gradients take, None if none are collected."""

    inputs: int
    file_bytes: int
    sums_bytes: int
    state_bytes: int
    passes: int
    gradients: GradientForecast | None = None

    @property
    def memory_bytes(self) -> int:
        """Of everything that has to be in memory at a time, but for the weights."""
        more = self.gradients.kept_bytes + self.gradients.working_bytes if self.gradients is not None else 0
        return self.sums_bytes + more


@dataclass(frozen=True)
class CollectionForecast:
    """What a collection takes.

    entries     of the importance matrix; file_bytes: of its file, if every expert sees a token
    windows     of the text; tokens: in all of them
    covariance  the same of covariances, None if none are collected
    disk_free   bytes where the files go
    seconds     of running the text through the model in all passes; sum_seconds: of the sums of covariances; rough estimates
    """

    entries: int
    file_bytes: int
    windows: int
    tokens: int
    covariance: CovarianceForecast | None
    disk_free: int
    seconds: float
    sum_seconds: float

    @property
    def disk_needed(self) -> int:
        """Bytes of all files, at the most: two states while one replaces the other."""
        more = self.covariance.file_bytes + 2 * self.covariance.state_bytes if self.covariance is not None else 0
        return self.file_bytes + more

    def as_json(self) -> dict[str, Any]:
        """entries, file_bytes, windows, tokens, covariance (its fields, or null), disk, predicted (seconds)."""
        return {
            "entries": self.entries,
            "file_bytes": self.file_bytes,
            "windows": self.windows,
            "tokens": self.tokens,
            "covariance": asdict(self.covariance) if self.covariance is not None else None,
            "disk": {"needed": self.disk_needed, "free": self.disk_free},
            "predicted": {"seconds": self.seconds + self.sum_seconds, "run": self.seconds, "sums": self.sum_seconds},
        }


def forecast_collection(
    model: Model, windows: Calibration, path: Path | None, options: CollectOptions, job: CovarianceJob | None
) -> CollectionForecast:
    """What collecting from these windows takes. path: of the importance matrix, None: not written; job: of covariances."""
    shapes, tokens, count = entry_shapes(model, options), windows.windows.size, len(windows.windows)
    chunks, nbytes = windows.weighted_count(count), 0
    if path is not None:
        nbytes = file_size(path.suffix, shapes, windows.datasets, chunks, windows.n_ctx)
    covariance, (seconds, sum_seconds) = None, expected_seconds(model, (), tokens, 1)
    if job is not None:
        outputs = len(outputs_of(job.inputs))
        sizes = job.writer.nbytes, job.sums_bytes, job.sums_bytes
        gradients = _gradients(model, job, outputs) if outputs else None
        covariance = CovarianceForecast(len(job.inputs) - outputs, *sizes, len(job.passes), gradients)
        seconds, sum_seconds = job.expected_seconds()
    free = shutil.disk_usage((path or Path()).resolve().parent).free
    return CollectionForecast(len(shapes), nbytes, count, tokens, covariance, free, seconds, sum_seconds)


def _gradients(model: Model, job: CovarianceJob, outputs: int) -> GradientForecast:
    run = job.gradients
    weights = sum(path.stat().st_size for path in model.stored.files)
    return GradientForecast(outputs, job.gradient_passes, run.windows_at_once, run.kept_bytes, run.working_bytes, weights)
