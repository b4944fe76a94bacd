"""What `make` would take, and what to expect of the result, said without doing it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...formats import TYPES, TensorType
from ...imatrix.covariance.estimate import expected_seconds
from ...imatrix.texts import CalibrationText, read_segments
from ...jobs.plan import Plan
from ...operating_system.processors import available_cpus
from ...quantize.search.row_sample import RUN_ROWS
from ...quantize.timing import encode_speed, predict_seconds
from ...runtime import Model
from ...runtime.evaluate.sensitivity import Reference
from ..common.progress import OnProgress, Stage
from ..planning import Quantization
from ..recipe_search.forecast import divergence_runs
from ..recipe_search.options import SearchTarget, parse_types, search_options
from ..recipe_search.search_job import PROBES, SearchJob
from ..requests.groups import Measuring
from .effort import Effort, PlannedCollection
from .fit import Fit
from .texts import Texts

# Seconds per weight and thread of encoding with second moments, by what they are of and by effort: docs/covariance.md and
# docs/curvature.md.
_ENCODING = {
    ("covariance", 0): 0.2e-6,
    ("covariance", 1): 0.3e-6,
    ("covariance", 2): 1.2e-6,
    ("covariance", 3): 2.3e-6,
    ("curvature", 0): 0.4e-6,
    ("curvature", 1): 0.6e-6,
    ("curvature", 2): 2.6e-6,
}
# What is expected of the result is measured on a few windows with the weights encoded without data, where that takes no longer
# than _TRIAL seconds; else it is the mean relative error of the weights, times what it cost the demo. Then it is multiplied by
# what data leave of it; the range is a factor of _SPREAD on either side (docs/make.md).
_TRIAL, _WINDOWS = 60.0, 2
_DIVERGENCE_PER_ERROR = 5.0
_DATA_LEAVES = {"": 1.0, "imatrix": 0.55, "covariance": 0.32, "curvature": 0.25}
_SPREAD = {True: 2.0, False: 5.0}  # of what was measured, and of what was not


@dataclass(frozen=True)
class MakeForecast:
    """seconds    stage -> roughly, on this machine (without its cluster)
    divergence  KL divergence to expect, from and to
    is_measured whether types like those of the result were tried on a few windows; else it is a rule of thumb
    """

    seconds: dict[str, float]
    divergence: tuple[float, float]
    is_measured: bool

    def as_json(self) -> dict[str, Any]:
        """seconds, divergence (from, to), is_measured."""
        return {"seconds": self.seconds, "divergence": self.divergence, "is_measured": self.is_measured}


def forecast_make(
    job: Quantization,
    plan: Plan,
    copy: Plan | None,
    model: Model,
    texts: Texts,
    collection: PlannedCollection,
    fit: Fit,
    report: OnProgress,
    threads: int | None,
) -> MakeForecast:
    """What carrying out a recipe takes. job: the model in the largest types; plan: with the smallest; copy: of what runs in
    its place, None: nothing does; model: what runs; collection: what is collected of the text."""
    level, moments = collection
    threads = threads or available_cpus()
    allowed = parse_types(job.request.types, program=job.request.program)
    measuring = Measuring(rows=RUN_ROWS)
    search = SearchJob(job, search_options(measuring, allowed, threads=threads, program=job.request.program), report=report)
    window = expected_seconds(model, (), texts.n_ctx, 1)[0]
    seconds = {} if copy is None else {"working copy": sum(predict_seconds(copy, threads).values())}
    if level.data:
        windows = texts.windows if texts.windows is not None else 0
        run, sums = moments.expected_seconds() if moments is not None else (windows * window, 0.0)
        seconds["imatrix"] = run + sums
    exact = expected_seconds(model, (), texts.n_ctx, 1, exact=True)[0]
    seconds["search"] = _search_seconds(search, level, exact, threads)
    seconds["quantize"] = _encode_seconds(plan, level, threads)
    seconds["validate"] = window * (3 * (texts.judged or 0) + 2)  # both models, the noise floor; layers of both are compared
    types = search.find(SearchTarget(size=fit.nbytes)).assignment.types
    is_measured = sum(predict_seconds(plan, threads).values()) + 2 * _WINDOWS * window < _TRIAL
    middle = _DATA_LEAVES[level.data] * (
        _tried(search, types, texts, model, threads, report) if is_measured else _guessed(search, types)
    )
    spread = _SPREAD[is_measured]
    return MakeForecast(seconds, (middle / spread, middle * spread), is_measured)


def _seconds_of_a_weight(level: Effort) -> float | None:
    """Of a thread; None without second moments. Efforts beyond those of the table encode as its last one does."""
    efforts = [effort for data, effort in _ENCODING if data == level.data and effort <= level.number]
    return _ENCODING[level.data, max(efforts)] if efforts else None


def _encode_seconds(plan: Plan, level: Effort, threads: int) -> float:
    own = _seconds_of_a_weight(level)
    if own is None:
        return sum(predict_seconds(plan, threads).values())
    return own * sum(kind.n_elements * n for kind, n in plan.outputs.counts()) / threads


def _search_seconds(search: SearchJob, level: Effort, window: float, threads: int) -> float:
    """Encoding a sample of each tensor in each type, and for each group of tensors two runs of the text."""
    speeds = {name: encode_speed(TYPES[name], threads) for name in {t.name for c in search.candidates.values() for t in c}}
    own = _seconds_of_a_weight(level)
    per_weight = {name: own / threads if own is not None else 1 / speed for name, speed in speeds.items()}
    sampled = 0.0
    for name, tensor in search.tensors.items():
        weights = min(level.search["rows"], tensor.n_elements // tensor.shape[0]) * tensor.shape[0]
        sampled += weights * sum(per_weight[kind.name] for kind in search.candidates[name])
    if "measurements" not in level.search:
        return sampled
    weights = sum(tensor.n_elements for tensor in search.tensors.values())
    encoded = len(PROBES) * weights * sum(per_weight.values()) / len(per_weight)
    groups = min(level.search["measurements"], len(search.tensors))
    runs = divergence_runs(groups, level.search.get("refine", 0))
    return sampled + encoded + runs * level.search["chunks"] * window


def _tried(
    search: SearchJob, types: Mapping[str, TensorType], texts: Texts, model: Model, threads: int, report: OnProgress
) -> float:
    """The KL divergence of these types on the first windows of the text that judges."""
    stage = Stage(report, "these types tried on two windows", 2, "model")
    tokens = read_segments(model, [CalibrationText(texts.heldout)])[0].tokens[texts.first * texts.n_ctx :]
    reference = Reference(search.source, tokens, texts.n_ctx, _WINDOWS, threads=threads)
    stage.advance(1, "original")
    divergence = reference.with_types(types, None).mean
    stage.advance(1, "quantised")
    return divergence


def _guessed(search: SearchJob, types: Mapping[str, TensorType]) -> float:
    """By the mean relative error of the weights."""
    weights = {name: search.tensors[name].n_elements for name in types}
    errors = sum(search.measurements.errors[name][kind.name] * weights[name] for name, kind in types.items())
    return _DIVERGENCE_PER_ERROR * errors / sum(weights.values())
