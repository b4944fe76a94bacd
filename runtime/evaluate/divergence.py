"""Scores predictions: loss of the tokens that followed, and KL divergence of a model's predictions from a baseline's.

Logits are computed for a block of tokens at a time: with a vocabulary of 150,000 tokens those of a window of 512 tokens would
take 300 MB for each of the two models. Threads score a block in chunks that fit the cache of a core.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..model import Model
from .clock import seconds_without_compilation

BLOCK_BYTES = 128 << 20  # logits of one model in memory
CHUNK_BYTES = 1 << 20  # logits that one thread scores at a time


@dataclass(frozen=True)
class Scores:
    """Scores of n predictions; NaN in `losses` or `base_losses` where a logit of that model was not finite.

    losses       float64 [n], minus the log probability of the token that followed, in nats
    base_losses  float64 [n], the same of the baseline
    divergences  float64 [n], Kullback-Leibler divergence of the model's distribution from the baseline's, in nats
    same_top     bool [n]: model and baseline have the same most probable token
    seconds      time for computing and scoring the model's logits, without the baseline's
    """

    losses: np.ndarray
    seconds: float
    base_losses: np.ndarray | None = None
    divergences: np.ndarray | None = None
    same_top: np.ndarray | None = None


def score(
    model: Model,
    hidden: np.ndarray,
    targets: np.ndarray,
    baseline: Model | None = None,
    base_hidden: np.ndarray | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> Scores:
    """Scores the predictions of a model, and compares them with those of a baseline if there is one.

    hidden, base_hidden  float32 [n, n_embd], outputs of `Model.hidden` of model and baseline for the same tokens
    targets              int [n], the token that followed each of them
    block_bytes          largest size of the logits of one model in memory
    """
    block_rows, chunk_rows = (max(1, size // (4 * model.n_vocab)) for size in (block_bytes, CHUNK_BYTES))
    results: list[tuple[np.ndarray, ...]] = []
    seconds = 0.0
    for first in range(0, len(hidden), block_rows):
        block = slice(first, first + block_rows)
        start = seconds_without_compilation()
        logits = [model.head(hidden[block])]
        seconds += seconds_without_compilation() - start
        if baseline is not None and base_hidden is not None:
            logits.append(baseline.head(base_hidden[block]))
        score_chunk = _Block(targets[block], *logits)
        start = seconds_without_compilation()
        results += model.workers.map(score_chunk, [slice(i, i + chunk_rows) for i in range(0, len(logits[0]), chunk_rows)])
        seconds += seconds_without_compilation() - start if baseline is None else 0.0
    losses, *comparison = (np.concatenate(parts) for parts in zip(*results, strict=True))
    return Scores(losses, seconds, *comparison)


@dataclass(frozen=True)
class _Block:
    """Targets int [n] and logits float32 [n, n_vocab] of a block of tokens; a call scores a chunk and overwrites its logits."""

    targets: np.ndarray
    logits: np.ndarray
    base: np.ndarray | None = None

    def __call__(self, chunk: slice) -> tuple[np.ndarray, ...]:
        if self.base is None:
            return (_losses(self.logits[chunk], self.targets[chunk]),)
        return _compare_logits(self.logits[chunk], self.base[chunk], self.targets[chunk])


def _subtract_maximum(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Subtracts the maximum of each row in place. Returns the targets' shifted logits, float64 [n], NaN for nonfinite rows."""
    maximum = logits.max(axis=1)
    finite = np.isfinite(maximum) & np.isfinite(logits.min(axis=1))
    with np.errstate(invalid="ignore"):
        logits -= maximum[:, None]
    target_logits = logits[np.arange(len(logits)), targets].astype(np.float64)
    target_logits[~finite] = np.nan
    return target_logits


def _losses(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Losses, float64 [n], of logits float32 [n, n_vocab], which are overwritten."""
    target_logits = _subtract_maximum(logits, targets)
    with np.errstate(invalid="ignore"):
        np.exp(logits, out=logits)
        return np.log(logits.sum(axis=1).astype(np.float64)) - target_logits


def _compare_logits(logits: np.ndarray, base: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, ...]:
    """(losses, base losses, divergences, same top) of two arrays of logits float32 [n, n_vocab], which are overwritten.

    With shifted logits q and p of model and baseline the divergence is the mean of p - q over the baseline's distribution plus
    the difference of the logarithms of the two sums of exponentials. Large log probabilities, whose rounding would hide a small
    divergence, do not occur.
    """
    same_top = logits.argmax(axis=1) == base.argmax(axis=1)
    target_logits, base_target_logits = _subtract_maximum(logits, targets), _subtract_maximum(base, targets)
    with np.errstate(invalid="ignore"):
        difference = base - logits
        np.exp(logits, out=logits)
        np.exp(base, out=base)
        difference *= base
        total, base_total = (x.sum(axis=1).astype(np.float64) for x in (logits, base))
        log_total, log_base_total = np.log(total), np.log(base_total)
        divergences = difference.sum(axis=1) / base_total + log_total - log_base_total
    return log_total - target_logits, log_base_total - base_target_logits, divergences, same_top
