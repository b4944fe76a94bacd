"""Paired tests: whether one model's figures of the same windows are better than another's, or only seem so."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ...data_classes import dataclass

_EXACT = 30  # windows up to which the distribution of rank sums is counted, where no two differences are equal


@dataclass(frozen=True)
class Paired:
    """The mean difference a - b of pairs.

    error       its standard error
    p           of a difference as large by chance, two-sided, by Student's t test of the pairs
    p_wilcoxon  the same by Wilcoxon's signed ranks, which outliers do not rule
    windows     how many pairs
    """

    difference: float
    error: float
    p: float
    p_wilcoxon: float
    windows: int


def paired(a: Sequence[float], b: Sequence[float]) -> Paired | None:
    """Compares figures of the same windows; None for fewer than two."""
    differences = np.asarray(a, np.float64) - np.asarray(b, np.float64)
    n = len(differences)
    if n < 2:
        return None
    mean, error = float(differences.mean()), float(differences.std(ddof=1) / math.sqrt(n))
    t = abs(mean) / error if error else math.inf if mean else 0.0
    return Paired(mean, error, student_p(t, n - 1), wilcoxon_p(differences), n)


def student_p(t: float, degrees: int) -> float:
    """The two-sided tail of Student's distribution beyond t >= 0: the regularised incomplete beta function I_x(v / 2, 1 / 2)
    at x = v / (v + t^2), v degrees of freedom."""
    return 0.0 if math.isinf(t) else _incomplete_beta(degrees / 2, 0.5, degrees / (degrees + t * t))


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """I_x(a, b), by its continued fraction (DLMF 8.17.22, evaluated by Lentz's method)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    result = d
    for m in range(1, 1000):
        for step in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            c, d = 1 + step / c, 1 / (1 + step * d)
            result *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return front * result


def wilcoxon_p(differences: np.ndarray) -> float:
    """Two-sided, of the signed ranks of differences; zeros are left out. Exact for few without ties, else normal, with
    corrections for ties and continuity."""
    values = differences[differences != 0]
    n = len(values)
    if not n:
        return 1.0
    sizes, places, counts = np.unique(np.abs(values), return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    positive = float(ranks[values > 0].sum())
    smaller = min(positive, n * (n + 1) / 2 - positive)
    if n <= _EXACT and len(sizes) == n:
        ways = np.zeros(n * (n + 1) // 2 + 1)
        ways[0] = 1
        for rank in range(1, n + 1):
            ways[rank:] += ways[:-rank].copy()
        return float(min(1.0, 2 * ways[: int(smaller) + 1].sum() / 2.0**n))
    variance = n * (n + 1) * (2 * n + 1) / 24 - float((counts**3 - counts).sum()) / 48
    z = max(0.0, n * (n + 1) / 4 - smaller - 0.5) / math.sqrt(variance)
    return math.erfc(z / math.sqrt(2))


def mcnemar_p(only_a: int, only_b: int) -> float:
    """Two-sided p that of the questions which only one of two models answers rightly so unequal numbers fall to each by chance
    (McNemar 1947), exact by the binomial distribution."""
    n, smaller = only_a + only_b, min(only_a, only_b)
    tail = sum(math.comb(n, i) for i in range(smaller + 1))
    return min(1.0, 2 * tail / 2**n)
