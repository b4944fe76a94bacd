"""What `make` would take, and what to expect of the result, said without doing it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...formats import TensorSource, TensorType
from ...imatrix.calibration import Calibration
from ...imatrix.collect import CollectOptions
from ...imatrix.texts import CalibrationText, read_segments
from ...jobs.plan import Plan
from ...operating_system.processors import available_cpus
from ...quantize.covariance.timing import predict_seconds_with
from ...quantize.gguf_source import simulate_quantization
from ...quantize.importance import AssumedImportance
from ...quantize.search.row_sample import RUN_ROWS
from ...quantize.timing import predict_seconds
from ...runtime import Model, load_model
from ...runtime.evaluate.sensitivity import Reference
from ..collecting.forecast import forecast_collection
from ..collecting.moments import expected_covariances
from ..common.forecast import Forecast
from ..common.progress import OnProgress, Stage
from ..common.reading import most_together, reading_forecast, reading_memory, reading_seconds
from ..planning import Quantization
from ..recipe_search.forecast import search_forecast
from ..recipe_search.search_job import SearchJob
from ..requests.make import MakeRequest
from ..requests.quantize import QuantizeRequest
from ..stages.validation import FLOOR_WINDOWS
from ..writing.forecast import forecast
from ..writing.sequential import sequential_encoding
from .effort import PlannedCollection
from .texts import Texts

# What is expected of the result is measured on a few windows with the weights encoded without data, where that takes no longer
# than _TRIAL seconds; else it is the mean relative error of the weights, times what it cost the demo. Then it is multiplied by
# what data leave of it; the range is a factor of _SPREAD on either side (docs/make.md).
_TRIAL, _WINDOWS = 60.0, 2
_DIVERGENCE_PER_ERROR = 5.0
_DATA_LEAVES = {"": 1.0, "imatrix": 0.55, "covariance": 0.32, "curvature": 0.25}
_SPREAD = {True: 2.0, False: 5.0}  # of what was measured, and of what was not


@dataclass(frozen=True)
class MakeForecast:
    """stages     what each takes, roughly, on this machine (without its cluster)
    divergence  KL divergence to expect, from and to
    is_measured whether types like those of the result were tried on a few windows; else it is a rule of thumb
    """

    stages: dict[str, Forecast]
    divergence: tuple[float, float]
    is_measured: bool

    @property
    def seconds(self) -> dict[str, float]:
        """Of each stage."""
        return {stage: sum((each.seconds or {}).values()) for stage, each in self.stages.items()}

    @property
    def memory(self) -> dict[str, int | None]:
        """Bytes that are no file's, of each stage."""
        return {stage: each.memory for stage, each in self.stages.items()}

    def as_json(self) -> dict[str, Any]:
        """seconds and memory (of stages), divergence (from, to), is_measured."""
        spread = {"divergence": self.divergence, "is_measured": self.is_measured}
        return {"seconds": self.seconds, "memory": self.memory, **spread}


def forecast_make(
    request: MakeRequest,
    recipe: Path,
    source: TensorSource,
    copy: Plan | None,
    running: Model,
    texts: Texts,
    windows: Calibration | None,
    collection: PlannedCollection,
    report: OnProgress,
) -> MakeForecast:
    """What carrying out a recipe takes. copy: of what runs in place of the source, None: nothing does; running: what runs;
    windows: of calibration text, None: none are read; collection: what is collected of them."""
    (level, moments), threads, folder = collection, request.threads or available_cpus(), recipe.parent
    given: dict[str, Any] = {"recipe": recipe, "threads": threads, "allow_requantize": True, "ignore_imatrix_rules": True}
    given |= {level.data: recipe.with_suffix(".cov")} if moments is not None else {}
    asked = QuantizeRequest(request.model, "out.gguf", program=request.program, **given)
    job = Quantization(asked, source=source, is_written=False)
    job.importance, job.covariances = AssumedImportance({}) if level.data else None, None
    options, target = job.search_options(threads), job.target
    assert target is not None
    trial = SearchJob(job, replace(options, rows=RUN_ROWS, text=None), report=report)
    found = trial.find(target)

    stages, timing = {}, predict_seconds
    if copy is not None:
        stages["working copy"] = forecast(copy, source, timing=timing, threads=threads)
    if windows is not None:
        observed = CollectOptions(head_inputs=moments is not None)
        stages["imatrix"] = forecast_collection(running, windows, recipe.with_suffix(".imatrix"), observed, moments).forecast
    if windows is not None and moments is not None:
        expected = expected_covariances(running, moments.inputs, windows, moments.path, job.effort)
        job.covariances = job.following(expected)
        timing = partial(predict_seconds_with, job.covariances, source)
    stages["search"] = search_forecast(SearchJob(job, options, running=lambda: running.source), folder).forecast
    plan = job.plan(found.text)
    stages["quantize"] = forecast(plan, source, timing=timing, threads=threads)
    if (sequential := sequential_encoding(job.request, source, job.device)) is not None:
        stages["quantize"] = sequential.added_to(stages["quantize"], plan)
    tokens = read_segments(running, [CalibrationText(texts.heldout)])[0].tokens[texts.first * texts.n_ctx :]
    count = len(tokens) // texts.n_ctx
    result = load_model(simulate_quantization(source, found.plan))  # of which no weight is encoded
    stages["validate"] = _validation(running, result, min(texts.judged or count, count), texts.n_ctx, folder)

    is_measured = (
        sum(predict_seconds(plan, threads).values()) + 2 * _WINDOWS * reading_seconds(running, texts.n_ctx, texts.n_ctx)
        < _TRIAL
    )
    middle = _DATA_LEAVES[level.data] * (
        _tried(trial, found.assignment.types, tokens, texts.n_ctx, threads, report)
        if is_measured
        else _guessed(trial, found.assignment.types)
    )
    spread = _SPREAD[is_measured]
    return MakeForecast(stages, (middle / spread, middle * spread), is_measured)


def _validation(baseline: Model, result: Model, windows: int, n_ctx: int, folder: Path) -> Forecast:
    """The baseline reads the text, and its first windows twice more for the noise floor; layers of both models are compared on
    a window."""
    tokens, first = windows * n_ctx, min(windows, FLOOR_WINDOWS) * n_ctx
    base = reading_seconds(baseline, tokens, n_ctx, is_scored=False)
    floor = reading_seconds(baseline, first, n_ctx, is_scored=False) + reading_seconds(baseline, first, n_ctx, baseline)
    layers = sum(reading_seconds(model, n_ctx, n_ctx, is_scored=False) for model in (baseline, result))
    seconds = {"reading": base + reading_seconds(result, tokens, n_ctx, baseline) + floor, "layers": layers}
    together = most_together([baseline, baseline], n_ctx, windows, baseline)
    memory = reading_memory([baseline, baseline], n_ctx, together, baseline)
    return reading_forecast(seconds, memory, [baseline, result], folder)


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
