"""What encoding needs of a covariance, computed once for all rows of a matrix."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np

from ...simd.memory import aligned_empty
from .covariance_matrix import Covariance
from .factor import factor, multiply_blocks
from .panels import WIDTH, from_panels, in_panels, padded


@dataclass(frozen=True, eq=False)
class FeedbackMatrix:
    """The matrix M with which a sweep of descent over vectors is one pass of error feedback (block LDLQ, as in QuIP#,
    arXiv 2402.04396).

    With H = U D U^T the error r H r^T is the sum over vectors S of e_S D_SS e_S^T, e = r U. If all later weights could still
    move freely, a vector's best values would make its own term least: that of the quadratic form M_SS = U_SS D_SS U_SS^T with
    the gradient (r M)_S, where column block S of M is U_:S D_SS U_SS^T. M is zero below its blocks on the diagonal.

    panels    float32, flat: M in panels; diagonal: float32 [size]; inverses of blocks are those of `vector_descent`
    """

    panels: np.ndarray
    diagonal: np.ndarray


@dataclass(frozen=True, eq=False)
class DampedCovariance:
    """A damped covariance H of n columns in the form that kernels read; size: n rounded up to whole panels.

    panels    float32, flat: H in panels; diagonal: float32 [size]
    triangle  float32, flat: the factor U of H = U D U^T in panels; pivots: float32 [size], D
    """

    size: int
    panels: np.ndarray
    diagonal: np.ndarray
    triangle: np.ndarray
    pivots: np.ndarray
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _feedback: dict[tuple[int, bool], FeedbackMatrix] = field(default_factory=dict, repr=False)

    @property
    def nbytes(self) -> int:
        return self.panels.nbytes + self.triangle.nbytes + sum(m.panels.nbytes for m in list(self._feedback.values()))

    def feedback(self, width: int, order: np.ndarray | None = None) -> FeedbackMatrix:
        """What feeds errors back from vector to vector of `width` weights; made when it is first asked for, as large as H.

        order  int64 [64]: the columns of each panel in the order in which they are rounded, vectors being consecutive in it;
               None: as they are
        """
        with self._lock:
            key = width, order is not None
            if key not in self._feedback:
                self._feedback[key] = self._make_feedback(width, order)
            return self._feedback[key]

    def _make_feedback(self, width: int, order: np.ndarray | None) -> FeedbackMatrix:
        triangle, pivots, places = self.triangle, self.pivots, np.arange(WIDTH)
        if order is not None:
            places = np.argsort(order)
            columns = (np.arange(0, self.size, WIDTH)[:, None] + order).reshape(-1)
            triangle, pivots = factor(from_panels(self.panels, self.size)[columns][:, columns])
        out = np.zeros(self.panels.size, np.float32)
        multiply_blocks(triangle, pivots, self.size, width, out)
        if order is not None:
            panels = self.size // WIDTH
            out = out.reshape(panels, panels, WIDTH, WIDTH)[:, :, places][..., places]
        panels = aligned_empty((self.panels.size,), np.float32)
        panels[:] = out.reshape(-1)
        return FeedbackMatrix(panels, np.ascontiguousarray(np.diagonal(from_panels(panels, self.size))))


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
        return self.damped.nbytes if self.damped is not None else 0


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
        damped = DampedCovariance(size, in_panels(matrix).reshape(-1), diagonal, *factor(matrix))
    return PreparedCovariance(covariance.columns, covariance.diagonal, damped)
