"""`ggufmill perplexity`: how well a model predicts a text, and how far it is from a baseline."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, overload

from ..errors import PlanError, UsageError
from ..formats import TensorSource
from ..formats.file_range import read_file, read_text
from ..imatrix.texts import decode_text
from ..runtime import Model
from ..runtime.evaluate.baseline import ModelBaseline
from ..runtime.evaluate.perplexity import Perplexity, cut_windows, perplexities
from ..runtime.evaluate.provenance import compare_results, describe_program, describe_settings, describe_text
from ..runtime.evaluate.tasks.files import READERS
from ..runtime.evaluate.tasks.score import score_tasks as rate_tasks
from ..runtime.evaluate.tasks.selection import select
from .cluster.windows import scoring_on
from .common.baseline import BaselineLike, choose_logits, describe_stored, stored_tokens, writing_logits
from .common.messages import warn
from .common.models import (
    ModelLike,
    describe_origin,
    model_name,
    note_micro_batch,
    open_model,
    settings_of_each,
    window_settings,
)
from .common.progress import WINDOWS, OnProgress, Stage, reporting

N_CTX = 512


@dataclass(frozen=True, kw_only=True)
class PerplexityResult(Perplexity):
    """The figures of `Perplexity` (perplexity, error, chunks, ..., with a baseline kld_mean, top1_agreement, ...), and what
    they were measured on.

    model, text, baseline   as they were given
    about, baseline_about   the models: files with digests, types, recipe and imatrix; or the file of the baseline's predictions
    settings                that the model ran with
    text_digest, program    size and digest of the text, None without one; versions and processor
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
    earlier: dict[str, Any] | None = field(default=None, repr=False)
    compared_with: dict[str, Any] | None = None

    def as_json(self) -> dict[str, Any]:
        """What --json prints: model, text and baseline, the figures that have a value, and the origin of all."""
        beside = ("model", "text", "baseline", "about", "baseline_about", "settings", "text_digest", "program")
        left_out = (*beside, "earlier", "compared_with")
        figures = {name: value for name, value in super().as_json().items() if name not in left_out}
        summary = {name: getattr(self, name) for name in beside[:3]} | figures | {n: getattr(self, n) for n in beside[3:]}
        return summary | ({"compared_with": self.compared_with} if self.compared_with is not None else {})


@dataclass(frozen=True)
class PerplexityTable:
    """The results of several models on the same text, against the same baseline."""

    results: list[PerplexityResult]

    def as_json(self) -> dict[str, Any]:
        """What --json prints: results."""
        return {"results": [result.as_json() for result in self.results]}


