"""Scores predictions: loss of the tokens that followed, and KL divergence of a model's predictions from a baseline's.

Logits are computed for a block of tokens at a time: with a vocabulary of 150,000 tokens those of a window of 512 tokens would
take 300 MB for each of the two models. Threads score a block in chunks that fit the cache of a core.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from ...data_classes import dataclass
from ...simd.compile.compile_time import seconds_without_compilation
from ..model import Model

BLOCK_BYTES = 64 << 20  # logits of one model in memory
CHUNK_BYTES = 1 << 20  # logits that one thread scores at a time
OnLogits = Callable[[np.ndarray], None]


@dataclass(frozen=True)
class Scores:
    """Scores of n predictions; NaN in `losses` or `base_losses` where a logit of that model was not finite.

    losses       float64 [n], minus the log probability of the token that followed, in nats
    base_losses  float64 [n], the same of the baseline
    divergences  float64 [n], Kullback-Leibler divergence of the model's distribution from the baseline's, in nats
    same_top     bool [n]: model and baseline have the same most probable token
    base_top     float64 [n], the probability of the baseline's most probable token
    missing      float64 [n], estimate of what the divergences lack, of a baseline whose distributions are not whole
    seconds      time for computing and scoring the model's logits, without the baseline's
    """

    losses: np.ndarray
    seconds: float
    base_losses: np.ndarray | None = None
    divergences: np.ndarray | None = None
    same_top: np.ndarray | None = None
    base_top: np.ndarray | None = None
    missing: np.ndarray | None = None


@dataclass(frozen=True)
class Logits:
    """A model's logits of some tokens, with what a comparison needs of them.

    top            int [n], the most probable token
    shifted        float32 [n, n_vocab], the logits minus the largest of each row
    exp            float32 [n, n_vocab], their exponentials
    total          float64 [n], the sums of these
    target_logits  float64 [n], the shifted logits of the tokens that followed; NaN for rows with a logit that is not finite
    """

    top: np.ndarray
    shifted: np.ndarray
    exp: np.ndarray
    total: np.ndarray
    target_logits: np.ndarray

    @property
    def losses(self) -> np.ndarray:
        """float64 [n]."""
        return np.log(self.total) - self.target_logits


class BaselineBlock(Protocol):
    """A baseline's predictions of a block of tokens."""

    def compare(self, chunk: slice, logits: Logits, targets: np.ndarray) -> tuple[np.ndarray, ...]:
        """Compares a model's logits of a chunk of these tokens: (base losses, divergences, same top, base top) and, where the
        baseline's distributions are not whole, `missing`: each [n] as in `Scores`. Several threads call it, each for another
        chunk."""
        ...


class Predictions(Protocol):
    """A baseline's predictions of the scored tokens of a window."""

    def block(self, rows: slice) -> BaselineBlock:
        """Those of some of the tokens, which follow each other."""
        ...


def score(
    model: Model, hidden: np.ndarray, targets: np.ndarray, baseline: Predictions | None = None, block_bytes: int = BLOCK_BYTES
) -> Scores:
    """Scores the predictions of one model, as `score_each`."""
    return score_each([model], [hidden], targets, baseline, block_bytes=block_bytes)[0]


