"""What encoding needs of a covariance, computed once for all rows of a matrix."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import field
from typing import Any

import numpy as np

from ....data_classes import dataclass
from ....simd.memory import aligned_empty, sparse_zeros
from ....simd.workers import ALONE, Workers
from .covariance_matrix import SecondMoments
from .factor import factor_panels, multiply_blocks
from .panels import WIDTH, padded, run_in_parts

KEPT = 2  # triangles of a covariance: what one type needs, and what that is made of


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


class DampedCovariance:
    """A damped covariance H of n columns in the form that kernels read; size: n rounded up to whole panels.

    panels    float32, flat: H in panels; diagonal: float32 [size]
    triangle  float32, flat: the factor U of H = U D U^T in panels; pivots: float32 [size], D. They are made, once, when they
              are first asked for
    """

    def __init__(self, covariance: SecondMoments, workers: Workers = ALONE, kept: int = KEPT):
        """kept: triangles that are kept at most, two or more; covariance: one that was checked."""
        n = self.columns = covariance.columns
        self.size, self._workers, self._kept = padded(n), workers, kept
        panels = aligned_empty((self.size // WIDTH, self.size, WIDTH), np.float32)
        covariance.write_panels(panels, workers)
        self.panels, self.diagonal, at = panels.reshape(-1), np.zeros(self.size, np.float32), np.arange(n)
        self.diagonal[:n] = covariance.damped_diagonal()
        self.panels[(at // WIDTH * self.size + at) * WIDTH + at % WIDTH] = self.diagonal[:n]
        self._lock = threading.RLock()
        self._made: OrderedDict[Hashable, Any] = OrderedDict()  # what was asked for last is at the end

    @property
    def triangle(self) -> np.ndarray:
        return self._factors()[0]

    @property
    def pivots(self) -> np.ndarray:
        return self._factors()[1]

    def _factors(self) -> tuple[np.ndarray, np.ndarray]:
        return self._once("factors", 1, lambda: factor_panels(self.panels, self.columns, workers=self._workers))

    @property
    def nbytes(self) -> int:
        """Bytes of memory now; a triangle takes half of H's."""
        return self.panels.nbytes + self.panels.nbytes // 2 * len(self._made)

    def feedback(self, width: int, order: np.ndarray | None = None) -> FeedbackMatrix:
        """What feeds errors back from vector to vector of `width` weights; made when it is first asked for, half as large as H.

        order  int64 [64]: the columns of each panel in the order in which they are rounded, vectors being consecutive in it;
               None: as they are
        """
        return self._once((width, order is not None), 2, lambda: self._make_feedback(width, order))

    def _once(self, key: Hashable, triangles: int, make: Callable[[], Any]) -> Any:
        """What `make` gives, which takes so many triangles meanwhile; too many make way, those asked for longest ago first."""
        with self._lock:
            if key not in self._made:
                while len(self._made) + triangles > self._kept:
                    self._made.popitem(last=False)
                self._made[key] = make()
            self._made.move_to_end(key)
            return self._made[key]

    def _make_feedback(self, width: int, order: np.ndarray | None) -> FeedbackMatrix:
        """The factors that it takes are not kept: types of vectors do not ask for them."""
        if order is not None:
            triangle, pivots = factor_panels(self.panels, self.size, order, self._workers)
        else:
            triangle, pivots = self._made.get("factors") or factor_panels(self.panels, self.columns, workers=self._workers)
        out, size = sparse_zeros(self.size * self.size), self.size

        def multiply(first: int, stop: int) -> None:
            multiply_blocks(triangle, pivots, size, width, WIDTH * first, WIDTH * stop, out)
            if order is not None:
                places = np.argsort(order)
                for panel in range(first, stop):
                    rows = out.reshape(-1, size, WIDTH)[panel, : WIDTH * (panel + 1)].reshape(-1, WIDTH, WIDTH)
                    rows[:] = rows[:, places][..., places]

        run_in_parts(self._workers, size // WIDTH, multiply)
        at = np.arange(size)
        return FeedbackMatrix(out, out[(at // WIDTH * size + at) * WIDTH + at % WIDTH])


def prepared_bytes(columns: int, kept: int = KEPT) -> int:
    """Bytes of memory that a prepared covariance of so many columns takes at most: H and the triangles that are kept."""
    return padded(columns) ** 2 * (4 + 2 * kept)


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


def prepare(covariance: SecondMoments, workers: Workers = ALONE, kept: int = KEPT) -> PreparedCovariance:
    """Checks a covariance and damps it. Raises PlanError as `check` does.

    What else types need of it (`DampedCovariance.triangle`, `feedback`) takes columns^3 / 6 multiplications by the workers when
    it is first asked for; of that so many are kept at most. Memory: `prepared_bytes`.
    """
    covariance.check()
    damped = None
    if covariance.has_enough_tokens and covariance.diagonal.any():
        damped = DampedCovariance(covariance, workers, kept)
    return PreparedCovariance(covariance.columns, covariance.diagonal, damped)
