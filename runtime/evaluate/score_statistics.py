"""Running statistics of scored predictions: means with standard errors, percentiles, correlation of two models.

The figures and their errors are defined as in llama-perplexity's report of the KL divergence: predictions count as independent,
and the errors of ratio and difference of two perplexities use the covariance of the two models' losses on the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .divergence import Scores

KLD_PERCENTILES = (0.1, 1.0, 5.0, 10.0, 50.0, 90.0, 95.0, 99.0, 99.9)
CONFIDENT = 0.5  # probability of the baseline's most probable token, from which on it counts as sure of it
DELTA_PERCENTILES = (0.1, 1.0, 5.0, 10.0, 25.0, 50.0, 75.0, 90.0, 95.0, 99.0, 99.9)


class Moments:
    """Running mean and variance of values that are added in batches (Chan, Golub, LeVeque 1979: without cancellation)."""

    def __init__(self) -> None:
        self.count, self.mean, self._squares = 0, 0.0, 0.0

    @property
    def state(self) -> tuple[int, float, float]:
        """(count, mean, sum of squared deviations), for `restored`."""
        return self.count, self.mean, self._squares

    @classmethod
    def restored(cls, state: Sequence[float]) -> Moments:
        """The moments whose `state` this is."""
        moments = cls()
        moments.count, moments.mean, moments._squares = int(state[0]), float(state[1]), float(state[2])
        return moments

    def add(self, values: np.ndarray) -> None:
        """Adds values of any shape, at least one."""
        count, mean = values.size, float(values.mean(dtype=np.float64))
        squares = float(((values - mean) ** 2).sum(dtype=np.float64))
        total = self.count + count
        difference = mean - self.mean
        self._squares += squares + difference * difference * self.count * count / total
        self.mean += difference * count / total
        self.count = total

    @property
    def error_squared(self) -> float:
        """Variance of the mean; 0 for a single value."""
        return self._squares / self.count / (self.count - 1) if self.count > 1 else 0.0

    @property
    def error(self) -> float | None:
        """Standard error of the mean; None for a single value, which has no variance."""
        return math.sqrt(self.error_squared) if self.count > 1 else None


class ScoreStatistics:
    """Statistics of all predictions scored so far.

    losses, base_losses  moments of the losses of model and baseline, in nats
    window_losses        mean loss of each window; window_klds, window_base_losses: mean divergence, and loss of the baseline
    seconds              time for running and scoring the model
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.window_losses: list[float] = []
        self.window_klds: list[float] = []
        self.window_base_losses: list[float] = []
        self.losses, self.base_losses = Moments(), Moments()
        self._log_ratio, self._kld, self._same_top, self._confident_kld = Moments(), Moments(), Moments(), Moments()
        self._delta_p, self._delta_p_squared, self._missing = Moments(), Moments(), Moments()
        self._klds: list[np.ndarray] = []
        self._delta_ps: list[np.ndarray] = []

    def add(self, scores: Scores) -> None:
        """Adds the predictions of one window."""
        self.seconds += scores.seconds
        self.losses.add(scores.losses)
        self.window_losses.append(float(scores.losses.mean()))
        if scores.base_losses is None or scores.divergences is None or scores.same_top is None:
            return
        delta_p = np.exp(-scores.losses) - np.exp(-scores.base_losses)
        self.base_losses.add(scores.base_losses)
        self._log_ratio.add(scores.losses - scores.base_losses)
        self._kld.add(scores.divergences)
        self.window_klds.append(float(scores.divergences.mean()))
        self.window_base_losses.append(float(scores.base_losses.mean()))
        if scores.base_top is not None and (confident := scores.base_top >= CONFIDENT).any():
            self._confident_kld.add(scores.divergences[confident])
        self._same_top.add(scores.same_top.astype(np.float64))
        self._delta_p.add(delta_p)
        self._delta_p_squared.add(delta_p**2)
        if scores.missing is not None:
            self._missing.add(scores.missing)
        self._klds.append(scores.divergences.astype(np.float32))
        self._delta_ps.append(delta_p.astype(np.float32))

    def add_unscored(self) -> None:
        """Counts a window of a model that predicts nothing."""
        self.window_losses.append(math.nan)

    def join(self, recorded: RecordedScores) -> Iterator[None]:
        """Adds the scores of windows that ran elsewhere; yields after each window."""
        self.seconds += recorded.seconds
        for scores in recorded.scores:
            if scores is not None:
                self.add(scores)
            else:
                self.add_unscored()
            yield

    def perplexity(self) -> dict[str, Any]:
        """The fields `perplexity` and `error` of a `Perplexity`: NaN of windows without predictions."""
        if self.window_losses and not self.losses.count:
            return {"perplexity": math.nan, "error": None}
        value = exp(self.losses.mean)
        return {"perplexity": value, "error": _times(value, self.losses.error)}

    def comparison(self) -> dict[str, Any]:
        """The fields of a `Perplexity` that compare model and baseline, without percentiles; empty without a baseline."""
        if not self.base_losses.count:
            return {}
        value, base, ratio = exp(self.losses.mean), exp(self.base_losses.mean), exp(self._log_ratio.mean)
        variance, base_variance = self.losses.error_squared, self.base_losses.error_squared
        covariance = (variance + base_variance - self._log_ratio.error_squared) / 2
        deviations = math.sqrt(variance * base_variance)
        difference_variance = variance * value * value + base_variance * base * base - 2 * value * base * covariance
        difference_error = None
        if self.losses.count > 1:
            finite = math.isfinite(difference_variance)
            difference_error = math.sqrt(max(difference_variance, 0.0)) if finite else math.inf
        rms = math.sqrt(self._delta_p_squared.mean)
        squared_error = self._delta_p_squared.error
        return {
            "baseline_perplexity": base,
            "baseline_error": _times(base, self.base_losses.error),
            "ratio": ratio,
            "ratio_error": _times(ratio, self._log_ratio.error),
            "log_ratio": self._log_ratio.mean,
            "log_ratio_error": self._log_ratio.error,
            "difference": value - base,
            "difference_error": difference_error,
            "correlation": covariance / deviations if deviations else None,
            "kld_mean": self._kld.mean,
            "kld_error": self._kld.error,
            **self._confident(),
            **({"kld_missing": self._missing.mean} if self._missing.count else {}),
            "top1_agreement": 100 * self._same_top.mean,
            "top1_error": _times(100, self._same_top.error),
            "delta_p_mean": 100 * self._delta_p.mean,
            "delta_p_error": _times(100, self._delta_p.error),
            "delta_p_rms": 100 * rms,
            "delta_p_rms_error": None if squared_error is None else 50 * squared_error / rms if rms else 0.0,
        }

    def _confident(self) -> dict[str, Any]:
        """Of the predictions that the baseline is sure of."""
        moments = self._confident_kld
        if not moments.count:
            return {}
        share = 100 * moments.count / self._kld.count
        return {"kld_confident": moments.mean, "kld_confident_error": moments.error, "confident_share": share}

    def distribution(self) -> dict[str, Any]:
        """The fields of a `Perplexity` with extremes and percentiles of all predictions; empty without a baseline."""
        if not self._klds:
            return {}
        klds, deltas = np.concatenate(self._klds), 100 * np.concatenate(self._delta_ps)
        kld_percentiles = percentiles(klds, KLD_PERCENTILES)
        return {
            "kld_min": float(klds.min()),
            "kld_median": kld_percentiles["50"],
            "kld_p99": kld_percentiles["99"],
            "kld_max": float(klds.max()),
            "kld_percentiles": kld_percentiles,
            "delta_p_min": float(deltas.min()),
            "delta_p_max": float(deltas.max()),
            "delta_p_percentiles": percentiles(deltas, DELTA_PERCENTILES),
        }