@overload
def perplexity(model: ModelLike, text: str | Path | None = None, **options: Any) -> PerplexityResult: ...
@overload
def perplexity(model: Sequence[ModelLike], text: str | Path | None = None, **options: Any) -> PerplexityTable: ...
def perplexity(
    model: ModelLike | Sequence[ModelLike],
    text: str | Path | None = None,
    *,
    chunks: int | None = None,
    kl_divergence: BaselineLike | None = None,
    kl_divergence_base: str | Path | None = None,
    top_logits: int | None = None,
    mtp: bool = False,
    full_hash: bool = False,
    compare_with: str | Path | None = None,
    n_ctx: int | None = None,
    cluster: str | None = None,
    force: bool = False,
    progress: OnProgress | bool | None = None,
    **settings: Any,
) -> PerplexityResult | PerplexityTable:
    """Scores a text as llama-perplexity does: it is cut into windows, and the second half of each is predicted.

    Compare figures only for the same text, context and number of windows.

    model               a GGUF file, a checkpoint folder, or what `ggufmill.runtime.load_model` gave; a list of several, which
                        are all open at the same time: the baseline reads each window once for all of them
    text                the file to read; None: the tokens in a file of the baseline's predictions
    chunks              windows to read; None: all
    kl_divergence       a baseline with the same vocabulary, usually the bf16 model, or a file of its predictions: KL
                        divergence, agreement on the top token; True: the file is kl_divergence_base
    kl_divergence_base  a file that gets the baseline's predictions, or without one the model's, in llama-perplexity's format
    top_logits          the file holds only so many tokens of each prediction, in a format of this program's own
    mtp                 the draft layers (multi-token prediction) are rated, too: perplexity, agreement and acceptance of each
    full_hash           digests of every byte of the model files, not of samples of large ones
    compare_with        a file with what an earlier call printed with --json: whether the two can be compared, and how they
                        differ
    n_ctx               tokens per window; None: 512, or those of the baseline's predictions
    cluster             workers run the windows, with the same figures: tcp://HOST:PORT, a scheduler file or local:N
    force               an existing file of predictions is replaced
    settings            of `load_model`: threads, batch, ubatch, cache_k, cache_v, flash, mla, attention_bytes, repack,
                        expert_reduction; none for a model that is loaded
    progress            stage 'perplexity' in windows, `partial` a list with each model's `Perplexity` so far; with full_hash
                        'checksum' in bytes

    Returns a `PerplexityResult`, of a list a `PerplexityTable`. Raises PlanError when the text does not fill a window or the
    vocabularies differ, MillError naming the first tensor or layer whose output is not finite.

    Example:
        >>> from ggufmill import perplexity
        >>> from ggufmill.recipes import FOLDER
        >>> result = perplexity(FOLDER / "demo", FOLDER / "demo" / "heldout.txt", n_ctx=64, chunks=4)
        >>> result.chunks, result.tokens_scored, 10 < result.perplexity < 100
        (4, 124, True)
    """
    is_list = not isinstance(model, str | Path | TensorSource | Model)
    models: list[ModelLike] = list(model) if is_list else [model]  # type: ignore[arg-type]
    if is_list and compare_with is not None:
        raise UsageError("--compare-with compares the result of one model")
    logits = choose_logits(kl_divergence, kl_divergence_base, top_logits, force, is_list)
    if cluster is not None and (logits.read is not None or logits.write is not None):
        raise UsageError("--cluster has no files of predictions: give the baseline as a model, or leave --cluster out")
    if text is None and logits.read is None:
        raise UsageError("a text is missing (-f)")
    earlier = read_result(Path(compare_with)) if compare_with is not None else None
    data = read_file(Path(text), pipes=True) if text is not None else None
    content = decode_text(data, Path(text)) if text is not None and data is not None else None
    window = logits.read.n_ctx if logits.read is not None else n_ctx or N_CTX
    note_micro_batch(window, settings)
    own_settings = settings_of_each([*models, logits.model], settings)
    of_each = [
        window_settings(each, window, own) for each, own in zip([*models, logits.model or models[0]], own_settings, strict=True)
    ]
    opened = [open_model(each, own) for each, own in zip(models, of_each, strict=False)]
    base = open_model(logits.model, of_each[-1]) if logits.model is not None else None
    if logits.read is not None:
        tokens = stored_tokens(logits.read, opened[0], content, n_ctx, chunks)
    else:
        assert content is not None
        tokens = cut_windows(opened[0], content, window, chunks).ravel()
    with reporting(progress) as report, ExitStack() as stack:
        abouts = [describe_origin(each, full_hash, report) for each in opened]
        baseline_about = describe_origin(base, full_hash, report) if base is not None else None
        of_base = (logits.model, base, of_each[-1]) if logits.model is not None and base is not None else None
        run_windows = stack.enter_context(scoring_on(cluster, list(zip(models, opened, of_each, strict=False)), of_base, mtp))
        on_logits = stack.enter_context(
            writing_logits(logits.write, base or opened[0], tokens, window, top_logits, baseline_about or abouts[0])
        )
        stage = Stage(report, "perplexity", unit=WINDOWS)

        def on_chunk(so_far: list[Perplexity], total: int) -> None:
            stage.reach(so_far[0].chunks, total, f"perplexity {so_far[0].perplexity:.4f}", so_far)

        figures = perplexities(
            opened,
            tokens,
            n_ctx=window,
            on_chunk=on_chunk,
            baseline=logits.read or (ModelBaseline(base, on_logits) if base is not None else None),
            mtp=mtp,
            elsewhere=run_windows,
            on_logits=on_logits if base is None else None,
        )
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
            earlier=earlier,
        )
        if earlier is not None:
            verdict = compare_results(result.as_json(), earlier)
            result = replace(result, compared_with={"path": str(compare_with), **verdict})
        results.append(result)
    return PerplexityTable(results) if is_list else results[0]


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


def score_tasks(
    model: ModelLike,
    text: str | Path,
    kind: str,
    *,
    tasks: int | None = None,
    full_hash: bool = False,
    progress: OnProgress | bool | None = None,
    **settings: Any,
) -> TaskResult:
    """Scores tasks with choices as llama-perplexity does, from its files: the answer is the choice whose own tokens have the
    largest mean log probability.

    model      as for `perplexity`
    text       the file of tasks
    kind       'hellaswag' (six lines per task), 'winogrande' (a line with commas per task) or 'multiple-choice' (binary; ARC,
               MMLU, TruthfulQA)
    tasks      so many tasks at random, the ones that llama-perplexity takes; None: all
    full_hash  digests of every byte of the model files, not of samples of large ones
    settings   of `load_model`, as for `perplexity`
    progress   a stage of the kind's name, in tasks

    Returns a `TaskResult`. Raises FormatError for a file of another kind, PlanError for tasks that cannot be rated.
    """
    if kind not in READERS:
        raise UsageError(f"{kind!r} is no kind of tasks: {', '.join(READERS)}")
    path = Path(text)
    found = READERS[kind](path)
    chosen = select(kind, found, tasks)
    opened = open_model(model, settings)
    with reporting(progress) as report:
        stage = Stage(report, kind, len(chosen), "task")
        score = rate_tasks(opened, chosen, lambda so_far: stage.reach(so_far.tasks, None, f"{so_far.score:.2f} %"))
        about = describe_origin(opened, full_hash, report)
    return TaskResult(
        kind=kind,
        score=score.score,
        error=score.error,
        interval=score.interval,
        chance=score.chance,
        correct=score.correct,
        tasks=score.tasks,
        of=len(found),
        model=model_name(model),
        text=str(text),
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
