"""Perplexity of a model on a text, and the divergence of its predictions from those of a baseline model.

Computed as llama-perplexity does: the text is cut into windows of n_ctx tokens, the first token of each is replaced by BOS if
the model adds one, and the tokens of a window's second half are scored, so that every prediction has at least n_ctx / 2 tokens
of context. Several models can be scored at once: a baseline then reads each window once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, field
from typing import Any

import numpy as np
import xxhash

from ...data_classes import dataclass
from ...formats import PlanError
from ...simd.compile.compile_time import seconds_without_compilation
from ..draft_head import check_draft_layers
from ..model import Model
from .baseline import Baseline, ModelBaseline, OnHidden, scored_outputs
from .divergence import OnLogits, Predictions, score_each
from .draft_scores import DraftFigures, DraftPart, DraftScores
from .score_statistics import RecordedScores, ScoreStatistics

OnChunk = Callable[["Perplexity", int], None]
OnChunks = Callable[[list["Perplexity"], int], None]


@dataclass(frozen=True)
class Perplexity:
    """Perplexity with its standard error over `tokens_scored` predictions of `chunks` windows; most fields need a baseline.

    notes            reasons why the figures may be misleading, for people to read
    tokens_xxh3      hash of the windows' token ids: results with the same hash scored the same predictions
    window_losses    mean loss of each window in nats per token, for paired comparisons; window_klds, window_base_losses: the
                     same of the divergence and of the baseline's loss; in the final result only
    error, *_error   standard errors; None if a single prediction was scored
    ratio            perplexity / baseline's perplexity; log_ratio is its logarithm
    difference       perplexity minus the baseline's
    correlation      of the two models' losses, -1 to 1; None if one of them does not vary
    kld_*            Kullback-Leibler divergence of the model from the baseline, in nats per token
    kld_confident    the mean over predictions whose most probable token has a probability of at least 0.5 in the baseline: they
                     are confident_share percent of all; the rest, where several tokens will do, rules kld_mean
    kld_missing      estimate of what kld_mean lacks, of a baseline that keeps only its most probable tokens
    top1_agreement   percent of predictions with the same most probable token as the baseline
    mtp              the figures of each draft layer
    delta_p_*        change of the next token's probability, in percentage points: mean, root mean square, extremes

    Percentiles, minima and maxima are in the final result only, not in those given to `on_chunk`.
    """

    perplexity: float
    error: float | None
    chunks: int
    n_ctx: int
    tokens_scored: int
    tokens_per_second: float
    baseline_perplexity: float | None = None
    baseline_error: float | None = None
    ratio: float | None = None
    ratio_error: float | None = None
    log_ratio: float | None = None
    log_ratio_error: float | None = None
    difference: float | None = None
    difference_error: float | None = None
    correlation: float | None = None
    kld_mean: float | None = None
    kld_error: float | None = None
    kld_min: float | None = None
    kld_median: float | None = None
    kld_p99: float | None = None
    kld_max: float | None = None
    kld_percentiles: dict[str, float] | None = None
    kld_missing: float | None = None
    kld_confident: float | None = None
    kld_confident_error: float | None = None
    confident_share: float | None = None
    top1_agreement: float | None = None
    top1_error: float | None = None
    delta_p_mean: float | None = None
    delta_p_error: float | None = None
    delta_p_rms: float | None = None
    delta_p_rms_error: float | None = None
    delta_p_min: float | None = None
    delta_p_max: float | None = None
    delta_p_percentiles: dict[str, float] | None = None
    mtp: list[DraftFigures] | None = None
    tokens_xxh3: str = ""
    window_losses: list[float] | None = None
    window_klds: list[float] | None = None
    window_base_losses: list[float] | None = None
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """All fields that are not None, ready for json.dumps."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class WindowScores:
    """What running windows gives, to be added up in order. drafts: of the draft layers, block by block."""

    scores: RecordedScores
    drafts: list[DraftPart]