def score_each(
    models: Sequence[Model],
    hidden: Sequence[np.ndarray],
    targets: np.ndarray,
    baseline: Predictions | None = None,
    on_logits: OnLogits | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> list[Scores]:
    """Scores the predictions of models, and compares them with those of a baseline if there is one.

    hidden       of each model its outputs of `Model.hidden` for the same tokens, float32 [n, n_embd]
    targets      int [n], the token that followed each of them
    on_logits    called with the first model's logits of each block, float32 [rows, n_vocab], before they are scored
    block_bytes  largest size of the logits of one model in memory
    """
    block_rows, chunk_rows = (max(1, size // (4 * models[0].n_vocab)) for size in (block_bytes, CHUNK_BYTES))
    results: list[list[tuple[np.ndarray, ...]]] = [[] for _ in models]
    seconds = [0.0] * len(models)
    for first in range(0, len(targets), block_rows):
        block = slice(first, min(first + block_rows, len(targets)))
        base = baseline.block(block) if baseline is not None else None
        chunks = [slice(i, min(i + chunk_rows, block.stop - first)) for i in range(0, block.stop - first, chunk_rows)]
        for i, model in enumerate(models):
            start = seconds_without_compilation()
            logits = model.head(hidden[i][block])
            seconds[i] += seconds_without_compilation() - start
            if on_logits is not None and i == 0:
                on_logits(logits)
            score_chunk = _Block(targets[block], logits, base)
            start = seconds_without_compilation()
            results[i] += model.workers.map(score_chunk, chunks)
            seconds[i] += seconds_without_compilation() - start if baseline is None else 0.0
            del logits, score_chunk  # before the next ones are made
    return [_joined(parts, taken) for parts, taken in zip(results, seconds, strict=True)]


def _joined(parts: list[tuple[np.ndarray, ...]], seconds: float) -> Scores:
    losses, *comparison = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return Scores(losses, seconds, *comparison)


@dataclass(frozen=True)
class _Block:
    """Targets int [n] and logits float32 [n, n_vocab] of a block of tokens; a call scores a chunk and overwrites its logits."""

    targets: np.ndarray
    logits: np.ndarray
    base: BaselineBlock | None = None

    def __call__(self, chunk: slice) -> tuple[np.ndarray, ...]:
        logits, targets = self.logits[chunk], self.targets[chunk]
        if self.base is None:
            return (score_chunk(logits, targets),)
        prepared = prepare_logits(logits, targets)
        with np.errstate(invalid="ignore"):
            return prepared.losses, *self.base.compare(chunk, prepared, targets)


def _subtract_maximum(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Subtracts the maximum of each row in place. Returns the targets' shifted logits, float64 [n], NaN for nonfinite rows."""
    maximum = logits.max(axis=1)
    finite = np.isfinite(maximum) & np.isfinite(logits.min(axis=1))
    with np.errstate(invalid="ignore"):
        logits -= maximum[:, None]
    target_logits = logits[np.arange(len(logits)), targets].astype(np.float64)
    target_logits[~finite] = np.nan
    return target_logits


def score_chunk(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Losses, float64 [n], of logits float32 [n, n_vocab], which are overwritten."""
    target_logits = _subtract_maximum(logits, targets)
    with np.errstate(invalid="ignore"):
        np.exp(logits, out=logits)
        return np.log(logits.sum(axis=1).astype(np.float64)) - target_logits


def prepare_logits(logits: np.ndarray, targets: np.ndarray) -> Logits:
    """The logits float32 [n, n_vocab], which are overwritten, and what comparisons need of them. targets: int [n]."""
    top, target_logits = logits.argmax(axis=1), _subtract_maximum(logits, targets)
    with np.errstate(invalid="ignore"):
        exp = np.exp(logits)
        return Logits(top, logits, exp, exp.sum(axis=1).astype(np.float64), target_logits)


class ModelPredictions:
    """Those that a baseline's head makes of its outputs.

    hidden: float32 [n, n_embd], of `Model.hidden`; targets: int [n], the tokens that followed; on_logits: called with the
    logits of each block, float32 [rows, n_vocab].
    """

    def __init__(self, model: Model, hidden: np.ndarray, targets: np.ndarray, on_logits: OnLogits | None = None):
        self._model, self._hidden, self._targets, self._on_logits = model, hidden, targets, on_logits

    def block(self, rows: slice) -> BaselineBlock:
        logits = self._model.head(self._hidden[rows])
        if self._on_logits is not None:
            self._on_logits(logits)
        return LogitsBlock(logits, self._targets[rows])


class LogitsBlock:
    """A baseline's logits float32 [n, n_vocab], which are overwritten; each chunk is prepared for the first model's
    comparison."""

    def __init__(self, logits: np.ndarray, targets: np.ndarray):
        self._logits, self._targets = logits, targets
        self._prepared: dict[int, Logits] = {}

    def compare(self, chunk: slice, logits: Logits, targets: np.ndarray) -> tuple[np.ndarray, ...]:
        """With shifted logits q and p of model and baseline the divergence is the mean of p - q over the baseline's
        distribution plus the difference of the logarithms of the two sums of exponentials. Large log probabilities, whose
        rounding would hide a small divergence, do not occur."""
        base = self._prepared.get(chunk.start)
        if base is None:
            base = self._prepared[chunk.start] = prepare_logits(self._logits[chunk], self._targets[chunk])
        difference = base.shifted - logits.shifted
        difference *= base.exp
        divergences = difference.sum(axis=1) / base.total + np.log(logits.total) - np.log(base.total)
        return base.losses, divergences, logits.top == base.top, 1 / base.total
