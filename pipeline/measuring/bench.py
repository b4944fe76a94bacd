"""`ggufmill bench`: speeds of prompts and generation, over every combination of settings."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...convert import open_source
from ...data_classes import dataclass
from ...errors import MillError, UsageError
from ...formats import TensorSource
from ...request_fields import values_of
from ...runtime import Model, load_model
from ...runtime.evaluate.bench import Case, Speed, bench
from ...runtime.evaluate.provenance import describe_model, describe_program, describe_settings
from ...runtime.settings import PlacementOptions
from ..common.dropped_config import warn_on_dropped_config
from ..common.models import fast_settings, open_model, settings_of_each
from ..common.progress import Stage, reporting
from ..common.shown import shown
from ..requests.groups import CheckpointOptions
from ..requests.measure import BenchRequest
from ..requests.verb import verb

MIB = 1 << 20


@dataclass(frozen=True)
class BenchRow:
    """The speed of one test with one model and one combination of settings; the columns are those of llama-bench.

    model              architecture, parameters and largest type, as text; model_path, model_digest, model_size (bytes) and
                       model_n_params tell the same to programs
    n_threads ... rtr  the settings; mla None for a model without latent attention, amb in MiB
    test               pp512, tg128, pp512+tg128, or tg128@pp512; n_prompt and n_gen are its tokens
    tokens_per_second  mean over `samples`, one per repetition; stddev: their standard deviation, 0 for one
    """

    model: str
    model_path: str
    model_digest: str | None
    model_size: int
    model_n_params: int
    backend: str
    n_threads: int
    n_batch: int
    n_ubatch: int
    type_k: str
    type_v: str
    khad: int
    vhad: int
    fa: int
    mla: int | None
    amb: int
    rtr: int
    test: str
    n_prompt: int
    n_gen: int
    tokens_per_second: float
    stddev: float
    samples: list[float]


@shown
@dataclass
class BenchResult:
    """A row per test, the models (files with digests, types), and the program with its processor."""

    rows: list[BenchRow]
    models: list[dict[str, Any]]
    program: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """What --json prints: rows, models, program."""
        return {"rows": [asdict(row) for row in self.rows], "models": self.models, "program": self.program}


# Keyword argument -> (setting of load_model, as the command line spells it); for each there may be several values.
_GRID = {
    "threads": ("threads", "-t"),
    "batch": ("batch", "-b"),
    "ubatch": ("ubatch", "-ub"),
    "cache_k": ("cache_k", "-ctk"),
    "cache_v": ("cache_v", "-ctv"),
    "k_cache_hadamard": ("k_cache_hadamard", "-khad"),
    "v_cache_hadamard": ("v_cache_hadamard", "-vhad"),
    "flash": ("flash", "-fa"),
    "mla": ("mla", "-mla"),
    "attn_max_batch": ("attention_bytes", "-amb"),
    "repack": ("repack", "-rtr"),
}


@verb(BenchRequest)
def benchmark(request: BenchRequest) -> BenchResult:
    """Tokens per second of models, as llama-bench measures them. Every combination of the values given is measured.

    Returns a `BenchResult`. Raises UsageError when there is nothing to measure, MillError before anything is measured when one
    of the combinations cannot be run.

    Example:
        >>> from ggufmill import benchmark
        >>> from ggufmill.recipes import FOLDER
        >>> result = benchmark(FOLDER / "demo", n_prompt=16, n_gen=4, repetitions=2, threads=1)
        >>> [(row.test, len(row.samples), row.tokens_per_second > 0) for row in result.rows]
        [('pp16', 2, True), ('tg4', 2, True)]
    """
    tests = [Case(n, 0) for n in _several(request.n_prompt) if n] + [Case(0, n) for n in _several(request.n_gen) if n]
    tests += [Case(*pair) for pair in request.prompt_and_gen] + [
        Case(*pair, only_gen=True) for pair in request.gen_after_prompt
    ]
    if not tests:
        raise UsageError("nothing to measure: -p and -n are 0, and neither -pg nor -gp is given")
    values = {name: _several(getattr(request, name)) for name in _GRID}
    chosen = {name: several for name, several in values.items() if several}
    points = [dict(zip(chosen, point, strict=True)) for point in itertools.product(*chosen.values())]
    paths = [request.models] if isinstance(request.models, str | Path) else list(request.models)
    given = {name: value for name, value in values_of(request, CheckpointOptions).items() if value not in (None, False)}
    placement = {name: value for name, value in values_of(request, PlacementOptions).items() if value not in (None, (), False)}
    each = settings_of_each(paths, given)
    sources = [open_source(path, **own) for path, own in zip(paths, each, strict=True)]
    for source in sources:
        warn_on_dropped_config(source)
    _check(sources, points, placement)
    result = BenchResult([], [], describe_program())
    with reporting(request.progress) as report:
        stage = Stage(report, "bench", len(sources) * len(points) * len(tests), "test")
        for source, point in itertools.product(sources, points):
            model = open_model(source, fast_settings(source, _settings(point) | placement))
            if not result.models or result.models[-1]["path"] != model.source.path:
                result.models.append(describe_model(model))

            def add_row(speed: Speed, model: Model = model) -> None:
                result.rows.append(_row(model, result.models[-1], speed))
                stage.advance(1, speed.case.name, result)

            bench(model, tests, request.repetitions, request.warmup, add_row)
    return result


def _several(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _settings(point: dict[str, Any]) -> dict[str, Any]:
    """Settings of `load_model`, of a value for each keyword argument."""
    return {_GRID[name][0]: value * MIB if name == "attn_max_batch" else value for name, value in point.items()}


def _check(sources: Sequence[TensorSource], points: Sequence[dict[str, Any]], placement: dict[str, Any]) -> None:
    """Raises MillError for a combination that cannot be run, before hours of measuring are lost to it. No weights are read."""
    for source, point in itertools.product(sources, points):
        try:
            load_model(source, **_settings(point) | placement | {"repack": False})
        except MillError as error:
            if len(sources) * len(points) == 1:
                raise
            values = " ".join(f"{_GRID[name][1]} {int(v) if isinstance(v, bool) else v}" for name, v in point.items())
            which = f"{source.path} with {values}" if values else source.path
            raise type(error)(f"{error} (that is {which}; nothing was measured)") from None


def _row(model: Model, about: dict[str, Any], speed: Speed) -> BenchRow:
    used, case = describe_settings(model), speed.case
    largest = next(iter(about["types"]), "")
    return BenchRow(
        model=f"{about['architecture']} {parameters_text(about['parameters'])} {largest}",
        model_path=about["path"],
        model_digest=about["files"][0]["digest"] if about["files"] else None,
        model_size=about["nbytes"],
        model_n_params=about["parameters"],
        backend="+".join(model.device_names) or "CPU",
        n_threads=used["threads"],
        n_batch=used["batch"],
        n_ubatch=used["ubatch"],
        type_k=used["cache_k"],
        type_v=used["cache_v"],
        khad=int(used.get("k_cache_hadamard", False)),
        vhad=int(used.get("v_cache_hadamard", False)),
        fa=int(used["flash"]),
        mla=used.get("mla"),
        amb=used["attention_bytes"] // MIB,
        rtr=int(used["repack"]),
        test=case.name,
        n_prompt=case.n_prompt,
        n_gen=case.n_gen,
        tokens_per_second=speed.mean,
        stddev=speed.stddev,
        samples=speed.samples,
    )


def parameters_text(parameters: int) -> str:
    """'671.03 B', '17.43 M'."""
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.2f} M"
