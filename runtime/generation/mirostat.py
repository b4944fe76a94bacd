"""Mirostat: sampling that keeps the surprise of a text's tokens near a target (arXiv:2007.14966), as llama.cpp does it."""

from __future__ import annotations

import math

import numpy as np

ZIPF_TOKENS = 100  # most probable tokens that the exponent of Zipf's law is estimated from


class Mirostat:
    """A limit of surprise in bits, which follows the surprise of the tokens that are sampled. At first it is twice the target;
    rate: how fast it follows."""

    def __init__(self, target: float, rate: float):
        self._target, self._rate = target, rate
        self.limit = 2 * target

    @property
    def least(self) -> float:
        """The probability of a token whose surprise is at the limit (version 2 keeps those that have it)."""
        return 2.0 ** -min(max(self.limit, 0.0), 1000.0)

    def count(self, top: np.ndarray, n_vocab: int) -> int:
        """How many of the most probable tokens have the surprise that is wanted, by Zipf's law (version 1, algorithm 1 of the
        paper): 1 to n_vocab. top: float64, the ZIPF_TOKENS largest probabilities, descending."""
        top = top[top > 0]
        if len(top) < 2:
            return 1
        ranks = np.arange(1, len(top))
        steps, falls = np.log((ranks + 1) / ranks), np.log(top[:-1] / top[1:])
        exponent = max(float(steps @ falls / (steps @ steps)), 1e-9)
        log_n, excess = math.log(n_vocab), exponent - 1
        # (excess 2^limit / (1 - n^-excess))^(1 / exponent), in logarithms: no power overflows
        ratio = excess / -math.expm1(-excess * log_n) if abs(excess) > 1e-9 else 1 / log_n
        log_count = (self.limit * math.log(2) + math.log(ratio)) / exponent
        return max(1, int(math.exp(min(log_count, log_n))))

    def learn(self, probability: float) -> None:
        """Moves the limit. probability: of the token that was sampled, among those that were kept."""
        self.limit -= self._rate * (-math.log2(probability) - self._target)
