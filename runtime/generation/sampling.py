"""Samples the next token from logits: biases, penalties, filters, temperature; or biases, temperature, Mirostat.

Mirostat keeps the surprise of a text's tokens near a target (arXiv:2007.14966), as llama.cpp does it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ...data_classes import dataclass
from ...formats import PlanError
from ..text.tokenizer import Tokenizer
from .repetition import Breakers, RepetitionPenalty, find_breakers
from .sampler_order import FILTERS, NOT_PREFIXES, apply_in_order, by_logit, least_by_sigma, most_probable
from .sampling_options import DEFAULT_ORDER, Sampling

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


_TOP_P_CANDIDATES = 256  # tokens that top_p sorts at first: nearly always enough


def token_biases(tokenizer: Tokenizer, biases: Mapping[int | str, float]) -> dict[int, float]:
    """`Sampling.logit_bias` of biases for token ids or texts; that of a text is given to each of its tokens.

    Raises PlanError for ids that the vocabulary does not have.
    """
    result: dict[int, float] = {}
    for key, bias in biases.items():
        for token in tokenizer.encode(key, add_special=False, parse_special=True) if isinstance(key, str) else [key]:
            if not 0 <= token < tokenizer.n_vocab:
                raise PlanError(f"logit_bias: there is no token {token}; ids go from 0 to {tokenizer.n_vocab - 1}")
            result[token] = bias
    return result


class Sampler:
    """Samples the tokens of a text, with a random generator of its own.

    candidates  of the last token: the ids that it was drawn from, and their weights (probabilities times a factor)
    """

    def __init__(self, settings: Sampling, tokenizer: Tokenizer | None = None, breakers: Breakers | None = None):
        """tokenizer: for dry_sequence_breakers, unless they were found already: breakers. Raises PlanError where one of the two
        is needed and both are None."""
        self.settings = settings
        self.random = np.random.default_rng(settings.seed)
        self._filters = [apply for name, off, apply in FILTERS.values() if getattr(settings, name) != off]
        self._padding = tokenizer.vocabulary.padding if tokenizer is not None else np.zeros(0, np.int64)
        self._biased = np.array(list(settings.logit_bias), np.int64)
        self._biases = np.array(list(settings.logit_bias.values()), np.float64)
        self._mirostat = Mirostat(settings.mirostat_tau, settings.mirostat_eta) if settings.mirostat else None
        self.repetition = _repetition_penalty(settings, tokenizer, breakers)
        self.candidates: tuple[np.ndarray, np.ndarray] = np.zeros(0, np.int64), np.zeros(0)

    def sample(self, logits: np.ndarray, past: Sequence[int]) -> int:
        """Samples a token id. logits: float32 [n_vocab], not changed, -inf for tokens that are excluded; past: all tokens so
        far, for the penalties: those of the last call and the token that it returned. Raises PlanError if every token is
        excluded."""
        logits = logits.astype(np.float64)
        s = self.settings
        logits[self._padding] = -math.inf
        logits[self._biased] += self._biases
        if logits.max() == -math.inf:
            raise PlanError("logit_bias and grammar exclude every token")
        if self._mirostat is not None:
            return self._sample_near_target(logits, self._mirostat)
        if s.samplers != DEFAULT_ORDER:
            return self._draw_from(*apply_in_order(self, logits, past))
        self.penalise(logits, past)
        if self.repetition is not None:
            self.repetition.apply(logits, past)
        if s.temp == 0 and not s.dynatemp_range and not NOT_PREFIXES.intersection(self._filters):
            return self._only(int(logits.argmax()))
        candidates = self._candidates(logits)
        candidates = candidates[logits[candidates] > -math.inf]
        remaining = logits[candidates]
        remaining = remaining - remaining.max()
        temp = self.temperature(remaining)
        if temp == 0:
            return self._only(int(candidates[remaining.argmax()]))
        return self._draw_from(candidates, np.exp(remaining / temp))

    def _only(self, token: int) -> int:
        """The token that is the only candidate."""
        self.candidates = np.array([token]), np.ones(1)
        return token

    def _draw_from(self, ids: np.ndarray, weights: np.ndarray) -> int:
        """One of these ids, as probable as its weight."""
        self.candidates = ids, weights
        return int(ids[self._draw(weights)])

    def _draw(self, weights: np.ndarray) -> int:
        """An index, as probable as its weight."""
        cumulative = np.cumsum(weights)
        index = int(np.searchsorted(cumulative, self.random.random() * cumulative[-1], side="right"))
        return min(index, len(weights) - 1)

    def _sample_near_target(self, logits: np.ndarray, mirostat: Mirostat) -> int:
        """Samples with Mirostat."""
        if self.settings.temp == 0:
            return self._only(int(logits.argmax()))
        p = np.exp((logits - logits.max()) / self.settings.temp)
        p /= p.sum()
        if self.settings.mirostat == 1:
            kept = most_probable(logits, mirostat.count(p[most_probable(logits, ZIPF_TOKENS)], len(p)))
        else:
            kept = np.flatnonzero(p >= min(mirostat.least, p.max()))
        weights = p[kept]
        self.candidates = kept, weights
        index = self._draw(weights)
        mirostat.learn(weights[index] / weights.sum())
        return int(kept[index])

    def penalise(self, logits: np.ndarray, past: Sequence[int]) -> None:
        """Changes logits in place."""
        s = self.settings
        if not past or not s.repeat_last_n or (s.repeat_penalty, s.presence_penalty, s.frequency_penalty) == (1, 0, 0):
            return
        recent, counts = np.unique(np.asarray(past if s.repeat_last_n < 0 else past[-s.repeat_last_n :]), return_counts=True)
        values = logits[recent]
        values = np.where(values > 0, values / s.repeat_penalty, values * s.repeat_penalty)
        logits[recent] = values - counts * s.frequency_penalty - s.presence_penalty

    def temperature(self, logits: np.ndarray) -> float:
        """The temperature for these candidates. logits: the largest one is 0."""
        s = self.settings
        if not s.dynatemp_range or len(logits) < 2:
            return s.temp
        p = np.exp(logits)
        p /= p.sum()
        entropy = -(p * np.log(np.maximum(p, np.finfo(np.float64).tiny))).sum() / math.log(len(p))
        lowest = max(0.0, s.temp - s.dynatemp_range)
        return lowest + (s.temp + s.dynatemp_range - lowest) * float(entropy) ** s.dynatemp_exponent

    def _candidates(self, logits: np.ndarray) -> np.ndarray:
        """Ids that all filters keep, by descending logit; if all are off, every id in ascending order."""
        ids, weights, total = self._pool(logits)
        for apply in self._filters:
            kept = apply(self.settings, weights, total, self.random)
            ids, weights = ids[kept], weights[kept]
            total = weights.sum()
        return ids

    def _pool(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
        """(ids of candidates by descending logit, their weights: probabilities times a factor, the sum of the weights of all
        tokens that top_n_sigma and top_k keep).

        Only a part of the vocabulary is sorted: without top_n_sigma and top_k, the part that min_p or top_p will keep. That of
        min_p is a prefix of the sorted vocabulary, and so it may be left out of what top_p sees.
        """
        s, peak = self.settings, logits.max()
        every = np.exp(logits - peak)
        if not self._filters and s.top_n_sigma <= 0 and not 0 < s.top_k < len(logits):
            return np.arange(len(logits)), every, 1.0
        if s.top_n_sigma > 0 or 0 < s.top_k < len(logits):
            least = least_by_sigma(logits, s.top_n_sigma) if s.top_n_sigma > 0 else -math.inf
            ids = most_probable(logits, s.top_k) if s.top_k else by_logit(logits, np.flatnonzero(logits >= least))
            ids = ids[logits[ids] >= least]
            return ids, every[ids], every[ids].sum()
        if NOT_PREFIXES.intersection(self._filters):
            ids = most_probable(logits, 0)
        elif s.min_p > 0:
            ids = by_logit(logits, np.flatnonzero(every >= s.min_p))
        else:
            k, ids = _TOP_P_CANDIDATES, most_probable(logits, _TOP_P_CANDIDATES)
            while len(ids) < len(logits) and every[ids].sum() < s.top_p * every.sum():
                k *= 8
                ids = most_probable(logits, k)
        return ids, every[ids], every.sum()


def _repetition_penalty(s: Sampling, tokenizer: Tokenizer | None, breakers: Breakers | None) -> RepetitionPenalty | None:
    if not s.dry_multiplier or not s.dry_penalty_last_n:
        return None
    if not s.dry_sequence_breakers:
        breakers = Breakers()
    elif breakers is None:
        if tokenizer is None:
            raise PlanError("dry_sequence_breakers are texts: a Sampler needs the tokenizer for them")
        breakers = find_breakers(tokenizer, s.dry_sequence_breakers)
    return RepetitionPenalty(s.dry_multiplier, s.dry_base, s.dry_allowed_length, s.dry_penalty_last_n, breakers)


@dataclass(frozen=True)
class SampledToken:
    """A sampled token with its log probability, and the most probable tokens as pairs (id, log probability).

    These are the probabilities of the model, before penalties, filters and temperature, or those that the token was drawn by.
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

    @staticmethod
    def from_candidates(token: int, ids: np.ndarray, weights: np.ndarray, n_top: int) -> SampledToken:
        """A token that was drawn. ids, weights: `Sampler.candidates`; n_top: number of most probable tokens to record."""
        with np.errstate(divide="ignore"):  # a weight may be too small for its logarithm
            logs = np.log(weights / weights.sum())
        order = np.argsort(-logs, kind="stable")[:n_top]
        logprob = float(logs[ids == token][0])
        return SampledToken(token, logprob, [(int(ids[i]), float(logs[i])) for i in order if logs[i] > -math.inf])
