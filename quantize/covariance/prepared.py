"""What encoding needs of a covariance, computed once for all rows of a matrix."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .covariance import Covariance
from .factor import unit_triangle
from .panels import in_panels, padded


@dataclass(frozen=True, eq=False)
class DampedCovariance:
    """A damped covariance H of n columns in the form that kernels read; size: n rounded up to whole panels.

    panels    float32, flat: H in panels; diagonal: float32 [size]
    triangle  float32, flat: the factor U of H = U D U^T in panels
    """

    size: int
    panels: np.ndarray
    diagonal: np.ndarray
    triangle: np.ndarray


@dataclass(frozen=True, eq=False)
class PreparedCovariance:
    """A covariance that was checked and made ready for encoding.

    columns     of the matrix whose rows are encoded
    importance  float32 [columns]: the covariance's diagonal
    damped      None if too few tokens were seen for more than the diagonal
    """

    columns: int
    importance: np.ndarray = field(repr=False)
    damped: DampedCovariance | None = field(repr=False)

    @property
    def nbytes(self) -> int:
        return self.damped.panels.nbytes + self.damped.triangle.nbytes if self.damped is not None else 0


def prepare(covariance: Covariance) -> PreparedCovariance:
    """Checks a covariance, damps and factors it. Raises PlanError as `Covariance.check` does.

    Takes columns^3 / 6 multiplications on one thread and three times the covariance's memory, of which two thirds remain.
    """
    covariance.check()
    damped = None
    if covariance.has_enough_tokens and covariance.diagonal.any():
        matrix = covariance.damped()
        size = padded(len(matrix))
        diagonal = np.zeros(size, np.float32)
        diagonal[: len(matrix)] = np.diagonal(matrix)
        damped = DampedCovariance(size, in_panels(matrix).reshape(-1), diagonal, unit_triangle(matrix))
    return PreparedCovariance(covariance.columns, covariance.diagonal, damped)
