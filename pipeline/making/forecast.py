"""What to expect of the file that `make` makes, said without making it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from ...data_classes import dataclass
from ...formats import TensorType
from ...imatrix.texts import CalibrationText, read_segments
from ...quantize.timing import predict_seconds
from ...runtime.evaluate.sensitivity import Reference
from ..common.progress import OnProgress, Stage
from ..common.reading import reading_seconds
from ..recipe_search.search_job import SearchJob
from ..stages.forecast import StageForecasts
from .effort import Effort
from .texts import Texts

# It is measured on a few windows with the weights encoded without data, where that takes no longer
# than _TRIAL seconds; else it is the mean relative error of the weights, times what it cost the demo. Then it is multiplied by
# what data leave of it; the range is a factor of _SPREAD on either side (docs/make.md).
_TRIAL, _WINDOWS = 60.0, 2
_DIVERGENCE_PER_ERROR = 5.0
_DATA_LEAVES = {"": 1.0, "imatrix": 0.55, "covariance": 0.32, "curvature": 0.25}
_SPREAD = {True: 2.0, False: 5.0}  # of what was measured, and of what was not


@dataclass(frozen=True)
class MakeForecast:
    """divergence  KL divergence to expect, from and to
    is_measured whether types like those of the result were tried on a few windows; else it is a rule of thumb
    """

    divergence: tuple[float, float]
    is_measured: bool

    def as_json(self) -> dict[str, Any]:
        """divergence (from, to), is_measured."""
        return asdict(self)


def forecast_make(forecasts: StageForecasts, level: Effort, texts: Texts, report: OnProgress) -> MakeForecast:
    """What to expect of carrying out a recipe."""
    [tried], running, threads, n_ctx = forecasts.tried, forecasts.running, forecasts.threads, texts.n_ctx
    assert tried is not None
    trial, found = tried
    tokens = read_segments(running, [CalibrationText(texts.heldout)])[0].tokens[texts.first * n_ctx :]
    encoding = sum(predict_seconds(found.plan, threads).values())
    is_measured = encoding + 2 * _WINDOWS * reading_seconds(running, n_ctx, n_ctx) < _TRIAL
    types = found.assignment.types
    expected = _tried(trial, types, tokens, n_ctx, threads, report) if is_measured else _guessed(trial, types)
    middle, spread = _DATA_LEAVES[level.data] * expected, _SPREAD[is_measured]
    return MakeForecast((middle / spread, middle * spread), is_measured)


def _tried(
    search: SearchJob,
    types: Mapping[str, TensorType],
    tokens: Sequence[int] | np.ndarray,
    n_ctx: int,
    threads: int,
    report: OnProgress,
) -> float:
    """The KL divergence of these types on the first windows of the text that judges."""
    stage = Stage(report, "these types tried on two windows", 2, "model")
    reference = Reference(
        search.source, tokens, n_ctx, _WINDOWS, lambda windows: stage.within(windows / _WINDOWS), threads=threads
    )
    stage.advance(1, "original")
    divergence = reference.with_types(types, None).mean
    stage.advance(1, "quantised")
    return divergence


def _guessed(search: SearchJob, types: Mapping[str, TensorType]) -> float:
    """By the mean relative error of the weights."""
    weights = {name: search.tensors[name].n_elements for name in types}
    errors = sum(search.measurements.errors[name][kind.name] * weights[name] for name, kind in types.items())
    return _DIVERGENCE_PER_ERROR * errors / sum(weights.values())
