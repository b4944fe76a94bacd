"""`Refinement`: the steps that lower the error of encoded rows, of which each family of types has its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import copy
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np

from ...jobs.steps import begin_step
from ...simd.memory import scratch
from .coupling import ALONE, CoupledRows, coupled_error, mixed_row
from .descent.scalar_descent import row_errors
from .matrix.panels import multiply_rows
from .matrix.prepared import DampedCovariance, FeedbackMatrix
from .scales import refit
from .values import ScalarRows
from .vectors import VectorRows

ROUNDS = (0, 0, 1, 3)  # of scales, codes and feedback once more, by effort


class Refinement(ABC):
    """Rows that are being refined.

    x         float32 [rows, n]: the weights; damped: the covariance H; effort: 0 to 3
    coupled   the curvature of the rows' outputs, which weighs their errors together; None: every row stands alone
    rows      their fields and codes; values: float32 [rows, n], what these decode to
    gradient  float32 [rows * size], flat: (x - values) H
    """

    def __init__(
        self,
        x: np.ndarray,
        rows: ScalarRows | VectorRows,
        damped: DampedCovariance,
        effort: int,
        coupled: CoupledRows | None = None,
    ):
        self.x, self.rows, self.damped, self.effort, self.coupled = x, rows, damped, effort, coupled
        self.along = ALONE if coupled is None else coupled.descent
        self.ahead = ALONE if coupled is None else coupled.feedback
        self._decode()

    def _decode(self) -> None:
        """Sets values and gradient."""
        self.values = self.rows.values()
        self.gradient = self._product("covariance_gradient", self.x - self.values, self.damped.panels)

    @abstractmethod
    def choose_codes(self) -> None:
        """Coordinate descent over the codes, with scales as they are."""

    @abstractmethod
    def polish_codes(self) -> None:
        """What lowers the error where descent has ended and is too slow to be done in every round."""

    @abstractmethod
    def round_in_order(self) -> None:
        """One pass of error feedback over the codes; the gradient is not updated."""

    @abstractmethod
    def search_scales(self, round: int) -> None:
        """Better parameters of groups; round: the first is 0."""

    @abstractmethod
    def codes(self) -> list[np.ndarray]:
        """The arrays [rows, ...] that hold the codes of weights."""

    def errors(self) -> np.ndarray:
        """float64 [rows]: r H r^T; of coupled rows each has that of all, tr(A R H R^T)."""
        if self.coupled is not None:
            return np.full(len(self.x), coupled_error(self.along, self.x, self.values, self.gradient, self.damped.size))
        out = np.empty(len(self.x))
        row_errors(self.x, self.values, self.gradient, self.damped.size, out)
        return out

    def feed_back(self) -> None:
        """Error feedback, which may raise the error."""
        begin_step("error feedback")
        before = self.values.copy()
        self.round_in_order()
        multiply_rows(before - self.values, self.damped.panels, self.damped.size, self.gradient)

    def run(self) -> None:
        """All that the effort asks for."""
        if self.effort > 0:
            self.feed_back()
        self.choose_codes()
        for round in range(ROUNDS[self.effort]):
            self._row_by_row(partial(Refinement._fit_scales, round=round))
            self.choose_codes()
            self._feed_back_again()
        if ROUNDS[self.effort]:
            self.polish_codes()

    def _fit_scales(self, round: int) -> None:
        self.search_scales(round)
        refit(self.rows, self.damped, self.gradient, self.values)

    def _row_by_row(self, step: Callable[[Any], None]) -> None:
        """Takes a step that knows no coupling: coupled rows one after the other, each with its mixed gradient."""
        if self.coupled is None:
            step(self)
            return
        gradients, size = self.gradient.reshape(len(self.x), -1), self.damped.size
        mixed, before = np.empty(size, np.float32), np.empty(size, np.float32)
        arrays = {f.name: a for f in fields(self.rows) if isinstance(a := getattr(self.rows, f.name), np.ndarray)}
        for row in range(len(self.x)):
            mixed_row(self.along, self.gradient, size, row, mixed)
            before[:] = mixed
            one, part = copy(self), slice(row, row + 1)
            one.rows = copy(self.rows)
            for name, array in arrays.items():
                setattr(one.rows, name, array[part])
            one.x, one.values, one.gradient, one.coupled, one.along = self.x[part], self.values[part], mixed, None, ALONE
            step(one)
            for name, array in arrays.items():
                array[part] = getattr(one.rows, name)
            gradients[row] += mixed - before

    def _feed_back_again(self) -> None:
        """Feedback and descent once more with the present scales; rows that do not get better by it stay as they are."""
        errors, before = self.errors(), [a.copy() for a in self._arrays()]
        self.feed_back()
        self.choose_codes()
        worse = ~(self.errors() < errors)
        for array, old in zip(self._arrays(), before, strict=True):
            array[worse] = old[worse]

    def _arrays(self) -> list[np.ndarray]:
        """What descent and feedback change, [rows, ...] each."""
        return [self.values, self.gradient.reshape(len(self.x), -1), *self.codes()]

    def feedback_sums(self, matrix: FeedbackMatrix) -> np.ndarray:
        """(x - values) M, flat."""
        return self._product("covariance_feedback", self.x - self.values, matrix.panels)

    def _product(self, name: str, x: np.ndarray, panels: np.ndarray) -> np.ndarray:
        out = scratch(name, (len(x) * self.damped.size,), np.float32)
        out[:] = 0
        multiply_rows(x, panels, self.damped.size, out)
        return out