# (all windows, which of them run together) -> for each of these batches what each model gives, in order: made elsewhere
RunWindows = Callable[[np.ndarray, Sequence[slice]], Iterator[list[WindowScores]]]


@dataclass(frozen=True)
class ScoredModel:
    """A model that is scored, the statistics of its predictions, and what is called with its outputs: see `scored_outputs`."""

    model: Model
    statistics: ScoreStatistics
    on_hidden: OnHidden | None = None


def perplexity(
    model: Model,
    tokens_or_text: str | Sequence[int] | np.ndarray,
    n_ctx: int = 512,
    chunks: int | None = None,
    on_chunk: OnChunk | None = None,
    baseline: Model | Baseline | None = None,
    mtp: bool = False,
    elsewhere: RunWindows | None = None,
    together: int | None = None,
) -> Perplexity:
    """Scores one model, as `perplexities`. on_chunk: called with its result so far and the total number of windows."""

    def on_chunks(so_far: list[Perplexity], total: int) -> None:
        if on_chunk is not None:
            on_chunk(so_far[0], total)

    base = ModelBaseline(baseline) if isinstance(baseline, Model) else baseline
    called = on_chunks if on_chunk else None
    return perplexities([model], tokens_or_text, n_ctx, chunks, called, base, mtp, elsewhere, together=together)[0]


def perplexities(
    models: Sequence[Model],
    tokens_or_text: str | Sequence[int] | np.ndarray,
    n_ctx: int = 512,
    chunks: int | None = None,
    on_chunk: OnChunks | None = None,
    baseline: Baseline | None = None,
    mtp: bool = False,
    elsewhere: RunWindows | None = None,
    on_logits: OnLogits | None = None,
    together: int | None = None,
) -> list[Perplexity]:
    """Scores the first windows of a text or of token ids with each of several models of the same vocabulary; as many windows
    run in one pass as `windows_together` says.

    n_ctx      tokens of a window
    chunks     number of windows; None: all
    on_chunk   called after each window with the results so far and the total number of windows
    baseline   what to compare with, of the same vocabulary; it reads each window once
    mtp        the draft layers are scored, too
    elsewhere  runs the windows, instead of these models: what `run_windows` gives for each batch, which is added up in order
    on_logits  called with the first model's logits of each block of predictions, in order
    together   windows that run in one pass at most; None: as many as fit into the first model's `batch`

    Raises PlanError for a model that predicts no tokens, when the text has less than one window, the vocabularies differ, there
    is no draft layer or too many for the window, MillError naming the first tensor or layer at fault as soon as an output or
    prediction of a model or of the baseline is not finite.
    """
    base_model = baseline.model if isinstance(baseline, ModelBaseline) else None
    for each in (*models, base_model):
        if each is not None and not each.has_head:
            raise PlanError(f"{each.source.path}: {each.graph.architecture} predicts no tokens and has no perplexity")
    windows = make_windows(models[0], tokens_or_text, n_ctx, chunks)
    for each in models:
        _check_vocabulary(each, models[0], baseline)
    drafts = [_draft_scores(model, n_ctx) for model in models] if mtp else []
    candidates = [ScoredModel(model, ScoreStatistics(), drafts[i].add if drafts else None) for i, model in enumerate(models)]
    tokens_xxh3 = xxhash.xxh3_64_hexdigest(windows.tobytes())
    fields: list[dict[str, Any]] = [
        {"n_ctx": n_ctx, "tokens_xxh3": tokens_xxh3, "notes": context_notes(model, base_model, n_ctx)} for model in models
    ]

    def on_window() -> None:
        if on_chunk is not None:
            on_chunk([summarise(c.statistics, f) for c, f in zip(candidates, fields, strict=True)], len(windows))

    # With an observer one window at a time: the caller may save the observer's state after each window.
    step = min(windows_together(models[0], n_ctx), together or len(windows)) if models[0].observer is None else 1
    batches = [slice(first, min(first + step, len(windows))) for first in range(0, len(windows), step)]
    results = elsewhere(windows, batches) if elsewhere is not None else None
    for batch in batches:
        if results is not None:
            scored = _joined(next(results), candidates, drafts)
        else:
            base = baseline.predictions(windows[batch], batch.start) if baseline is not None else None
            scored = score_windows(candidates, windows[batch], baseline, base, on_logits)
        for _ in scored:
            on_window()
    return [_final(candidate, fields[i], drafts[i] if drafts else None) for i, candidate in enumerate(candidates)]


