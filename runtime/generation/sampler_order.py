"""Samplers in an order of the user's, llama.cpp's `--samplers`: each changes the logits that those before it have left.

The order that is the default has a faster way, see `Sampler`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from .repetition import RepetitionPenalty
from .sampling_options import Sampling

# A filter gets the settings, weights of candidates (float64 [n], descending), what these have to be divided by to be
# probabilities (their sum, and the weights of tokens that are missing because a later filter drops them), and a source of
# random numbers. It returns which candidates stay: bool [n].
Filter = Callable[[Sampling, np.ndarray, float, np.random.Generator], np.ndarray]


def _typical_p(s: Sampling, weights: np.ndarray, total: float, random: np.random.Generator) -> np.ndarray:
    p = weights / total
    surprise = -np.log(np.maximum(p, np.finfo(np.float64).tiny))
    order = np.argsort(np.abs(surprise - (p * surprise).sum()), kind="stable")
    kept = np.zeros(len(p), bool)
    kept[order] = np.cumsum(p[order]) - p[order] < s.typical_p
    return kept


def _top_p(s: Sampling, weights: np.ndarray, total: float, random: np.random.Generator) -> np.ndarray:
    return np.cumsum(weights) - weights < s.top_p * total


def _min_p(s: Sampling, weights: np.ndarray, total: float, random: np.random.Generator) -> np.ndarray:
    return weights >= s.min_p * weights[0]


def _exclude_top_choices(s: Sampling, weights: np.ndarray, total: float, random: np.random.Generator) -> np.ndarray:
    kept = np.ones(len(weights), bool)
    n_above = np.count_nonzero(weights >= s.xtc_threshold * total)
    if n_above > 1 and random.random() < s.xtc_probability:
        kept[: n_above - 1] = False
    return kept


# name of the sampler -> (setting, value that turns the filter off, filter), in their order
FILTERS: dict[str, tuple[str, float, Filter]] = {
    "typ_p": ("typical_p", 1, _typical_p),
    "top_p": ("top_p", 1, _top_p),
    "min_p": ("min_p", 0, _min_p),
    "xtc": ("xtc_probability", 0, _exclude_top_choices),
}
NOT_PREFIXES = {_typical_p, _exclude_top_choices}  # what these keep need not include the most probable token


def most_probable(logits: np.ndarray, k: int) -> np.ndarray:
    """The k ids with the largest logits, descending; of equal logits the lower id first, so that a seed gives the same text on
    every machine. All ids if k is 0 or not less than n_vocab."""
    if not 0 < k < len(logits):
        return by_logit(logits, np.arange(len(logits)))
    threshold = np.partition(logits, -k)[-k]
    return by_logit(logits, np.flatnonzero(logits >= threshold))[:k]


def least_by_sigma(logits: np.ndarray, n: float) -> float:
    """The least logit within n standard deviations of the largest; tokens at -inf do not count."""
    return logits.max() - n * logits[logits > -math.inf].std()


def by_logit(logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """ids by descending logit; of equal logits the first one first."""
    return ids[np.argsort(-logits[ids], kind="stable")]


class SamplerState(Protocol):
    """What samplers use of `sampling.Sampler`."""

    settings: Sampling
    random: np.random.Generator
    repetition: RepetitionPenalty | None

    def penalise(self, logits: np.ndarray, past: Sequence[int]) -> None: ...
    def temperature(self, logits: np.ndarray) -> float: ...


def apply_in_order(sampler: SamplerState, logits: np.ndarray, past: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """(ids of the tokens that are left, by descending logit, their weights: probabilities times a factor).

    logits: float64 [n_vocab], changed in place, -inf for tokens that are excluded; past: as of `Sampler.sample`.
    """
    for name in sampler.settings.samplers:
        _STEPS[name](sampler, logits, past)
    ids = _candidates(logits)
    return ids, np.exp(logits[ids] - logits[ids[0]])


def _candidates(logits: np.ndarray) -> np.ndarray:
    return by_logit(logits, np.flatnonzero(logits > -math.inf))


def _keep(logits: np.ndarray, ids: np.ndarray) -> None:
    """Excludes all others."""
    kept = logits[ids]
    logits[:] = -math.inf
    logits[ids] = kept


def _filter(name: str) -> Callable[[SamplerState, np.ndarray, Sequence[int]], None]:
    setting, off, apply = FILTERS[name]

    def step(sampler: SamplerState, logits: np.ndarray, past: Sequence[int]) -> None:
        if getattr(sampler.settings, setting) != off:
            ids = _candidates(logits)
            weights = np.exp(logits[ids] - logits[ids[0]])
            _keep(logits, ids[apply(sampler.settings, weights, weights.sum(), sampler.random)])

    return step


def _top_k(sampler: SamplerState, logits: np.ndarray, past: Sequence[int]) -> None:
    if 0 < sampler.settings.top_k < len(logits):
        _keep(logits, most_probable(logits, sampler.settings.top_k))


def _top_n_sigma(sampler: SamplerState, logits: np.ndarray, past: Sequence[int]) -> None:
    if sampler.settings.top_n_sigma > 0:
        logits[logits < least_by_sigma(logits, sampler.settings.top_n_sigma)] = -math.inf


def _temperature(sampler: SamplerState, logits: np.ndarray, past: Sequence[int]) -> None:
    ids = _candidates(logits)
    temp = sampler.temperature(logits[ids] - logits[ids[0]])
    if temp == 0:
        _keep(logits, ids[:1])
    else:
        logits /= temp


def _dry(sampler: SamplerState, logits: np.ndarray, past: Sequence[int]) -> None:
    if sampler.repetition is not None:
        sampler.repetition.apply(logits, past)


_STEPS: dict[str, Callable[[SamplerState, np.ndarray, Sequence[int]], None]] = {
    "penalties": lambda sampler, logits, past: sampler.penalise(logits, past),
    "dry": _dry,
    "top_n_sigma": _top_n_sigma,
    "top_k": _top_k,
    "temperature": _temperature,
    **{name: _filter(name) for name in FILTERS},
}
