"""The scale of a heat map's shades, on which a few far values leave the others their differences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_WIDEST = 0.4  # of the scale that one gap between neighbouring values may take


@dataclass(frozen=True)
class ColourScale:
    """Where values above 0 lie between the lightest shade (0) and the darkest (1), linear in the logarithm between neighbours.

    values: those of the map, each once, ascending. places: theirs. is_narrowed: whether a gap takes less than its logarithm.
    """

    values: Sequence[float]
    places: Sequence[float]
    is_narrowed: bool

    def place(self, value: float) -> float:
        """The place of a value, of one beyond the ends that of the end."""
        return float(np.interp(math.log(value), np.log(self.values), self.places))

    def steps(self, n: int) -> list[float]:
        """At most n values for a legend: those of the map if they are no more, else n at even distances on the scale."""
        if len(self.values) <= n:
            return list(self.values)
        return np.exp(np.interp(np.linspace(0, 1, n), self.places, np.log(self.values))).tolist()


def scale_of(values: Sequence[float]) -> ColourScale:
    """The scale of values above 0: logarithmic, but no gap between two neighbours takes more than a share of it, so that one
    row of 32 bits among many of 3 to 6 does not make these alike."""
    distinct = np.unique(np.asarray(values, np.float64))
    gaps = np.diff(np.log(distinct))
    if not gaps.size:
        return ColourScale(distinct.tolist(), [1.0], False)
    limit = _widest(gaps.tolist(), max(_WIDEST, 1 / gaps.size))
    places = np.concatenate(([0.0], np.cumsum(np.minimum(gaps, limit))))
    return ColourScale(distinct.tolist(), (places / places[-1]).tolist(), bool(gaps.max() > limit * (1 + 1e-9)))


def _widest(gaps: Sequence[float], share: float) -> float:
    """The gap c that is this share of the sum of all gaps, none of which is taken for wider than c."""
    descending = sorted(gaps, reverse=True)
    for n, gap in enumerate(descending):  # n are wider than c
        limit = share * sum(descending[n:]) / (1 - share * n)
        if gap <= limit:
            return limit
    return descending[-1]
