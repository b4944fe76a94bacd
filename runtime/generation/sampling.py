"""Samples the next token from logits: biases, penalties, filters, temperature; or biases, temperature, Mirostat."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...formats import PlanError
from ..text.tokenizer import Tokenizer
from .filters import FILTERS, NOT_PREFIXES, by_logit, least_by_sigma, most_probable
from .mirostat import ZIPF_TOKENS, Mirostat
from .repetition import Breakers, RepetitionPenalty, find_breakers
from .sampler_order import DEFAULT_ORDER, apply_in_order, parse_samplers

_TOP_P_CANDIDATES = 256  # tokens that top_p sorts at first: nearly always enough

# setting -> (lowest, highest value)
RANGES: dict[str, tuple[float, float]] = {
    "temp": (0, math.inf),
    "dynatemp_range": (0, math.inf),
    "dynatemp_exponent": (0, math.inf),
    "top_k": (0, math.inf),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "typical_p": (0, 1),
    "top_n_sigma": (-math.inf, math.inf),
    "xtc_probability": (0, 1),
    "xtc_threshold": (0, 1),
    "repeat_penalty": (0, math.inf),
    "presence_penalty": (-math.inf, math.inf),
    "frequency_penalty": (-math.inf, math.inf),
    "repeat_last_n": (-1, math.inf),
    "dry_multiplier": (0, math.inf),
    "dry_base": (1, math.inf),
    "dry_allowed_length": (0, math.inf),
    "dry_penalty_last_n": (-1, math.inf),
    "mirostat": (0, 2),
    "mirostat_tau": (0, math.inf),
    "mirostat_eta": (0, math.inf),
    "seed": (0, math.inf),
}
_POSITIVE = ("top_p", "typical_p", "repeat_penalty")
DEFAULT_BREAKERS = ("\n", ":", '"', "*")
MAX_BREAKER = 40  # characters of a sequence breaker


@dataclass(frozen=True)
class Sampling:
    """Sampling settings; names, defaults and order are llama.cpp's: logit_bias, penalties, DRY, top_n_sigma, top_k,
    typical_p, top_p, min_p, XTC, temperature. With mirostat only logit_bias and temp count beside it.

    temp               divides the logits; 0: always the most probable token
    dynatemp_range     the temperature follows the entropy of the candidates, from temp - this to temp + this; 0: off
    dynatemp_exponent  of the entropy, relative to the largest possible, in that
    top_k              keep the k most probable tokens; 0: all
    top_p              keep the most probable tokens that together have this probability; 1: all
    min_p              keep tokens at least this fraction as probable as the most probable one; 0: all
    typical_p          keep the tokens whose surprise is nearest to the entropy and that together have this probability (locally
                       typical sampling, arXiv:2202.00666); 1: all
    top_n_sigma        keep tokens whose logit is within this many standard deviations of the largest one (arXiv:2411.07641);
                       0 or less: all
    xtc_probability    how often the tokens above xtc_threshold are excluded but for the least probable of them (exclude top
                       choices); 0: never
    xtc_threshold      probability from which on a token counts for that
    repeat_penalty     positive logits of tokens among the last repeat_last_n are divided by this, negative multiplied; 1: off
    presence_penalty   is subtracted from the logits of these tokens; 0: off
    frequency_penalty  is subtracted from them once for each occurrence among the last repeat_last_n; 0: off
    repeat_last_n      tokens that the penalties consider, those of the prompt too; -1: all
    dry_multiplier     DRY: a token that would lengthen a repetition of more than dry_allowed_length tokens loses this times
                       dry_base to the power of what is beyond that; 0: off
    dry_base           1 or more
    dry_allowed_length tokens of a repetition that cost nothing
    dry_penalty_last_n tokens that are searched for repetitions, those of the prompt too; -1: all, 0: none
    dry_sequence_breakers  texts that no repetition goes across
    mirostat           keeps the surprise of the tokens near a target (arXiv:2007.14966): version 1, 2, or 0 for none
    mirostat_tau       that target in bits
    mirostat_eta       how fast it is followed
    samplers           names of the samplers in their order; one that is not among them does nothing
    logit_bias         token id -> what is added to its logit; -inf: the token is never sampled
    seed               the same seed, prompt and settings give the same text; None: a random seed
    """

    temp: float = 0.8
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_last_n: int = 64
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = DEFAULT_BREAKERS
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    samplers: tuple[str, ...] = DEFAULT_ORDER
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None

    def __post_init__(self) -> None:
        """Raises PlanError for a value outside its range."""
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            if value is None:
                valid = name == "seed"
            else:
                valid = low <= value <= high and math.isfinite(value) and not (value == 0 and name in _POSITIVE)
            if not valid:
                raise PlanError(f"sampling cannot work with {name} = {value}")
        if self.mirostat not in (0, 1, 2):
            raise PlanError(f"sampling cannot work with mirostat = {self.mirostat}: there are versions 1 and 2")
        object.__setattr__(self, "samplers", parse_samplers(self.samplers))
        for text in self.dry_sequence_breakers:
            if not 0 < len(text) <= MAX_BREAKER:
                raise PlanError(f"a sequence breaker of DRY has to have 1 to {MAX_BREAKER} characters, not {len(text)}")
        for token, bias in self.logit_bias.items():
            if not bias < math.inf:
                raise PlanError(f"sampling cannot work with logit_bias = {bias} for token {token}")


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

    def __init__(self, settings: Sampling, tokenizer: Tokenizer | None = None):
        """tokenizer: for dry_sequence_breakers. Raises PlanError where these are needed and it is None."""
        self.settings = settings
        self.random = np.random.default_rng(settings.seed)
        self._filters = [apply for name, off, apply in FILTERS.values() if getattr(settings, name) != off]
        self._biased = np.array(list(settings.logit_bias), np.int64)
        self._biases = np.array(list(settings.logit_bias.values()), np.float64)
        self._mirostat = Mirostat(settings.mirostat_tau, settings.mirostat_eta) if settings.mirostat else None
        self.repetition = _repetition_penalty(settings, tokenizer)
        self.candidates: tuple[np.ndarray, np.ndarray] = np.zeros(0, np.int64), np.zeros(0)

    def sample(self, logits: np.ndarray, past: Sequence[int]) -> int:
        """Samples a token id. logits: float32 [n_vocab], not changed, -inf for tokens that are excluded; past: all tokens so
        far, for the penalties: those of the last call and the token that it returned. Raises PlanError if every token is
        excluded."""
        logits = logits.astype(np.float64)
        s = self.settings
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


def _repetition_penalty(s: Sampling, tokenizer: Tokenizer | None) -> RepetitionPenalty | None:
    if not s.dry_multiplier or not s.dry_penalty_last_n:
        return None
    breakers = Breakers()
    if s.dry_sequence_breakers:
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
        """Of a token that was drawn. ids, weights: `Sampler.candidates`; n_top: number of most probable tokens to record."""
        with np.errstate(divide="ignore"):  # a weight may be too small for its logarithm
            logs = np.log(weights / weights.sum())
        order = np.argsort(-logs, kind="stable")[:n_top]
        logprob = float(logs[ids == token][0])
        return SampledToken(token, logprob, [(int(ids[i]), float(logs[i])) for i in order if logs[i] > -math.inf])
