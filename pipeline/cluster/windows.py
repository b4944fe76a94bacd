"""Windows of a text shared out to workers: what they add to an importance matrix, and their scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...imatrix.calibration import Calibration
from ...imatrix.collect import BatchResult, CollectOptions, RunBatches, run_batch
from ...runtime import Model
from ...runtime.evaluate.perplexity import RunWindows, WindowScores, run_windows
from ..common.models import ModelLike
from .connection import open_cluster
from .models import ModelAddress, model_address, models_here
from .ordered_map import values_of


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
    model: ModelAddress
    baseline: ModelAddress | None
    mtp: bool


def _collect(piece: _Collection) -> BatchResult:
    """Runs on a worker."""
    with models_here(piece.model) as [model]:
        return run_batch(model, piece.windows, piece.weight, piece.first, piece.options)


def _score(piece: _Scoring) -> WindowScores:
    """Runs on a worker."""
    addresses = [piece.model] if piece.baseline is None else [piece.model, piece.baseline]
    with models_here(*addresses) as models:
        return run_windows(models[0], piece.windows, models[1] if len(models) > 1 else None, piece.mtp)


@contextmanager
def collecting_on(
    address: str | None,
    model: ModelLike,
    opened: Model,
    calibration: Calibration,
    options: CollectOptions,
    settings: Mapping[str, Any],
    mla_layout: str | None = None,
) -> Iterator[RunBatches | None]:
    """For `collect`: runs its batches on the workers of a cluster, which is left with the context; without an address None.

    model: as it was given, with settings of `load_model`; opened: the same here.
    """
    if address is None:
        yield None
        return
    there = model_address(model, opened, settings, mla_layout)
    with open_cluster(address) as cluster, ExitStack() as stack:

        def run(batches: Sequence[slice]) -> Iterator[BatchResult]:
            pieces = (
                _Collection(calibration.windows[batch], batch.start, there, int(calibration.weights[batch.start]), options)
                for batch in batches
            )
            return stack.enter_context(closing(values_of(cluster, _collect, pieces)))

        yield run


@contextmanager
def scoring_on(
    address: str | None,
    model: tuple[ModelLike, Model, Mapping[str, Any]],
    baseline: tuple[ModelLike | None, Model | None, Mapping[str, Any]],
    mtp: bool,
) -> Iterator[RunWindows | None]:
    """For `perplexity`, as `collecting_on`. model, baseline: as they were given, opened here, settings."""
    if address is None:
        yield None
        return
    there, base = model_address(*model), None
    if baseline[0] is not None and baseline[1] is not None:
        base = model_address(baseline[0], baseline[1], baseline[2])
    with open_cluster(address) as cluster, ExitStack() as stack:

        def run(windows: np.ndarray, batches: Sequence[slice]) -> Iterator[WindowScores]:
            pieces = (_Scoring(windows[batch], batch.start, there, base, mtp) for batch in batches)
            return stack.enter_context(closing(values_of(cluster, _score, pieces)))

        yield run