def percentiles(values: np.ndarray, percents: tuple[float, ...]) -> dict[str, float]:
    """'99.9' -> the 99.9th percentile, interpolated linearly."""
    results = np.percentile(values.astype(np.float64), percents)
    return {f"{percent:g}": float(value) for percent, value in zip(percents, results, strict=True)}


def paired_ratio(losses: list[float], base: list[float]) -> tuple[float, float | None]:
    """(ratio of two perplexities, its standard error) from the mean losses of the same windows."""
    log_ratio = Moments()
    log_ratio.add(np.asarray(losses) - np.asarray(base))
    ratio = exp(log_ratio.mean)
    return ratio, _times(ratio, log_ratio.error)


def exp(value: float) -> float:
    """e^value, infinity instead of an overflow error."""
    return math.exp(value) if value < 709 else math.inf


def _times(factor: float, value: float | None) -> float | None:
    return None if value is None else factor * value


class RecordedScores(ScoreStatistics):
    """Keeps the scores of windows as they are, to be added to statistics of more windows in order.

    scores   of each window; None: of a model that predicts nothing
    seconds  in addition to those of the scores
    """

    def __init__(self) -> None:
        super().__init__()
        self.scores: list[Scores | None] = []

    def add(self, scores: Scores) -> None:
        self.scores.append(scores)

    def add_unscored(self) -> None:
        self.scores.append(None)
