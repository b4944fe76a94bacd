"""Statistics over predictions as they come in: means with their standard errors, percentiles, what two models have in common.

The figures and their errors are defined as in llama-perplexity's report of KL divergence: errors are those of the mean of
independent predictions, and those of ratio and difference of two perplexities take into account that the two models were scored
on the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .divergence import Scored

KLD_PERCENTILES = (0.1, 1.0, 5.0, 10.0, 50.0, 90.0, 95.0, 99.0, 99.9)
DELTA_PERCENTILES = (0.1, 1.0, 5.0, 10.0, 25.0, 50.0, 75.0, 90.0, 95.0, 99.0, 99.9)


class Moments:
    """Mean and variance of values that come in runs (Chan, Golub, LeVeque 1979: no cancellation)."""

    def __init__(self) -> None:
        self.count, self.mean, self._squares = 0, 0.0, 0.0

    @property
    def state(self) -> tuple[int, float, float]:
        """What `restored` makes it from again."""
        return self.count, self.mean, self._squares

    @classmethod
    def restored(cls, state: Sequence[float]) -> Moments:
        made = cls()
        made.count, made.mean, made._squares = int(state[0]), float(state[1]), float(state[2])
        return made

    def add(self, values: np.ndarray) -> None:
        """values: any shape, at least one."""
        count, mean = values.size, float(values.mean(dtype=np.float64))
        squares = float(((values - mean) ** 2).sum(dtype=np.float64))
        both = self.count + count
        apart = mean - self.mean
        self._squares += squares + apart * apart * self.count * count / both
        self.mean += apart * count / both
        self.count = both

    @property
    def error_squared(self) -> float:
        """Variance of the mean; 0 for a single value."""
        return self._squares / self.count / (self.count - 1) if self.count > 1 else 0.0

    @property
    def error(self) -> float | None:
        """Standard error of the mean; None for a single value, from which it cannot be told."""
        return math.sqrt(self.error_squared) if self.count > 1 else None


class Tally:
    """What has been measured so far."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.window_losses: list[float] = []
        self.losses, self.base = Moments(), Moments()
        self._change, self._kld, self._same = Moments(), Moments(), Moments()
        self._delta, self._delta_squared = Moments(), Moments()
        self._klds: list[np.ndarray] = []
        self._deltas: list[np.ndarray] = []

    def add(self, scored: Scored) -> None:
        """One window's predictions."""
        self.seconds += scored.seconds
        self.losses.add(scored.losses)
        self.window_losses.append(float(scored.losses.mean()))
        if scored.base_losses is None or scored.divergences is None or scored.same_top is None:
            return
        delta = np.exp(-scored.losses) - np.exp(-scored.base_losses)
        self.base.add(scored.base_losses)
        self._change.add(scored.losses - scored.base_losses)
        self._kld.add(scored.divergences)
        self._same.add(scored.same_top.astype(np.float64))
        self._delta.add(delta)
        self._delta_squared.add(delta**2)
        self._klds.append(scored.divergences.astype(np.float32))
        self._deltas.append(delta.astype(np.float32))

    def perplexity(self) -> dict[str, Any]:
        """perplexity and its error."""
        value = exp(self.losses.mean)
        return {"perplexity": value, "error": _times(value, self.losses.error)}

    def comparison(self) -> dict[str, Any]:
        """What can be said of model and baseline at any time; empty without a baseline."""
        if not self.base.count:
            return {}
        value, base, ratio = exp(self.losses.mean), exp(self.base.mean), exp(self._change.mean)
        covariance = (self.losses.error_squared + self.base.error_squared - self._change.error_squared) / 2
        spread = math.sqrt(self.losses.error_squared * self.base.error_squared)
        difference = self.losses.error_squared * value * value + self.base.error_squared * base * base
        difference -= 2 * value * base * covariance
        single = self.losses.count < 2
        rms = math.sqrt(self._delta_squared.mean)
        error = self._delta_squared.error
        return {
            "baseline_perplexity": base,
            "baseline_error": _times(base, self.base.error),
            "ratio": ratio,
            "ratio_error": _times(ratio, self._change.error),
            "log_ratio": self._change.mean,
            "log_ratio_error": self._change.error,
            "difference": value - base,
            "difference_error": None if single else math.sqrt(max(difference, 0.0)) if math.isfinite(difference) else math.inf,
            "correlation": covariance / spread if spread else None,
            "kld_mean": self._kld.mean,
            "kld_error": self._kld.error,
            "top1_agreement": 100 * self._same.mean,
            "top1_error": _times(100, self._same.error),
            "delta_p_mean": 100 * self._delta.mean,
            "delta_p_error": _times(100, self._delta.error),
            "delta_p_rms": 100 * rms,
            "delta_p_rms_error": None if error is None else 50 * error / rms if rms else 0.0,
        }

    def distribution(self) -> dict[str, Any]:
        """Percentiles of divergence and change of probability, over all values so far; empty without a baseline."""
        if not self._klds:
            return {}
        klds, deltas = np.concatenate(self._klds), 100 * np.concatenate(self._deltas)
        found = percentiles(klds, KLD_PERCENTILES)
        return {
            "kld_min": float(klds.min()),
            "kld_median": found["50"],
            "kld_p99": found["99"],
            "kld_max": float(klds.max()),
            "kld_percentiles": found,
            "delta_p_min": float(deltas.min()),
            "delta_p_max": float(deltas.max()),
            "delta_p_percentiles": percentiles(deltas, DELTA_PERCENTILES),
        }


def percentiles(values: np.ndarray, which: tuple[float, ...]) -> dict[str, float]:
    """'99.9' -> the value that so many percent of the values do not exceed, linear between neighbours."""
    found = np.percentile(values.astype(np.float64), which)
    return {f"{p:g}": float(v) for p, v in zip(which, found, strict=True)}


def paired_ratio(losses: list[float], base: list[float]) -> tuple[float, float | None]:
    """(ratio of two perplexities, its error) from the mean losses of the same windows."""
    change = Moments()
    change.add(np.asarray(losses) - np.asarray(base))
    ratio = exp(change.mean)
    return ratio, _times(ratio, change.error)


def exp(value: float) -> float:
    return math.exp(value) if value < 709 else math.inf  # e^709 is near the end of float64


def _times(factor: float, value: float | None) -> float | None:
    return None if value is None else factor * value
