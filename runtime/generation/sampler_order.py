"""Samplers in an order of the user's, llama.cpp's `--samplers`: each changes the logits that those before it have left.

The order that is the default has a faster way, see `Sampler`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from .filters import FILTERS, by_logit, least_by_sigma, most_probable
from .repetition import RepetitionPenalty
from .sampling_options import Sampling


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
