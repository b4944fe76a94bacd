"""Choosing the next token from logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..formats import PlanError


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; the names and defaults are llama.cpp's.

    temp            divides the logits; 0: always the most probable token
    top_k           keep the k most probable tokens; 0: all
    top_p           keep the most probable tokens that together have this probability; 1: all
    min_p           keep tokens at least this fraction as probable as the most probable one; 0: all
    repeat_penalty  logits of tokens among the last repeat_last_n are divided (if positive, else multiplied) by this; 1: off
    seed            the same seed, prompt and settings give the same text; None: another one each time
    """

    temp: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
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
            "repeat_last_n": self.repeat_last_n >= 0,
            "seed": self.seed is None or self.seed >= 0,
        }
        for name, good in checks.items():
            if not good:
                raise PlanError(f"sampling cannot work with {name} = {getattr(self, name)}")


class Sampler:
    """Draws tokens one after the other from its own random numbers."""

    def __init__(self, settings: Sampling):
        self.settings = settings
        self._random = np.random.default_rng(settings.seed)

    def pick(self, logits: np.ndarray, past: Sequence[int]) -> int:
        """logits float32 [n_vocab], not changed; past: all tokens so far, for the repeat penalty. Returns a token id."""
        s = self.settings
        logits = logits.astype(np.float64)
        if s.repeat_penalty != 1 and s.repeat_last_n and past:
            recent = np.unique(np.asarray(past[-s.repeat_last_n :]))
            known = logits[recent]
            logits[recent] = np.where(known > 0, known / s.repeat_penalty, known * s.repeat_penalty)
        if s.temp == 0:
            return int(logits.argmax())
        candidates = self._most_probable(logits)
        kept = logits[candidates]
        probability = np.exp(kept - kept[0])
        if s.top_p < 1:
            before = np.cumsum(probability) - probability
            candidates = candidates[before < s.top_p * probability.sum()]
            probability = probability[: len(candidates)]
        if s.min_p > 0:
            candidates = candidates[probability >= s.min_p]
        kept = logits[candidates] / s.temp
        cumulative = np.cumsum(np.exp(kept - kept[0]))
        chosen = np.searchsorted(cumulative, self._random.random() * cumulative[-1], side="right")
        return int(candidates[min(chosen, len(candidates) - 1)])

    def _most_probable(self, logits: np.ndarray) -> np.ndarray:
        """Ids by falling logit, at most top_k; of equals the lower id first, so that a seed gives the same text everywhere."""
        k = self.settings.top_k
        if 0 < k < len(logits):
            floor = np.partition(logits, -k)[-k]
            ids = np.flatnonzero(logits >= floor)
            return ids[np.argsort(-logits[ids], kind="stable")][:k]
        return np.argsort(-logits, kind="stable")
