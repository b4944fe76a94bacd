"""`Covariance`, the mean of x x^T over the inputs x of a matrix, and how it is damped before rows are encoded with it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import field
from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from ....data_classes import dataclass
from ....errors import PlanError

if TYPE_CHECKING:
    from ....simd.workers import Workers

EFFORTS = (0, 1, 2, 3)  # of the search for codes and scales, see README.md
_DAMPING = 0.01  # of the mean of the diagonal, however many tokens were seen
_DAMPING_OF_FEW_TOKENS = 0.2  # times columns / tokens
_SHRINKAGE_OF_FEW_TOKENS = 0.6  # times columns / tokens: how much the diagonal grows in its own proportion
_TOKENS_PER_COLUMN = 0.5  # with fewer, only the diagonal is used
NOT_FINITE = "the covariance has entries that are infinite or NaN: collect it again"
NEGATIVE = "the covariance has a negative mean square: collect it again"
_TILE = 1024  # rows and columns that are compared with their transpose at a time


def enough_tokens(tokens: int, columns: int) -> bool:
    """Whether more than the diagonal of a covariance is worth using: at least half as many tokens as columns were seen."""
    return tokens >= wanted_tokens(columns)


def wanted_tokens(columns: int) -> int:
    """The least that are enough."""
    return max(1, ceil(_TOKENS_PER_COLUMN * columns))


class SecondMoments(ABC):
    """The mean of x x^T over the inputs x of a matrix, in whatever form it is kept.

    tokens    how many inputs x the mean was taken of
    diagonal  float32 [columns]: the mean squares of the inputs, which is what an importance matrix has
    """

    tokens: int

    @property
    @abstractmethod
    def diagonal(self) -> np.ndarray: ...

    @abstractmethod
    def check(self) -> None:
        """Raises PlanError for entries that are not finite, for an asymmetric matrix and for a negative mean square."""

    @abstractmethod
    def write_panels(self, panels: np.ndarray, workers: Workers) -> None:
        """Writes the matrix to panels (see `panels`), float32 [panels, size, 64], with zeros beyond its columns."""

    @property
    def columns(self) -> int:
        return len(self.diagonal)

    @property
    def has_enough_tokens(self) -> bool:
        """Whether more than the diagonal is worth using."""
        return enough_tokens(self.tokens, self.columns)

    @property
    def damping(self) -> float:
        """What is to be added to the diagonal, as a fraction of its mean: max(0.01, 0.2 * columns / tokens).

        Without damping, a covariance of one window of 512 tokens does more harm than good.
        """
        return max(_DAMPING, _DAMPING_OF_FEW_TOKENS * self.columns / max(1, self.tokens))

    @property
    def shrinkage(self) -> float:
        """What is to be added to each entry of the diagonal, as a fraction of that entry: 0.6 * columns / tokens.

        The same as making all other entries smaller by 1 / (1 + shrinkage), as Ledoit and Wolf do (2004, "A well-conditioned
        estimator for large-dimensional covariance matrices", with the diagonal as their target): correlations that were
        estimated from few tokens are too large. Unlike damping by the mean, it keeps columns of small inputs apart.
        """
        return _SHRINKAGE_OF_FEW_TOKENS * self.columns / max(1, self.tokens)

    def damped_diagonal(self, least: float = 0.0) -> np.ndarray:
        """float32 [columns]: the diagonal plus `damping` (at least `least`) times its mean and `shrinkage` times itself."""
        diagonal = self.diagonal.astype(np.float64)
        mean = diagonal.mean() if self.columns else 0.0
        return (diagonal * (1 + self.shrinkage) + max(self.damping, least) * mean).astype(np.float32)


@dataclass(frozen=True, eq=False)
class Covariance(SecondMoments):
    """The uncentred covariance of a matrix's inputs.

    matrix  float32 [columns, columns], symmetric, all of it stored: the mean of x x^T over the tokens
    tokens  how many inputs x the mean was taken of

    Raises PlanError for an array that is no square matrix of float32, and for less than no tokens.
    """

    matrix: np.ndarray = field(repr=False)
    tokens: int

    def __post_init__(self) -> None:
        shape = self.matrix.shape
        if len(shape) != 2 or shape[0] != shape[1] or self.matrix.dtype != np.float32:
            raise PlanError(f"a covariance is a square matrix of float32, not {self.matrix.dtype} of shape {shape}")
        if self.tokens < 0:
            raise PlanError(f"a covariance of {self.tokens} tokens")

    @property
    def diagonal(self) -> np.ndarray:
        return np.ascontiguousarray(np.diagonal(self.matrix))

    def check(self) -> None:
        for start in range(0, self.columns, _TILE):
            rows = self.matrix[start : start + _TILE]
            if not np.isfinite(rows).all():
                raise PlanError(NOT_FINITE)
            if not np.array_equal(rows, self.matrix[:, start : start + _TILE].T):
                raise PlanError("the covariance is not symmetric: collect it again")
        if self.columns and self.diagonal.min() < 0:
            raise PlanError(NEGATIVE)

    def write_panels(self, panels: np.ndarray, workers: Workers) -> None:
        from .panels import in_panels  # with kernels, which plans do without

        panels[:] = in_panels(self.matrix)

    def damped(self, least: float = 0.0) -> np.ndarray:
        """float32 [columns, columns]: the matrix with `damped_diagonal`."""
        damped = self.matrix.copy()
        np.fill_diagonal(damped, self.damped_diagonal(least))
        return damped


CovarianceOf = Callable[[str, int], SecondMoments | None]
"""(name of a tensor, number of the matrix in it, the expert) -> the covariance of that matrix' inputs; None: not collected."""