def windows_together(model: Model, n_ctx: int) -> int:
    """Windows of n_ctx tokens that fit into a model's `batch`; one at least."""
    return max(1, model.settings.batch // n_ctx)


def _draft_scores(model: Model, n_ctx: int) -> DraftScores:
    """Raises PlanError for a model without draft layers, or with too many for windows of n_ctx tokens."""
    check_draft_layers(model)
    if n_ctx < 2 * len(model.draft_heads):
        raise PlanError(f"n_ctx is {n_ctx}; windows for {len(model.draft_heads)} draft layers need twice as many tokens")
    return DraftScores(model)


def _final(candidate: ScoredModel, fields: dict[str, Any], drafts: DraftScores | None) -> Perplexity:
    """The result with what only the last one has."""
    statistics, measured = candidate.statistics, {"mtp": drafts.figures()} if drafts is not None else {}
    windows: dict[str, Any] = {"window_losses": statistics.window_losses}
    if statistics.window_klds:
        windows |= {"window_klds": statistics.window_klds, "window_base_losses": statistics.window_base_losses}
    return summarise(statistics, fields | windows | statistics.distribution() | measured)


def _check_vocabulary(model: Model, first: Model, baseline: Baseline | None) -> None:
    """Raises PlanError if the models, or a model and the baseline, have different numbers of tokens."""
    if model.n_vocab != first.n_vocab:
        numbers = f"{first.source.path} has {first.n_vocab} tokens in its vocabulary, {model.source.path} {model.n_vocab}"
        raise PlanError(f"the models cannot be compared: {numbers}")
    if baseline is not None and baseline.n_vocab != model.n_vocab:
        raise PlanError(f"the baseline has {baseline.n_vocab} tokens in its vocabulary, the model {model.n_vocab}")


def score_windows(
    candidates: Sequence[ScoredModel],
    windows: np.ndarray,
    baseline: Baseline | None = None,
    base: Sequence[Predictions] | None = None,
    on_logits: OnLogits | None = None,
) -> Iterator[None]:
    """Runs windows int64 [n, n_ctx] in one pass of each model, and adds the scores of their second halves to its statistics;
    yields after each window.

    base: the baseline's predictions of each window; on_logits: see `perplexities`.

    Raises MillError as `perplexities` does.
    """
    middle, outputs = windows.shape[1] // 2, []
    for candidate in candidates:
        start = seconds_without_compilation()
        outputs.append(scored_outputs(candidate.model, windows, candidate.on_hidden))
        candidate.statistics.seconds += seconds_without_compilation() - start
    models = [candidate.model for candidate in candidates]
    for number, window in enumerate(windows):
        hidden, predictions = [each[number] for each in outputs], base[number] if base is not None else None
        scored = score_each(models, hidden, window[middle + 1 :], predictions, on_logits)
        for candidate, scores in zip(candidates, scored, strict=True):
            if not np.isfinite(scores.losses).all():
                raise candidate.model.explain_nonfinite(window)
            if baseline is not None and scores.base_losses is not None and not np.isfinite(scores.base_losses).all():
                raise baseline.explain_nonfinite(window)
            candidate.statistics.add(scores)
        yield


def run_windows(
    models: Sequence[Model], windows: np.ndarray, baseline: Model | None = None, mtp: bool = False
) -> list[WindowScores]:
    """What a batch of windows adds to the figures of each model of `perplexities`. Raises MillError as it does."""
    results = [WindowScores(RecordedScores(), []) for _ in models]

    def drafts_of(model: Model, result: WindowScores) -> OnHidden:
        drafts = DraftScores(model)
        return lambda window, hidden: result.drafts.extend(drafts.parts(window, hidden))

    candidates = [
        ScoredModel(model, result.scores, drafts_of(model, result) if mtp else None)
        for model, result in zip(models, results, strict=True)
    ]
    base = ModelBaseline(baseline) if baseline is not None else None
    for _ in score_windows(candidates, windows, base, base.predictions(windows, 0) if base is not None else None):
        pass
    return results


def _joined(
    results: Sequence[WindowScores], candidates: Sequence[ScoredModel], drafts: Sequence[DraftScores]
) -> Iterator[None]:
    """Adds what a batch gave elsewhere to each model's statistics; yields after each window."""
    for result, scores in zip(results, drafts, strict=False):  # no drafts: none were asked for
        for part in result.drafts:
            scores.join(part)
    joins = [candidate.statistics.join(result.scores) for candidate, result in zip(candidates, results, strict=True)]
    yield from (None for _ in zip(*joins, strict=True))


def summarise(statistics: ScoreStatistics, fields: dict[str, Any]) -> Perplexity:
    """The result so far. fields: n_ctx, and other fields of `Perplexity`."""
    chunks = len(statistics.window_losses)
    return Perplexity(
        chunks=chunks,
        tokens_scored=statistics.losses.count,
        tokens_per_second=chunks * fields["n_ctx"] / statistics.seconds if statistics.seconds else 0.0,
        **statistics.perplexity(),
        **statistics.comparison(),
        **fields,
    )


def make_windows(model: Model, tokens_or_text: str | Sequence[int] | np.ndarray, n_ctx: int, chunks: int | None) -> np.ndarray:
    """The windows of `cut_windows`, the first token of each replaced by BOS if the model adds one. Raises as it does."""
    return with_bos(model, cut_windows(model, tokens_or_text, n_ctx, chunks))


def cut_windows(model: Model, tokens_or_text: str | Sequence[int] | np.ndarray, n_ctx: int, chunks: int | None) -> np.ndarray:
    """Cuts a text into windows, int64 [windows, n_ctx].

    chunks: largest number of windows, None: all. Raises PlanError when there is not one whole window.
    """
    if n_ctx < 4:
        raise PlanError(f"n_ctx is {n_ctx}; a window needs at least 4 tokens")
    if chunks is not None and chunks < 1:
        raise PlanError(f"{chunks} windows cannot be scored: at least 1")
    ids = model.tokenizer.encode(tokens_or_text) if isinstance(tokens_or_text, str) else tokens_or_text
    tokens = np.asarray(ids, np.int64)
    if len(tokens) < n_ctx:
        raise PlanError(f"the text has {len(tokens)} tokens, one window needs {n_ctx}: give more text or a smaller n_ctx (-c)")
    count = len(tokens) // n_ctx if chunks is None else min(chunks, len(tokens) // n_ctx)
    return tokens[: count * n_ctx].reshape(count, n_ctx)


def with_bos(model: Model, windows: np.ndarray) -> np.ndarray:
    """Windows int64 [n, n_ctx] with BOS in place of the first token of each, if the model adds one."""
    windows, bos = windows.copy(), _bos(model)
    if bos is not None:
        windows[:, 0] = bos
    return windows


def context_notes(model: Model, baseline: Model | None, n_ctx: int) -> list[str]:
    """Notes for windows that are longer than the context with which a model was trained."""
    models = (("model", model), ("baseline", baseline))
    return [
        f"n_ctx is {n_ctx}, but the {name} was trained with a context of {each.n_ctx_train} tokens"
        for name, each in models
        if each is not None and n_ctx > each.n_ctx_train
    ]


def _bos(model: Model) -> int | None:
    if "tokenizer.ggml.tokens" not in model.metadata:
        return None  # token ids can be scored without a vocabulary
    return model.tokenizer.bos if model.tokenizer.add_bos else None
