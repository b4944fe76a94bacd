"""Perplexity of a text, and how far a model's predictions are from those of a baseline.

As llama-perplexity computes it: the text is cut into windows of n_ctx tokens, each begun with BOS if the model adds one, and
the tokens of a window's second half are scored, so that every prediction has at least n_ctx / 2 tokens of context. The baseline
runs in the same process, window by window: no file of logits lies in between, and nothing of its predictions is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import xxhash

from ...formats import PlanError
from ..model import Model
from .clock import working_seconds
from .divergence import score
from .score_statistics import Tally

OnChunk = Callable[["Perplexity", int], None]


@dataclass(frozen=True)
class Perplexity:
    """perplexity and its standard error over `tokens_scored` predictions of `chunks` windows; the rest only with a baseline.

    notes            what makes the figures doubtful, for people to read
    tokens_xxh3      digest of the windows' token ids: two results with the same one scored the same predictions
    window_losses    mean loss (nats per token) of each window: what a later result can be paired with; only in the last result
    error, *_error   standard errors of the mean; None where a single prediction was scored
    ratio            perplexity / baseline's perplexity; log_ratio its logarithm, difference: perplexity minus the baseline's
    correlation      of the two models' losses, -1 to 1; None where one of them does not vary
    kld_*            Kullback-Leibler divergence of the model from the baseline, in nats per token
    top1_agreement   percent of predictions whose most probable token is the baseline's
    delta_p_*        change of the probability of the token that came, in percentage points: mean, root mean square, extremes

    The percentiles, minima and maxima are only in the last result, not in the running ones.
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
    tokens_xxh3: str = ""
    window_losses: list[float] | None = None
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """All fields that have a value, ready for json.dumps."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def perplexity(
    model: Model,
    tokens_or_text: str | Sequence[int] | np.ndarray,
    n_ctx: int = 512,
    chunks: int | None = None,
    on_chunk: OnChunk | None = None,
    baseline: Model | None = None,
) -> Perplexity:
    """Scores the first `chunks` windows (all if None) of a text or of token ids; as many windows run together as fit into the
    model's `batch`.

    on_chunk: called after each window with the result so far and the number of windows in all. baseline: a model with the same
    vocabulary to compare with. Raises PlanError when there is not one whole window or the vocabularies differ, MillError
    naming the first tensor or layer at fault as soon as an output or prediction of either model is not finite.
    """
    windows = windows_of(model, tokens_or_text, n_ctx, chunks)
    if baseline is not None and baseline.n_vocab != model.n_vocab:
        raise PlanError(f"the baseline has {baseline.n_vocab} tokens in its vocabulary, the model {model.n_vocab}")
    tally = Tally()
    about: dict[str, Any] = {
        "n_ctx": n_ctx,
        "tokens_xxh3": xxhash.xxh3_64_hexdigest(windows.tobytes()),
        "notes": context_notes(model, baseline, n_ctx),
    }
    # An observer may want to stop and save between windows: it is then given one at a time.
    together = max(1, model.settings.batch // n_ctx) if model.observer is None else 1
    for at in range(0, len(windows), together):
        for _ in score_windows(model, windows[at : at + together], tally, baseline):
            if on_chunk is not None:
                on_chunk(summary(tally, about), len(windows))
    return summary(tally, about | {"window_losses": tally.window_losses} | tally.distribution())


def score_windows(model: Model, windows: np.ndarray, tally: Tally, baseline: Model | None = None) -> Iterator[None]:
    """Runs windows int64 [n, n_ctx] together and adds the scores of their second halves to the tally; yields after each window.

    Raises MillError as `perplexity` does.
    """
    first = windows.shape[1] // 2
    began = working_seconds()
    outputs = _hidden(model, windows)
    tally.seconds += working_seconds() - began
    bases = _hidden(baseline, windows) if baseline is not None else [None] * len(windows)
    for window, output, base in zip(windows, outputs, bases, strict=True):
        scored = score(model, output, window[first + 1 :], baseline, base)
        if not np.isfinite(scored.losses).all():
            raise model.explain_nonfinite(window)
        if baseline is not None and not np.isfinite(scored.base_losses).all():
            raise baseline.explain_nonfinite(window)
        tally.add(scored)
        yield


def summary(tally: Tally, more: dict[str, Any]) -> Perplexity:
    """The figures so far. more: n_ctx, and other fields."""
    chunks = len(tally.window_losses)
    return Perplexity(
        chunks=chunks,
        tokens_scored=tally.losses.count,
        tokens_per_second=chunks * more["n_ctx"] / tally.seconds if tally.seconds else 0.0,
        **tally.perplexity(),
        **tally.comparison(),
        **more,
    )


def windows_of(model: Model, tokens_or_text: str | Sequence[int] | np.ndarray, n_ctx: int, chunks: int | None) -> np.ndarray:
    """int64 [windows, n_ctx]; the first token of each is BOS if the model adds one."""
    if n_ctx < 4:
        raise PlanError(f"n_ctx is {n_ctx}; a window needs at least 4 tokens")
    if chunks is not None and chunks < 1:
        raise PlanError(f"{chunks} windows cannot be scored: at least 1")
    given = tokens_or_text if not isinstance(tokens_or_text, str) else model.tokenizer.encode(tokens_or_text)
    tokens = np.asarray(given, np.int64)
    if len(tokens) < n_ctx:
        raise PlanError(f"the text has {len(tokens)} tokens, one window needs {n_ctx}: give more text or a smaller n_ctx (-c)")
    count = len(tokens) // n_ctx if chunks is None else min(chunks, len(tokens) // n_ctx)
    windows = tokens[: count * n_ctx].reshape(count, n_ctx).copy()
    bos = _bos(model)
    if bos is not None:
        windows[:, 0] = bos
    return windows


def context_notes(model: Model, baseline: Model | None, n_ctx: int) -> list[str]:
    """What makes figures with such windows doubtful."""
    both = (("model", model), ("baseline", baseline))
    return [
        f"n_ctx is {n_ctx}, but the {name} was trained with a context of {given.n_ctx_train} tokens"
        for name, given in both
        if given is not None and n_ctx > given.n_ctx_train
    ]


def _bos(model: Model) -> int | None:
    if "tokenizer.ggml.tokens" not in model.metadata:
        return None  # token ids can be scored without a vocabulary
    return model.tokenizer.bos if model.tokenizer.add_bos else None


def _hidden(model: Model, windows: np.ndarray) -> list[np.ndarray]:
    """For each window the outputs that predict its scored tokens, float32 [scored, n_embd]. Raises MillError when an output is
    not finite, of the first half of a window too."""
    n_ctx = windows.shape[1]
    outputs = model.hidden([(model.new_cache(n_ctx), window) for window in windows])
    for output, window in zip(outputs, windows, strict=True):
        if not np.isfinite(output).all():
            raise model.explain_nonfinite(window)
    return [output[n_ctx // 2 : n_ctx - 1] for output in outputs]
