"""Scoring predictions: how likely the tokens that came were, and how far a model's predictions lie from a baseline's.

Logits exist for a block of tokens at a time, whatever the length of a window: with a vocabulary of 150,000 those of one window
of 512 tokens would take 300 MB for each of the two models. Blocks are cut into pieces that fit a core's cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..model import Model
from .clock import working_seconds

BLOCK_BYTES = 128 << 20  # logits of one model that are in memory at a time
PIECE_BYTES = 1 << 20  # logits that one thread works on at a time


@dataclass(frozen=True)
class Scored:
    """Predictions of n tokens; NaN in `losses` or `base_losses` where a logit of that model was not finite.

    losses       float64 [n], minus the log probability of the token that came, in nats; base_losses: the baseline's
    divergences  float64 [n], Kullback-Leibler divergence of the model's distribution from the baseline's, in nats
    same_top     bool [n]: model and baseline have the same most probable token
    seconds      what making and scoring the model's own logits took
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
) -> Scored:
    """Scores predictions from a model's outputs float32 [n, n_embd], as `Model.hidden` gives them, for the tokens int [n]
    that came; and against a baseline's outputs for the same tokens."""
    rows, piece = (max(1, size // (4 * model.n_vocab)) for size in (block_bytes, PIECE_BYTES))
    map_pieces = model.workers.map
    found: list[tuple[np.ndarray, ...]] = []
    seconds = 0.0
    for start in range(0, len(hidden), rows):
        block = slice(start, start + rows)
        began = working_seconds()
        logits = [model.head(hidden[block])]
        seconds += working_seconds() - began
        if baseline is not None and base_hidden is not None:
            logits.append(baseline.head(base_hidden[block]))
        work = _Block(targets[block], *logits)
        began = working_seconds()
        found += map_pieces(work, [slice(at, at + piece) for at in range(0, len(logits[0]), piece)])
        seconds += working_seconds() - began if baseline is None else 0.0
    losses, *more = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return Scored(losses, seconds, *more)


@dataclass(frozen=True)
class _Block:
    """Targets int [n] and logits float32 [n, n_vocab] of a block of tokens, scored piece by piece in place."""

    targets: np.ndarray
    logits: np.ndarray
    base: np.ndarray | None = None

    def __call__(self, piece: slice) -> tuple[np.ndarray, ...]:
        if self.base is None:
            return (_losses(self.logits[piece], self.targets[piece]),)
        return _compared(self.logits[piece], self.base[piece], self.targets[piece])


def _shift(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Takes the largest off every row, in place; returns the targets' values, float64 [n], NaN for a row that is not finite."""
    top = logits.max(axis=1)
    finite = np.isfinite(top) & np.isfinite(logits.min(axis=1))
    with np.errstate(invalid="ignore"):
        logits -= top[:, None]
    right = logits[np.arange(len(logits)), targets].astype(np.float64)
    right[~finite] = np.nan
    return right


def _losses(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """float64 [n]; overwrites the logits float32 [n, n_vocab]."""
    right = _shift(logits, targets)
    with np.errstate(invalid="ignore"):
        np.exp(logits, out=logits)
        return np.log(logits.sum(axis=1).astype(np.float64)) - right


def _compared(logits: np.ndarray, base: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, ...]:
    """(losses, base losses, divergences, same top); overwrites both arrays of logits.

    With shifted logits q and p of model and baseline the divergence is the mean of p - q over the baseline's distribution, plus
    the difference of the two normalisers: large log probabilities, whose rounding would hide a small divergence, never occur.
    """
    same_top = logits.argmax(axis=1) == base.argmax(axis=1)
    right, base_right = _shift(logits, targets), _shift(base, targets)
    with np.errstate(invalid="ignore"):
        apart = base - logits
        np.exp(logits, out=logits)
        np.exp(base, out=base)
        apart *= base
        total, base_total = (x.sum(axis=1).astype(np.float64) for x in (logits, base))
        normaliser, base_normaliser = np.log(total), np.log(base_total)
        divergences = apart.sum(axis=1) / base_total + normaliser - base_normaliser
    return normaliser - right, base_normaliser - base_right, divergences, same_top
