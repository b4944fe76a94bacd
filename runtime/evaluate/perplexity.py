"""Perplexity of a model on a text, and the divergence of its predictions from those of a baseline model.

Computed as llama-perplexity does: the text is cut into windows of n_ctx tokens, the first token of each is replaced by BOS if
the model adds one, and the tokens of a window's second half are scored, so that every prediction has at least n_ctx / 2 tokens
of context. The baseline runs in the same process on the same windows; there is no file of logits, which would round them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import xxhash

from ...formats import PlanError
from ..draft_head import check_draft_layers
from ..model import Model
from .clock import seconds_without_compilation
from .divergence import score
from .draft_scores import DraftFigures, DraftPart, DraftScores
from .score_statistics import RecordedScores, ScoreStatistics

OnChunk = Callable[["Perplexity", int], None]
OnHidden = Callable[[np.ndarray, np.ndarray], None]


@dataclass(frozen=True)
class Perplexity:
    """Perplexity with its standard error over `tokens_scored` predictions of `chunks` windows; most fields need a baseline.

    notes            reasons why the figures may be misleading, for people to read
    tokens_xxh3      hash of the windows' token ids: results with the same hash scored the same predictions
    window_losses    mean loss of each window in nats per token, for paired comparisons; in the final result only
    error, *_error   standard errors; None if a single prediction was scored
    ratio            perplexity / baseline's perplexity; log_ratio is its logarithm
    difference       perplexity minus the baseline's
    correlation      of the two models' losses, -1 to 1; None if one of them does not vary
    kld_*            Kullback-Leibler divergence of the model from the baseline, in nats per token
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
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """All fields that are not None, ready for json.dumps."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class WindowScores:
    """What running windows gives, to be added up in order. drafts: of the draft layers, block by block."""

    scores: RecordedScores
    drafts: list[DraftPart]


# (all windows, which of them run together) -> what each of these batches gives, in order: made elsewhere
RunWindows = Callable[[np.ndarray, Sequence[slice]], Iterator[WindowScores]]


def perplexity(
    model: Model,
    tokens_or_text: str | Sequence[int] | np.ndarray,
    n_ctx: int = 512,
    chunks: int | None = None,
    on_chunk: OnChunk | None = None,
    baseline: Model | None = None,
    mtp: bool = False,
    elsewhere: RunWindows | None = None,
) -> Perplexity:
    """Scores the first windows of a text or of token ids; as many windows run in one pass as fit into the model's `batch`.

    n_ctx     tokens of a window
    chunks    number of windows; None: all
    on_chunk  called after each window with the result so far and the total number of windows
    baseline  a model with the same vocabulary to compare with
    mtp       the draft layers are scored, too
    elsewhere runs the windows, instead of this model: what `run_windows` gives for each batch, which is added up in order

    Raises PlanError for a model that predicts no tokens, when the text has less than one window, the vocabularies differ, there
    is no draft layer or too many for the window, MillError naming the first tensor or layer at fault as soon as an output or
    prediction of either model is not finite.
    """
    for each in (model, baseline):
        if each is not None and not each.has_head:
            raise PlanError(f"{each.source.path}: {each.graph.architecture} predicts no tokens and has no perplexity")
    windows = make_windows(model, tokens_or_text, n_ctx, chunks)
    if baseline is not None and baseline.n_vocab != model.n_vocab:
        raise PlanError(f"the baseline has {baseline.n_vocab} tokens in its vocabulary, the model {model.n_vocab}")
    statistics, drafts = ScoreStatistics(), None
    if mtp:
        check_draft_layers(model)
        if n_ctx < 2 * len(model.draft_heads):
            raise PlanError(f"n_ctx is {n_ctx}; windows for {len(model.draft_heads)} draft layers need twice as many tokens")
        drafts = DraftScores(model)
    fields: dict[str, Any] = {
        "n_ctx": n_ctx,
        "tokens_xxh3": xxhash.xxh3_64_hexdigest(windows.tobytes()),
        "notes": context_notes(model, baseline, n_ctx),
    }
    # With an observer one window at a time: the caller may save the observer's state after each window.
    step = max(1, model.settings.batch // n_ctx) if model.observer is None else 1
    batches = [slice(first, min(first + step, len(windows))) for first in range(0, len(windows), step)]
    results = elsewhere(windows, batches) if elsewhere is not None else None
    for batch in batches:
        if results is not None:
            scored = _joined(next(results), statistics, drafts)
        else:
            scored = score_windows(model, windows[batch], statistics, baseline, drafts.add if drafts else None)
        for _ in scored:
            if on_chunk is not None:
                on_chunk(summarise(statistics, fields), len(windows))
    measured = {"mtp": drafts.figures()} if drafts is not None else {}
    return summarise(statistics, fields | {"window_losses": statistics.window_losses} | statistics.distribution() | measured)


def score_windows(
    model: Model,
    windows: np.ndarray,
    statistics: ScoreStatistics,
    baseline: Model | None = None,
    on_hidden: OnHidden | None = None,
) -> Iterator[None]:
    """Runs windows int64 [n, n_ctx] in one pass and adds the scores of their second halves; yields after each window.

    on_hidden: called with each window and the model's outputs for it, float32 [n_ctx, n_embd].

    Raises MillError as `perplexity` does.
    """
    middle = windows.shape[1] // 2
    start = seconds_without_compilation()
    outputs = _hidden(model, windows, on_hidden)
    statistics.seconds += seconds_without_compilation() - start
    base_outputs = _hidden(baseline, windows) if baseline is not None else [None] * len(windows)
    for window, output, base_output in zip(windows, outputs, base_outputs, strict=True):
        scores = score(model, output, window[middle + 1 :], baseline, base_output)
        if not np.isfinite(scores.losses).all():
            raise model.explain_nonfinite(window)
        if baseline is not None and not np.isfinite(scores.base_losses).all():
            raise baseline.explain_nonfinite(window)
        statistics.add(scores)
        yield


def run_windows(model: Model, windows: np.ndarray, baseline: Model | None = None, mtp: bool = False) -> WindowScores:
    """What a batch of windows adds to the figures of `perplexity`. Raises MillError as it does."""
    result, drafts = WindowScores(RecordedScores(), []), DraftScores(model)

    def on_hidden(window: np.ndarray, hidden: np.ndarray) -> None:
        result.drafts.extend(drafts.parts(window, hidden))

    for _ in score_windows(model, windows, result.scores, baseline, on_hidden if mtp else None):
        pass
    return result


def _joined(result: WindowScores, statistics: ScoreStatistics, drafts: DraftScores | None) -> Iterator[None]:
    """Adds what a batch gave elsewhere; yields after each window."""
    for part in result.drafts:
        if drafts is not None:
            drafts.join(part)
    yield from statistics.join(result.scores)


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
    """Cuts a text into windows, int64 [windows, n_ctx]; the first token of each is replaced by BOS if the model adds one.

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
    windows = tokens[: count * n_ctx].reshape(count, n_ctx).copy()
    bos = _bos(model)
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


def _hidden(model: Model, windows: np.ndarray, on_hidden: OnHidden | None = None) -> list[np.ndarray]:
    """For each window the model's outputs that predict its scored tokens, float32 [scored, n_embd].

    Raises MillError when any output of a window is not finite.
    """
    n_ctx = windows.shape[1]
    outputs = model.hidden([(model.new_cache(n_ctx), window) for window in windows])
    for output, window in zip(outputs, windows, strict=True):
        if not np.isfinite(output).all():
            raise model.explain_nonfinite(window)
        if on_hidden is not None:
            on_hidden(window, output)
    return [output[n_ctx // 2 : n_ctx - 1] for output in outputs]
