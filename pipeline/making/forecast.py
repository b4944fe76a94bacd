"""What `make` would take, and what to expect of the result, said without doing it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...formats import TYPES
from ...imatrix.covariance.estimate import expected_seconds
from ...jobs.plan import Plan
from ...operating_system.processors import available_cpus
from ...quantize.search.row_sample import RUN_ROWS
from ...quantize.timing import encode_speed, predict_seconds
from ...runtime import Model
from ..common.progress import OnProgress
from ..planning import Quantization
from ..recipe_search.options import Target, parse_types, search_options
from ..recipe_search.search_job import PROBES, SearchJob
from ..requests.groups import Measuring
from .effort import Collection, Effort
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
    ("curvature", 3): 5e-6,
}
# KL divergence over the mean relative error of the weights, and what each kind of data leaves of it, measured on the demo
# (docs/make.md); other models lie within the factor _SPREAD on either side.
_DIVERGENCE_PER_ERROR = 5.0
_DATA_LEAVES = {"": 1.0, "imatrix": 0.48, "covariance": 0.28, "curvature": 0.22}
_SPREAD = 2.5


@dataclass(frozen=True)
class MakeForecast:
    """seconds    stage -> roughly, on this machine (without its cluster)
    divergence  KL divergence to expect, from and to
    """

    seconds: dict[str, float]
    divergence: tuple[float, float] | None

    def as_json(self) -> dict[str, Any]:
        """seconds, divergence (from, to)."""
        return {"seconds": self.seconds, "divergence": self.divergence}


def forecast_make(
    job: Quantization,
    plan: Plan,
    model: Model,
    texts: Texts,
    collection: Collection,
    fit: Fit,
    report: OnProgress,
    threads: int | None,
) -> MakeForecast:
    """What carrying out a recipe takes. job: the model in the largest types; plan: with the smallest; collection: what is
    collected of the text."""
    level, moments = collection
    threads = threads or available_cpus()
    types = parse_types(job.request.types, program=job.request.program)
    measuring = Measuring(rows=RUN_ROWS)
    search = SearchJob(job, search_options(measuring, types, threads=threads, program=job.request.program), report=report)
    window = expected_seconds(model, (), texts.n_ctx, 1)[0]
    seconds = {}
    if level.data:
        windows = texts.windows if texts.windows is not None else 0
        run, sums = moments.expected_seconds() if moments is not None else (windows * window, 0.0)
        seconds["imatrix"] = run + sums
    seconds["search"] = _search_seconds(search, level, window, threads)
    seconds["quantize"] = _encode_seconds(plan, level, threads)
    seconds["validate"] = 2 * window * (texts.judged or 0)
    return MakeForecast(seconds, _divergence(search, level, fit))


def _encode_seconds(plan: Plan, level: Effort, threads: int) -> float:
    own = _ENCODING.get((level.data, level.encoder))
    if own is None:
        return sum(predict_seconds(plan, threads).values())
    return own * sum(kind.n_elements * n for kind, n in plan.outputs.counts()) / threads


def _search_seconds(search: SearchJob, level: Effort, window: float, threads: int) -> float:
    """Encoding a sample of each tensor in each type, and for each group of tensors two runs of the text."""
    speeds = {name: encode_speed(TYPES[name], threads) for name in {t.name for c in search.candidates.values() for t in c}}
    own = _ENCODING.get((level.data, level.encoder))
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
    runs = len(PROBES) * groups * (1 + level.search.get("refine", 0)) + 2
    return sampled + encoded + runs * level.search["chunks"] * window


def _divergence(search: SearchJob, level: Effort, fit: Fit) -> tuple[float, float] | None:
    """By the mean relative error of the types that a search without a text chooses."""
    chosen = search.find(Target(size=fit.nbytes)).assignment.types
    weights = {name: search.tensors[name].n_elements for name in chosen}
    errors = sum(search.measurements.errors[name][kind.name] * weights[name] for name, kind in chosen.items())
    middle = _DIVERGENCE_PER_ERROR * _DATA_LEAVES[level.data] * errors / sum(weights.values())
    return middle / _SPREAD, middle * _SPREAD
