"""`ggufmill make`: the best file of a model that fits, from its name: a recipe is written, and run."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from ..data_classes import dataclass
from ..errors import PlanError, UsageError
from ..formats import open_gguf
from ..imatrix.calibration import cut_windows
from ..imatrix.texts import read_segments
from ..jobs.atomic_write import write_text
from ..quantize.gguf_source import simulate_quantization
from ..quantize.importance import AssumedImportance
from ..recipes import bundled_text
from ..request_fields import shared, values_of
from ..runtime import Model, load_model
from ..runtime.placement.memory import TensorSize
from .collecting.own_text import WINDOWS as OWN_WINDOWS
from .collecting.own_text import provide_own_text
from .common.arguments import refuse_unused
from .common.models import file_stem
from .common.progress import OnProgress, reporting
from .common.shown import shown
from .making.effort import LEVELS, PlannedCollection, plan_collection
from .making.fit import Fit, find_fit, run_options, working_type
from .making.forecast import MakeForecast, forecast_make
from .making.recipe import MADE, recipe_text
from .making.texts import Texts, choose_texts
from .planning import HIGHEST_EFFORT, Quantization
from .requests.make import MakeRequest
from .requests.quantize import QuantizeRequest
from .requests.run import RunRequest
from .requests.verb import verb
from .run import RunResult, forecasts_of, run_recipe
from .run import planned as planned_run

_LARGEST = "q8_0"  # the type beyond which more bits are not worth it


@shown
@dataclass
class MakeResult:
    """What was made, or with dry_run would be.

    recipe    the TOML recipe that does it again; its text
    fit       the size, and where it comes from
    data      what was collected: '', imatrix, covariance or curvature
    run       what `run_recipe` gave
    options   of llama.cpp's programs, and of this one's, with which the file fits; None: it does not, or with dry_run
    forecast  the KL divergence to expect; only with dry_run. What it takes, `run` has
    """

    recipe: Path
    text: str = field(repr=False)
    fit: Fit
    data: str
    run: RunResult = field(init=False)
    options: list[str] | None = None
    forecast: MakeForecast | None = None

    def as_json(self) -> dict[str, Any]:
        """What --json prints: recipe, file_bytes_at_most, why, data, options, the report of the run, or with dry_run its plan
        and `forecast`."""
        head = {"recipe": str(self.recipe), "file_bytes_at_most": self.fit.nbytes, "why": self.fit.why, "data": self.data}
        forecast = {}
        if self.forecast is not None and self.run.forecast is not None:
            stages = self.run.stages
            seconds = {stage: each.total for stage, each in stages.items()}
            memory = {stage: each.memory for stage, each in stages.items()}
            forecast = {
                "forecast": {"seconds": seconds, "memory": memory, **self.forecast.as_json()},
                **self.run.forecast.as_json(),
            }
        return {**head, "options": self.options, **forecast, "run": self.run.as_json()}


@verb(MakeRequest)
def make_model(request: MakeRequest) -> MakeResult:
    """Makes the best file of a model that fits a size or a machine, judges it, and writes how to make it again.

    The size is asked for, or follows from the memory; `effort` decides the text that is read, the statistics that are collected
    from it, the encoder and the search for types. All of it is written as a TOML recipe, which `run_recipe` runs, here and
    later, with the same result. A call that was interrupted is continued by the same call.

    Returns a `MakeResult`. Raises PlanError before any work if something prevents it, MillError for what fails on the way.

    Example:
        >>> from ggufmill import make_model
        >>> from ggufmill.recipes import FOLDER
        >>> result = make_model(FOLDER / "demo", "made", fit="5M", text=FOLDER / "demo" / "calibration.txt", effort=0,
        ...     types="q3_K,q4_K", dry_run=True)
        >>> result.run.quants[0].most_bytes, result.recipe.exists()
        (5000000, False)
    """
    if request.fit is not None and (request.ram is not None or request.vram):
        raise UsageError(
            "--fit is the size of the file, --ram and --vram are the memory that it has to fit: give one or the other"
        )
    if request.effort < HIGHEST_EFFORT:
        refuse_unused(request, f"--effort {HIGHEST_EFFORT}", "tune")
    job = _largest(request)
    model, level = load_model(job.source), LEVELS[request.effort]
    largest = job.plan()
    fit, working = find_fit(request, job.source, largest), working_type(job.source, largest)
    running = model if working is None else load_model(simulate_quantization(job.source, largest))
    bits = 8 * fit.nbytes / sum(tensor.n_elements for tensor in job.source.tensors.values())
    stem = f"{file_stem(request.model)}-{bits:.2f}bpw"
    folder = Path(request.out) if request.out is not None else Path("out") / stem
    own = folder.absolute() / f"{stem}.self.jsonl"
    texts = choose_texts(request, level, model, own)
    writes = level.needs_text and any(text.path == own for text in texts.calibration)
    with _folder(folder, request.dry_run), reporting(request.progress) as report:
        there = _with_own_text(model, texts, own, report, is_planned=request.dry_run) if writes else texts
        collection, windows = PlannedCollection(level, None), None
        if level.needs_text:
            windows = cut_windows(model, read_segments(model, there.calibration), there.n_ctx, chunks=there.windows)
            there, texts = (replace(each, windows=len(windows.windows)) for each in (there, texts))
            collection = plan_collection(level, running, windows, folder, on_cluster=request.cluster is not None)
        recipe, text = folder / f"{stem}.toml", recipe_text(request, job.source, collection.level, fit, texts, working)
        asked = shared(request, RunRequest, recipe=recipe, out=folder, program=None)
        made = MakeResult(recipe, text, fit, collection.level.data)
        if not request.dry_run:
            made.run = _run(asked, text)
            opened = open_gguf(made.run.report["files"][0])
            sizes = [TensorSize(name, tensor.type, tensor.nbytes) for name, tensor in opened.tensors.items()]
            made.options = run_options(sizes, opened.metadata, fit)
            return made
        with tempfile.TemporaryDirectory() as elsewhere:
            planned = Path(elsewhere) / recipe.name
            write_text(planned, recipe_text(request, job.source, collection.level, fit, there, working))
            run, forecasts = forecasts_of(replace(asked, recipe=planned), report)
            made.run = planned_run(run, forecasts)
            made.forecast = forecast_make(forecasts, collection.level, there, report)
    return made


@contextmanager
def _folder(path: Path, is_planned: bool) -> Iterator[None]:
    """Makes the folder; it is removed again if nothing came into it, as when something prevents the work."""
    made = [] if is_planned else [each for each in (path, *path.parents) if not each.exists()]
    if not is_planned:
        path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        for each in made:
            with suppress(OSError):
                each.rmdir()


def _with_own_text(model: Model, texts: Texts, own: Path, report: OnProgress, *, is_planned: bool) -> Texts:
    """The texts, that of the model written; of a plan with as much of another text in its place, if it is not there."""
    if not is_planned:
        provide_own_text(model, own, (texts.windows or OWN_WINDOWS) * texts.n_ctx, 0, report)
    elif not own.exists():
        others = [replace(text, path=bundled_text()) if text.path == own else text for text in texts.calibration]
        return replace(texts, calibration=others)
    return texts


def _largest(request: MakeRequest) -> Quantization:
    """The model in the largest type that is worth its bytes, whatever is known of its weights."""
    fixed = {"out": "out.gguf", "type": _LARGEST, "effort": None, "cluster": None, "tune": False}
    free = {"allow_requantize": True, "ignore_imatrix_rules": True}
    job = Quantization(shared(request, QuantizeRequest, source=request.model, **fixed, **free), is_written=False)
    job.importance = AssumedImportance({})
    return job


def _run(asked: RunRequest, text: str) -> RunResult:
    """Writes the recipe and runs it. Where something prevents the work, the folder is left as it was."""
    recipe = Path(asked.recipe)
    before = recipe.read_bytes() if recipe.exists() else None
    if before is not None and not before.startswith(MADE.encode()) and not asked.force:
        raise PlanError(f"{recipe} is not of `ggufmill make`; use --force to replace it, or another folder (-o)")
    write_text(recipe, text)
    try:
        return run_recipe(**values_of(asked))
    except PlanError:  # raised before any work
        if before is None:
            recipe.unlink()
        else:
            recipe.write_bytes(before)
        raise
