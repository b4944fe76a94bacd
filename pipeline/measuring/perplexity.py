"""`ggufmill perplexity`: how well a model predicts a text, and how far it is from a baseline."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, field, fields, replace
from pathlib import Path
from typing import Any, overload

from ...data_classes import dataclass
from ...errors import PlanError, UsageError
from ...formats import TensorSource
from ...formats.file_range import read_file, read_text
from ...imatrix.texts import decode_text
from ...runtime import Model, load_model
from ...runtime.evaluate.baseline import ModelBaseline
from ...runtime.evaluate.perplexity import Perplexity, cut_windows, perplexities
from ...runtime.evaluate.provenance import compare_results, describe_program, describe_settings, describe_text
from ...runtime.evaluate.tasks.files import READERS
from ...runtime.evaluate.tasks.score import score_tasks as rate_tasks
from ...runtime.evaluate.tasks.selection import choose_tasks
from ..cluster.windows import scoring_on
from ..common.arguments import as_bytes
from ..common.baseline import choose_logits, describe_stored, logits_bytes, stored_tokens, writing_logits
from ..common.forecast import Planned
from ..common.messages import warn
from ..common.models import (
    ModelLike,
    describe_origin,
    model_name,
    note_micro_batch,
    open_model,
    settings_of_each,
    window_settings,
)
from ..common.progress import WINDOWS, Stage, reporting
from ..common.reading import most_together, reading_forecast, reading_memory, reading_seconds
from ..common.shown import shown
from ..judging.verdict import NoiseFloor, PairedTest, compare_neighbours
from ..requests.measure import PerplexityRequest, TasksRequest
from ..requests.running import settings_of
from ..requests.verb import verb

N_CTX = 512


@shown
@dataclass(frozen=True, kw_only=True)
class PerplexityResult(Perplexity):
    """The figures of `Perplexity` (perplexity, error, chunks, ..., with a baseline kld_mean, top1_agreement, ...), and what
    they were measured on.

    model, text, baseline   as they were given
    about, baseline_about   the models: files with digests, types, recipe and imatrix; or the file of the baseline's predictions
    settings                that the model ran with
    text_digest, program    size and digest of the text, None without one; versions and processor
    noise_floor             figures of the baseline with rounded activations, if they were asked for
    earlier, compared_with  the result that this one was compared with, and the verdict: comparable, obstacles, differences,
                            ratio
    """

    model: str
    text: str | None
    baseline: str | None
    about: dict[str, Any]
    baseline_about: dict[str, Any] | None
    settings: dict[str, Any]
    text_digest: dict[str, Any] | None
    program: dict[str, Any]
    noise_floor: NoiseFloor | None = None
    earlier: dict[str, Any] | None = field(default=None, repr=False)
    compared_with: dict[str, Any] | None = None

    def as_json(self) -> dict[str, Any]:
        """What --json prints: model, text and baseline, the figures that have a value, and the origin of all."""
        beside = ("model", "text", "baseline", "about", "baseline_about", "settings", "text_digest", "program")
        left_out = (*beside, "earlier", "compared_with")
        figures = {name: value for name, value in super().as_json().items() if name not in left_out}
        summary = {name: getattr(self, name) for name in beside[:3]} | figures | {n: getattr(self, n) for n in beside[3:]}
        return summary | ({"compared_with": self.compared_with} if self.compared_with is not None else {})


@shown
@dataclass(frozen=True)
class PerplexityTable:
    """The results of several models on the same text, against the same baseline.

    paired  each model, by rising KL divergence, against the next: by windows; [] without a baseline
    """

    results: list[PerplexityResult]
    paired: list[PairedTest] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """What --json prints: results, and with a baseline paired."""
        paired = {"paired": [asdict(comparison) for comparison in self.paired]} if self.paired else {}
        return {"results": [result.as_json() for result in self.results], **paired}


@overload
def perplexity(model: ModelLike, text: str | Path | None = None, **options: Any) -> PerplexityResult: ...
@overload
def perplexity(model: Sequence[ModelLike], text: str | Path | None = None, **options: Any) -> PerplexityTable: ...
@verb(PerplexityRequest)
def perplexity(request: PerplexityRequest) -> PerplexityResult | PerplexityTable | Planned:
    """Scores a text as llama-perplexity does: it is cut into windows, and the second half of each is predicted.

    Compare figures only for the same text, context and number of windows.

    Returns a `PerplexityResult`, of a list a `PerplexityTable`, with dry_run a `Planned`. Raises PlanError when the text does
    not fill a window or the vocabularies differ, MillError naming the first tensor or layer whose output is not finite.

    Example:
        >>> from ggufmill import perplexity
        >>> from ggufmill.recipes import FOLDER
        >>> result = perplexity(FOLDER / "demo", FOLDER / "demo" / "heldout.txt", n_ctx=64, chunks=4)
        >>> result.chunks, result.tokens_scored, 10 < result.perplexity < 100
        (4, 124, True)
    """
    model, text, settings = request.model, request.text, settings_of(request, "n_ctx")
    is_list = not isinstance(model, str | Path | TensorSource | Model)
    models: list[ModelLike] = list(model) if is_list else [model]  # type: ignore[arg-type]
    if is_list and request.compare_with is not None:
        raise UsageError("--compare-with compares the result of one model")
    logits = choose_logits(request.kl_divergence, request.kl_divergence_base, request.top_logits, request.force, is_list)
    if request.cluster is not None and (logits.read is not None or logits.write is not None):
        raise UsageError("--cluster has no files of predictions: give the baseline as a model, or leave --cluster out")
    if text is None and logits.read is None:
        raise UsageError("a text is missing (-f)")
    if request.noise_floor and (logits.model is None or request.cluster is not None):
        raise UsageError("--noise-floor runs the baseline: give it as a model (--kl-divergence MODEL), without --cluster")
    earlier = read_result(Path(request.compare_with)) if request.compare_with is not None else None
    data = read_file(Path(text), pipes=True) if text is not None else None
    content = decode_text(data, Path(text)) if text is not None and data is not None else None
    window = logits.read.n_ctx if logits.read is not None else request.n_ctx or N_CTX
    note_micro_batch(window, settings)
    own_settings = settings_of_each([*models, logits.model], settings)
    of_each = [
        window_settings(each, window, own) for each, own in zip([*models, logits.model or models[0]], own_settings, strict=True)
    ]
    opened = [open_model(each, own) for each, own in zip(models, of_each, strict=False)]
    base = open_model(logits.model, of_each[-1]) if logits.model is not None else None
    rounded = (
        [load_model(base.stored, **{**_settings_of(base), "round_activations": True})] if request.noise_floor and base else []
    )
    if logits.read is not None:
        tokens = stored_tokens(logits.read, opened[0], content, request.n_ctx, request.chunks)
    else:
        assert content is not None
        tokens = cut_windows(opened[0], content, window, request.chunks).ravel()
    together = most_together([*opened, *rounded], window, len(tokens) // window, base, as_bytes(request.memory))
    if request.dry_run:
        written = logits_bytes(logits.write, opened[0], len(tokens), window, request.top_logits)
        of_text = len(tokens), window
        seconds = {each.source.path: reading_seconds(each, *of_text, base) for each in opened}
        if base is not None:
            own = reading_seconds(base, *of_text, is_scored=False)
            seconds["baseline"] = own + sum(reading_seconds(each, *of_text, base) for each in rounded)
        memory = reading_memory([*opened, *rounded], window, together, base)
        work = {"windows": len(tokens) // window, "windows_together": together, "tokens": len(tokens)}
        return Planned(
            work,
            reading_forecast(
                seconds, memory, [*opened, *([base] if base else [])], (logits.write or Path("x")).parent, written
            ),
        )
    with reporting(request.progress) as report, ExitStack() as stack:
        abouts = [describe_origin(each, request.full_hash, report) for each in opened]
        baseline_about = describe_origin(base, request.full_hash, report) if base is not None else None
        of_base = (logits.model, base, of_each[-1]) if logits.model is not None and base is not None else None
        run_windows = stack.enter_context(
            scoring_on(request.cluster, list(zip(models, opened, of_each, strict=False)), of_base, request.mtp)
        )
        on_logits = stack.enter_context(
            writing_logits(logits.write, base or opened[0], tokens, window, request.top_logits, baseline_about or abouts[0])
        )
        stage = Stage(report, "perplexity", len(tokens) // window, WINDOWS)
        stack.enter_context(stage.watching(*([base] if base is not None else []), *opened, *rounded))

        def on_chunk(so_far: list[Perplexity], total: int) -> None:
            stage.reach(so_far[0].chunks, total, f"perplexity {so_far[0].perplexity:.4f}", so_far)

        figures = perplexities(
            [*opened, *rounded],
            tokens,
            n_ctx=window,
            on_chunk=on_chunk,
            baseline=logits.read or (ModelBaseline(base, on_logits) if base is not None else None),
            mtp=request.mtp,
            elsewhere=run_windows,
            on_logits=on_logits if base is None else None,
            together=together,
        )
    noise = NoiseFloor.of(figures.pop().as_json()) if rounded else None
    baseline_name = model_name(logits.model) if logits.model is not None else None
    if logits.read is not None:
        baseline_name, baseline_about = logits.read.path, describe_stored(logits.read)
    results = []
    for given, loaded, about, each in zip(models, opened, abouts, figures, strict=True):
        warn(each.notes)
        result = PerplexityResult(
            **vars(each),
            model=model_name(given),
            text=str(text) if text is not None else None,
            baseline=baseline_name,
            about=about,
            baseline_about=baseline_about,
            settings=describe_settings(loaded),
            text_digest=describe_text(data, Path(text).name) if text is not None and data is not None else None,
            program=describe_program(),
            noise_floor=noise,
            earlier=earlier,
        )
        if earlier is not None:
            verdict = compare_results(result.as_json(), earlier)
            result = replace(result, compared_with={"path": str(request.compare_with), **verdict})
        results.append(result)
    if not is_list:
        return results[0]
    return PerplexityTable(results, compare_neighbours([(Path(each.model).name, vars(each)) for each in results]))


def _settings_of(model: Model) -> dict[str, Any]:
    """Those that a model was loaded with."""
    return {field.name: getattr(model.settings, field.name) for field in fields(model.settings)}


@shown
@dataclass(frozen=True)
class TaskResult:
    """The score of a model in tasks with choices, in percent, and what it was measured on.

    error       standard error; None for a single task
    interval    between which the score is with a probability of 95 %
    chance      score of guessing
    tasks, of   tasks taken, and tasks in the file; correct: those with the right answer
    """

    kind: str
    score: float
    error: float | None
    interval: tuple[float, float]
    chance: float
    correct: int
    tasks: int
    of: int
    model: str
    text: str
    about: dict[str, Any]
    settings: dict[str, Any]
    text_digest: dict[str, Any]
    program: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """What --json prints: the fields."""
        return asdict(self)


@verb(TasksRequest)
def score_tasks(request: TasksRequest) -> TaskResult:
    """Scores tasks with choices as llama-perplexity does, from its files: the answer is the choice whose own tokens have the
    largest mean log probability.

    Returns a `TaskResult`. Raises FormatError for a file of another kind, PlanError for tasks that cannot be rated.
    """
    if request.kind not in READERS:
        raise UsageError(f"{request.kind!r} is no kind of tasks: {', '.join(READERS)}")
    path = Path(request.text)
    found = READERS[request.kind](path)
    chosen = choose_tasks(request.kind, found, request.tasks)
    opened = open_model(request.model, settings_of(request))
    with reporting(request.progress) as report:
        stage = Stage(report, request.kind, len(chosen), "task")
        score = rate_tasks(opened, chosen, lambda so_far: stage.reach(so_far.tasks, None, f"{so_far.score:.2f} %"))
        about = describe_origin(opened, request.full_hash, report)
    return TaskResult(
        kind=request.kind,
        score=score.score,
        error=score.error,
        interval=score.interval,
        chance=score.chance,
        correct=score.correct,
        tasks=score.tasks,
        of=len(found),
        model=model_name(request.model),
        text=str(request.text),
        about=about,
        settings=describe_settings(opened),
        text_digest=describe_text(path.read_bytes(), path.name),
        program=describe_program(),
    )


def read_result(path: Path) -> dict[str, Any]:
    """An earlier result as `perplexity --json` printed it. Raises PlanError for anything else."""
    try:
        result: Any = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError):
        result = None
    losses = result.get("window_losses") if isinstance(result, dict) else None
    numbers = [result.get("perplexity"), *(losses or [])] if isinstance(result, dict) and isinstance(losses or [], list) else []
    fits = all(type(number) in (int, float) and abs(number) < 1e300 for number in numbers)
    if not numbers or not fits or "tokens_xxh3" not in result:
        raise PlanError(f"{path} is not a result of `ggufmill perplexity --json`")
    return result
