"""Perplexity of a text, and how far a model's predictions are from those of a baseline.

As llama-perplexity computes it: the text is cut into windows of n_ctx tokens, each begun with BOS if the model adds one, and
the tokens of a window's second half are scored, so that every prediction has at least n_ctx / 2 tokens of context.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ..formats import PlanError
from .model import Model

OnChunk = Callable[["Perplexity", int], None]


@dataclass(frozen=True)
class Perplexity:
    """perplexity and its standard error over `tokens_scored` predictions of `chunks` windows; the rest only with a baseline.

    notes           what makes the figures doubtful, for people to read
    error, *_error  None where a single prediction was scored
    kld_*           Kullback-Leibler divergence of the model from the baseline, in nats per token: mean and its standard
                    error, median, 99th percentile, maximum
    top1_agreement  percent of predictions whose most probable token is the baseline's; top1_error its standard error
    ratio           perplexity / baseline's perplexity, with its standard error
    """

    perplexity: float
    error: float | None
    chunks: int
    n_ctx: int
    tokens_scored: int
    tokens_per_second: float
    kld_mean: float | None = None
    kld_error: float | None = None
    kld_median: float | None = None
    kld_p99: float | None = None
    kld_max: float | None = None
    top1_agreement: float | None = None
    top1_error: float | None = None
    baseline_perplexity: float | None = None
    ratio: float | None = None
    ratio_error: float | None = None
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
    """Scores the first `chunks` windows (all if None) of a text or of token ids.

    on_chunk: called after each window with the result so far and the number of windows in all. baseline: a model with the same
    vocabulary to compare with. Raises PlanError when there is not one whole window or the vocabularies differ, MillError
    naming the first tensor or layer at fault when a prediction is not finite.
    """
    windows = _windows(model, tokens_or_text, n_ctx, chunks)
    if baseline is not None and baseline.n_vocab != model.n_vocab:
        raise PlanError(f"the baseline has {baseline.n_vocab} tokens in its vocabulary, the model {model.n_vocab}")
    tally = _Tally(n_ctx, _notes(model, baseline, n_ctx))
    # An observer may want to stop and save between windows: it is then given one at a time.
    together = max(1, model.settings.batch // n_ctx) if model.observer is None else 1
    for at in range(0, len(windows), together):
        group = windows[at : at + together]
        began = time.perf_counter()
        predictions = _hidden(model, group)
        busy = time.perf_counter() - began
        bases = _hidden(baseline, group) if baseline is not None else []
        for i, window in enumerate(group):
            began = time.perf_counter()
            scores = _log_probabilities(model, predictions[i], window)
            loss = _losses(scores, window)
            tally.seconds += time.perf_counter() - began + busy / len(group)
            tally.losses.append(loss)
            if baseline is not None:
                tally.compare(scores, _log_probabilities(baseline, bases[i], window), window)
            if on_chunk is not None:
                on_chunk(tally.result(), len(windows))
    return tally.result()


def _windows(model: Model, tokens_or_text: str | Sequence[int] | np.ndarray, n_ctx: int, chunks: int | None) -> np.ndarray:
    """int64 [windows, n_ctx]; the first token of each is BOS if the model adds one."""
    if n_ctx < 4:
        raise PlanError(f"n_ctx is {n_ctx}; a window needs at least 4 tokens")
    if chunks is not None and chunks < 1:
        raise PlanError(f"{chunks} windows cannot be scored: at least 1")
    given = tokens_or_text if not isinstance(tokens_or_text, str) else model.tokenizer.encode(tokens_or_text)
    tokens = np.asarray(given, np.int64)
    if len(tokens) < n_ctx:
        raise PlanError(f"the text has {len(tokens)} tokens, one window needs {n_ctx}: give more text or a smaller n_ctx")
    count = len(tokens) // n_ctx if chunks is None else min(chunks, len(tokens) // n_ctx)
    windows = tokens[: count * n_ctx].reshape(count, n_ctx).copy()
    bos = _bos(model)
    if bos is not None:
        windows[:, 0] = bos
    return windows


def _notes(model: Model, baseline: Model | None, n_ctx: int) -> list[str]:
    both = (("model", model), ("baseline", baseline))
    return [
        f"n_ctx is {n_ctx}, but the {name} was trained with a context of {given.graph.n_context} tokens"
        for name, given in both
        if given is not None and n_ctx > given.graph.n_context
    ]


def _bos(model: Model) -> int | None:
    if "tokenizer.ggml.tokens" not in model.metadata:
        return None  # token ids can be scored without a vocabulary
    return model.tokenizer.bos if model.tokenizer.add_bos else None


def _hidden(model: Model, windows: np.ndarray) -> list[np.ndarray]:
    """For each window the outputs that predict its scored tokens, float32 [scored, n_embd]."""
    n_ctx = windows.shape[1]
    outputs = model.hidden([(model.new_cache(n_ctx), window) for window in windows])
    return [output[n_ctx // 2 : n_ctx - 1] for output in outputs]


def _log_probabilities(model: Model, hidden: np.ndarray, window: np.ndarray) -> np.ndarray:
    """float32 [scored, n_vocab]. Raises MillError when one is not finite."""
    scores = model.head(hidden)
    with np.errstate(invalid="ignore"):
        scores -= scores.max(axis=1, keepdims=True)
        scores -= np.log(np.exp(scores).sum(axis=1, keepdims=True))
    if not np.isfinite(scores.sum(dtype=np.float64)):
        raise model.explain_nonfinite(window)
    return scores


def _losses(scores: np.ndarray, window: np.ndarray) -> np.ndarray:
    """float64 [scored]: minus the log probability of each token that came."""
    return -scores[np.arange(len(scores)), window[len(window) // 2 + 1 :]].astype(np.float64)


class _Tally:
    """What has been measured so far."""

    def __init__(self, n_ctx: int, notes: list[str]):
        self.n_ctx, self.notes, self.seconds = n_ctx, notes, 0.0
        self.losses: list[np.ndarray] = []
        self.base_losses: list[np.ndarray] = []
        self.divergences: list[np.ndarray] = []
        self.same_top: list[np.ndarray] = []

    def compare(self, scores: np.ndarray, base: np.ndarray, window: np.ndarray) -> None:
        self.base_losses.append(_losses(base, window))
        self.same_top.append(scores.argmax(axis=1) == base.argmax(axis=1))
        self.divergences.append((np.exp(base) * (base - scores)).sum(axis=1).astype(np.float64))

    def result(self) -> Perplexity:
        losses = np.concatenate(self.losses)
        value = _exp(losses.mean())
        speed = len(self.losses) * self.n_ctx / self.seconds if self.seconds else 0.0
        plain = (value, _standard_error(losses, value), len(self.losses), self.n_ctx, len(losses), speed)
        if not self.divergences:
            return Perplexity(*plain, notes=self.notes)
        divergence, same = np.concatenate(self.divergences), np.concatenate(self.same_top).astype(np.float64)
        base = np.concatenate(self.base_losses)
        ratio = _exp((losses - base).mean())
        return Perplexity(
            *plain,
            kld_mean=float(divergence.mean()),
            kld_error=_standard_error(divergence),
            kld_median=float(np.median(divergence)),
            kld_p99=float(np.percentile(divergence, 99)),
            kld_max=float(divergence.max()),
            top1_agreement=float(100 * same.mean()),
            top1_error=_standard_error(same, 100.0),
            baseline_perplexity=_exp(base.mean()),
            ratio=ratio,
            ratio_error=_standard_error(losses - base, ratio),
            notes=self.notes,
        )


def _exp(value: float) -> float:
    return math.exp(value) if value < 709 else math.inf  # e^709 is near the end of float64


def _standard_error(values: np.ndarray, scale: float = 1.0) -> float | None:
    """Of the mean of independent values, times scale; None for one value, from which it cannot be told."""
    if len(values) < 2:
        return None
    return scale * math.sqrt(max(float((values**2).mean() - values.mean() ** 2), 0.0) / (len(values) - 1))
