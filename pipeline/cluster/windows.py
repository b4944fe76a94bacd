"""Windows of a text shared out to workers: what they add to an importance matrix, and their scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import numpy as np

from ...data_classes import dataclass
from ...imatrix.calibration import Calibration
from ...imatrix.collect import BatchResult, CollectOptions, RunBatches, run_batch
from ...imatrix.covariance.job import CovarianceJob
from ...runtime import Model
from ...runtime.evaluate.perplexity import RunWindows, WindowScores, run_windows
from ..common.models import ModelLike
from .connection import open_cluster
from .covariance import SharedCovariance
from .models import ModelAddress, model_address, models_here
from .ordered_map import results_of


@dataclass(frozen=True)
class _Windows:
    """A piece: windows int64 [n, n_ctx] that run together; first: the number of the first of them."""

    windows: np.ndarray
    first: int

    def __str__(self) -> str:
        return f"windows {self.first + 1} to {self.first + len(self.windows)}"


@dataclass(frozen=True)
class _Collection(_Windows):
    model: ModelAddress
    weight: int
    options: CollectOptions


@dataclass(frozen=True)
class _Scoring(_Windows):
    models: tuple[ModelAddress, ...]
    baseline: ModelAddress | None
    mtp: bool


def _collect(piece: _Collection) -> BatchResult:
    """Runs on a worker."""
    with models_here(piece.model) as [model]:
        return run_batch(model, piece.windows, piece.weight, piece.first, piece.options)


def _score(piece: _Scoring) -> list[WindowScores]:
    """Runs on a worker."""
    addresses = piece.models if piece.baseline is None else (*piece.models, piece.baseline)
    with models_here(*addresses) as models:
        baseline = None if piece.baseline is None else models.pop()
        return run_windows(models, piece.windows, baseline, piece.mtp)


@contextmanager
def collecting_on(
    address: str,
    there: ModelAddress,
    opened: Model,
    calibration: Calibration,
    options: CollectOptions,
    covariance: CovarianceJob | None = None,
    memory: int | None = None,
) -> Iterator[RunBatches | SharedCovariance]:
    """What `collect` takes to run its batches on the workers of a cluster, which is left with the context.

    there: the model, as workers open it; opened: the same here; covariance: a job that they do too; memory: for its sums, of
    each worker.
    """
    with open_cluster(address) as cluster, ExitStack() as stack:
        if covariance is not None:
            shared = SharedCovariance(cluster, there, opened, calibration, options, covariance, memory)
            yield stack.enter_context(closing(shared))
            return

        def run(batches: Sequence[slice]) -> Iterator[BatchResult]:
            pieces = (
                _Collection(calibration.windows[batch], batch.start, there, int(calibration.weights[batch.start]), options)
                for batch in batches
            )
            return stack.enter_context(closing(results_of(cluster, _collect, pieces)))

        yield run


@contextmanager
def scoring_on(
    address: str | None,
    models: Sequence[tuple[ModelLike, Model, Mapping[str, Any]]],
    baseline: tuple[ModelLike, Model, Mapping[str, Any]] | None,
    mtp: bool,
) -> Iterator[RunWindows | None]:
    """What `perplexities` takes to run its windows there, as `collecting_on`.

    models, baseline: as they were given, opened here, settings."""
    if address is None:
        yield None
        return
    there = tuple(model_address(*model) for model in models)
    base = model_address(*baseline) if baseline is not None else None
    with open_cluster(address) as cluster, ExitStack() as stack:

        def run(windows: np.ndarray, batches: Sequence[slice]) -> Iterator[list[WindowScores]]:
            pieces = (_Scoring(windows[batch], batch.start, there, base, mtp) for batch in batches)
            return stack.enter_context(closing(results_of(cluster, _score, pieces)))

        yield run
