"""Repeated sequences in a growing text, and what DRY ("don't repeat yourself", llama.cpp's pull request 9702) takes from the
logits of tokens that would make one longer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field

import numpy as np

from ...data_classes import dataclass
from ..text.tokenizer import Tokenizer

_MAX_TAIL = 20  # tokens of a breaker after its first one
_CACHED_BREAKERS = 8  # of one tokenizer
_LARGEST_EXPONENT = 88.7  # e to this is the largest float32; penalties grow no further


@dataclass(frozen=True)
class Breakers:
    """Sequences of tokens that no repetition goes across.

    by_end  last token -> the sequences that end with it; single: the tokens that are a sequence of their own
    """

    by_end: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)
    single: frozenset[int] = frozenset()


def find_breakers(tokenizer: Tokenizer, texts: Sequence[str]) -> Breakers:
    """The sequences of tokens with which any of some texts may be written: a token that contains it, or one that ends with its
    beginning and then the tokens of the rest. Looks through the vocabulary, once for the same texts."""
    known, key = tokenizer.breakers, tuple(texts)
    if key not in known:
        if len(known) >= _CACHED_BREAKERS:
            known.clear()
        known[key] = _search(tokenizer, key)
    return known[key]


def _search(tokenizer: Tokenizer, texts: tuple[str, ...]) -> Breakers:
    pieces = [tokenizer.piece(i) for i in range(tokenizer.n_vocab)]
    sequences: set[tuple[int, ...]] = set()
    for text in dict.fromkeys(texts):
        whole = text.encode("utf-8", "surrogateescape")
        sequences.update((i,) for i, piece in enumerate(pieces) if whole in piece)
        tails = {
            text[:k].encode("utf-8", "surrogateescape"): tokenizer.encode(text[k:], add_special=False)[:_MAX_TAIL]
            for k in range(1, len(text))
        }
        beginnings = tuple(tails)
        for i, piece in enumerate(pieces):
            if beginnings and piece.endswith(beginnings) and whole not in piece:
                sequences.update((i, *tail) for beginning, tail in tails.items() if piece.endswith(beginning))
    by_end: dict[int, list[tuple[int, ...]]] = {}
    for sequence in sequences:
        by_end.setdefault(sequence[-1], []).append(sequence)
    return Breakers(by_end, frozenset(sequence[0] for sequence in sequences if len(sequence) == 1))


class RepetitionPenalty:
    """The penalty of each token that would lengthen a repetition: multiplier x base^(length - allowed_length) for one whose
    last `length` tokens are the last of the text too, from allowed_length on.

    A pass over the text for a prompt, and one of numpy's for each token that follows.
    """

    def __init__(self, multiplier: float, base: float, allowed_length: int, last_n: int, breakers: Breakers):
        """last_n: tokens that are searched; -1: all."""
        self._multiplier, self._base, self._allowed, self._last_n = multiplier, base, allowed_length, last_n
        self._breakers = breakers
        self._n = 0
        # Of the first _n elements: tokens, and how many tokens up to each but the last are those up to the last one.
        self._tokens, self._lengths = np.empty(0, np.int64), np.empty(0, np.int64)
        self._last_breaker = (-1, -1)  # first and last position of the one that begins last

    def apply(self, logits: np.ndarray, past: Sequence[int]) -> None:
        """Changes logits, float64 [n_vocab], in place. past: the text's tokens; where there is one more than at the last call,
        the others are those of the last call."""
        self._follow(past)
        n = len(past)
        window = n if self._last_n < 0 else min(self._last_n, n)
        first = n - window
        start, end = self._last_breaker
        limit = n - 1 - end if start >= first else window
        if window <= self._allowed or limit < self._allowed:
            return
        lengths = np.minimum(self._lengths[first : n - 1], np.minimum(np.arange(1, window), limit))
        repeated = lengths >= self._allowed
        following = self._tokens[first + 1 : n][repeated]
        longest = np.full(len(logits), -1)
        np.maximum.at(longest, following, lengths[repeated])
        longest[list(self._breakers.single)] = -1
        tokens = np.flatnonzero(longest >= 0)
        exponents = (longest[tokens] - self._allowed).astype(np.float64)
        if self._base > 1.000001:
            exponents = np.minimum(exponents, _LARGEST_EXPONENT / math.log(self._base))
        logits[tokens] -= self._multiplier * self._base**exponents

    def _follow(self, past: Sequence[int]) -> None:
        """Brings the state to these tokens."""
        n = len(past)
        if n != self._n + 1 or not self._n:
            self._last_breaker = (-1, -1)
            self._tokens = np.array(past, np.int64)
            self._lengths = _common_suffixes(list(past))
            for position in range(n):
                self._find_breaker(past, position)
        else:
            if n > len(self._tokens):
                self._tokens, self._lengths = (np.resize(a, 2 * n) for a in (self._tokens, self._lengths))
            self._tokens[n - 1] = past[-1]
            same = self._tokens[: n - 1] == past[-1]
            self._lengths[1 : n - 1] = self._lengths[: n - 2] + 1
            self._lengths[0] = 1
            self._lengths[: n - 1] *= same
            self._find_breaker(past, n - 1)
        self._n = n

    def _find_breaker(self, past: Sequence[int], end: int) -> None:
        for sequence in self._breakers.by_end.get(past[end], ()):
            start = end + 1 - len(sequence)
            if start >= 0 and tuple(past[start : end + 1]) == sequence:
                self._last_breaker = max(self._last_breaker, (start, end))


def _common_suffixes(tokens: list[int]) -> np.ndarray:
    """int64 [n]: how many tokens up to each one are those up to the last one; 0 for the last one itself.

    The Z algorithm (Gusfield, Algorithms on strings, trees and sequences, 1.4) on the reversed sequence.
    """
    reverse, n = tokens[::-1], len(tokens)
    lengths, left, right = [0] * n, 0, 0
    for i in range(1, n):
        k = min(right - i, lengths[i - left]) if i < right else 0
        while i + k < n and reverse[k] == reverse[i + k]:
            k += 1
        lengths[i] = k
        if i + k > right:
            left, right = i, i + k
    return np.array(lengths[::-1], np.int64)
