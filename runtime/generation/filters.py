"""What drops candidates for the next token by their probabilities: locally typical sampling, top-p, min-p, XTC."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

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
