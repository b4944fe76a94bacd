"""Samples the next token from logits: penalties, top_k, top_p, min_p, temperature."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...formats import PlanError

_TOP_P_CANDIDATES = 256  # tokens that top_p sorts at first: nearly always enough


@dataclass(frozen=True)
class Sampling:
    """Sampling settings; names, defaults and order are llama.cpp's: penalties, top_k, top_p, min_p, temperature.

    temp               divides the logits; 0: always the most probable token
    top_k              keep the k most probable tokens; 0: all
    top_p              keep the most probable tokens that together have this probability; 1: all
    min_p              keep tokens at least this fraction as probable as the most probable one; 0: all
    repeat_penalty     positive logits of tokens among the last repeat_last_n are divided by this, negative multiplied; 1: off
    presence_penalty   is subtracted from the logits of these tokens; 0: off
    frequency_penalty  is subtracted from them once for each occurrence among the last repeat_last_n; 0: off
    repeat_last_n      tokens that the penalties consider, those of the prompt too; -1: all
    seed               the same seed, prompt and settings give the same text; None: a random seed
    """

    temp: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_last_n: int = 64
    seed: int | None = None

    def __post_init__(self) -> None:
        """Raises PlanError for a value outside its range."""
        checks = {
            "temp": self.temp >= 0,
            "top_k": self.top_k >= 0,
            "top_p": 0 < self.top_p <= 1,
            "min_p": 0 <= self.min_p <= 1,
            "repeat_penalty": self.repeat_penalty > 0,
            "presence_penalty": math.isfinite(self.presence_penalty),
            "frequency_penalty": math.isfinite(self.frequency_penalty),
            "repeat_last_n": self.repeat_last_n >= -1,
            "seed": self.seed is None or self.seed >= 0,
        }
        for name, valid in checks.items():
            value = getattr(self, name)
            if not valid or value == math.inf:
                raise PlanError(f"sampling cannot work with {name} = {value}")


class Sampler:
    """Samples tokens with a random generator of its own."""

    def __init__(self, settings: Sampling):
        self.settings = settings
        self._random = np.random.default_rng(settings.seed)

    def sample(self, logits: np.ndarray, past: Sequence[int]) -> int:
        """Samples a token id. logits: float32 [n_vocab], not changed; past: all tokens so far, for the penalties."""
        logits = logits.astype(np.float64)
        self._penalise(logits, past)
        if self.settings.temp == 0:
            return int(logits.argmax())
        candidates = self._candidates(logits)
        remaining = logits[candidates]
        cumulative = np.cumsum(np.exp((remaining - remaining.max()) / self.settings.temp))
        index = np.searchsorted(cumulative, self._random.random() * cumulative[-1], side="right")
        return int(candidates[min(index, len(candidates) - 1)])

    def _penalise(self, logits: np.ndarray, past: Sequence[int]) -> None:
        """Changes logits in place."""
        s = self.settings
        if not past or not s.repeat_last_n or (s.repeat_penalty, s.presence_penalty, s.frequency_penalty) == (1, 0, 0):
            return
        recent, counts = np.unique(np.asarray(past if s.repeat_last_n < 0 else past[-s.repeat_last_n :]), return_counts=True)
        values = logits[recent]
        values = np.where(values > 0, values / s.repeat_penalty, values * s.repeat_penalty)
        logits[recent] = values - counts * s.frequency_penalty - s.presence_penalty

    def _candidates(self, logits: np.ndarray) -> np.ndarray:
        """Ids that top_k, top_p and min_p keep, by descending logit; if all are off, every id in ascending order.

        Only a part of the vocabulary is sorted. Each filter keeps a prefix of the sorted vocabulary, so min_p may be applied
        before top_p, as long as the probabilities of top_p are relative to the sum over all tokens that top_k kept.
        """
        s, peak = self.settings, logits.max()
        if 0 < s.top_k < len(logits):
            ids = most_probable(logits, s.top_k)
            total = np.exp(logits[ids] - peak).sum()
            if s.min_p > 0:
                ids = ids[logits[ids] >= peak + math.log(s.min_p)]
        elif s.min_p > 0:
            total = np.exp(logits - peak).sum() if s.top_p < 1 else 1.0
            ids = _sorted(logits, np.flatnonzero(logits >= peak + math.log(s.min_p)))
        elif s.top_p < 1:
            total, k = np.exp(logits - peak).sum(), _TOP_P_CANDIDATES
            ids = most_probable(logits, k)
            while len(ids) < len(logits) and np.exp(logits[ids] - peak).sum() < s.top_p * total:
                k *= 8
                ids = most_probable(logits, k)
        else:
            return np.arange(len(logits))
        if s.top_p < 1:
            probability = np.exp(logits[ids] - peak)
            ids = ids[np.cumsum(probability) - probability < s.top_p * total]
        return ids


def most_probable(logits: np.ndarray, k: int) -> np.ndarray:
    """The k ids with the largest logits, descending; of equal logits the lower id first, so that a seed gives the same text on
    every machine. All ids if k is 0 or not less than n_vocab."""
    if not 0 < k < len(logits):
        return _sorted(logits, np.arange(len(logits)))
    threshold = np.partition(logits, -k)[-k]
    return _sorted(logits, np.flatnonzero(logits >= threshold))[:k]


def _sorted(logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    return ids[np.argsort(-logits[ids], kind="stable")]


@dataclass(frozen=True)
class SampledToken:
    """A sampled token with its log probability, and the most probable tokens as pairs (id, log probability).

    These are the probabilities of the model, before penalties, filters and temperature.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]

    @staticmethod
    def from_logits(token: int, logits: np.ndarray, n_top: int) -> SampledToken:
        """logits: float32 [n_vocab] that the token was sampled from; n_top: number of most probable tokens to record."""
        logits = logits.astype(np.float64)
        peak = logits.max()
        log_sum = peak + np.log(np.exp(logits - peak).sum())
        top = most_probable(logits, n_top) if n_top else []
        return SampledToken(token, float(logits[token] - log_sum), [(int(i), float(logits[i] - log_sum)) for i in top])
