"""Better codes and scales for rows of scalar types."""

from __future__ import annotations

from typing import Any

import numpy as np

from .coupling import CoupledRows
from .descent.pairs import sweep_pairs
from .descent.parity import FOURS, descend_fours, sweep_fours
from .descent.scalar_descent import MAX_SWEEPS, descend, feed_back
from .matrix.prepared import DampedCovariance
from .refinement import Refinement
from .scale_codes import fit_scale_codes
from .scales import MAX_GROUP, search_scales
from .values import ScalarRows

_PAIR_SWEEPS = 2
_LEAST_CHANGES = 1 / 256  # of a row's codes: a sweep that changes fewer is the last


class ScalarRefinement(Refinement):
    """Refinement of a type for which `values.is_scalar` holds. Codes in fours of even parity (iq4_kss) have their own moves."""

    rows: ScalarRows

    def __init__(
        self, x: np.ndarray, rows: ScalarRows, damped: DampedCovariance, effort: int, coupled: CoupledRows | None = None
    ):
        super().__init__(x, rows, damped, effort, coupled)
        table = rows.table
        self._table = (table.values, table.midpoints, table.codes, table.nearest, np.float32(table.lowest))
        self._in_fours = rows.fields.layout.gray_words

    def _parameters(self) -> tuple[Any, ...]:
        return *self.rows.parameters(), self.rows.table.group, self._table

    def _state(self) -> tuple[Any, ...]:
        damped = self.damped
        return *self._parameters(), damped.panels, damped.diagonal, damped.size, self.gradient, self.values, self.rows.codes

    def codes(self) -> list[np.ndarray]:
        return [self.rows.codes]

    def choose_codes(self) -> None:
        sweeps = MAX_SWEEPS if self.effort > 0 else 2
        (descend_fours if self._in_fours else descend)(self.along, self._least_changes(), sweeps, *self._state())

    def _least_changes(self) -> int:
        return int(self.x.shape[1] * _LEAST_CHANGES)

    def polish_codes(self) -> None:
        for _ in range(0 if self._in_fours else _PAIR_SWEEPS):
            self._row_by_row(ScalarRefinement._move_pairs)
            self.choose_codes()

    def _move_pairs(self) -> None:
        sweep_pairs(self.rows.table.entries, *self._state())

    def round_in_order(self) -> None:
        size, codes = self.damped.size, self.rows.codes
        if not self._in_fours:
            sums = np.zeros(len(self.x) * size, np.float32)
            feed_back(self.ahead, self.x, *self._parameters(), self.damped.triangle, size, sums, self.values, codes)
            return
        matrix, rows = self.damped.feedback(4, FOURS), len(self.x)
        sweep_fours(
            self.ahead, FOURS, np.ones(rows, np.bool_), *self._parameters(), matrix.panels, matrix.diagonal, size,
            self.feedback_sums(matrix), self.values, codes, np.empty(rows, np.int64), True,
        )  # fmt: skip

    def search_scales(self, round: int) -> None:
        if self._in_fours:
            fit_scale_codes(self.rows, self.damped, self.gradient, self.values)
        elif self.rows.table.group <= MAX_GROUP:
            near = 2 if round else self.effort  # only the neighbours of what was found before
            search_scales(self.rows, near, self._table, self.damped, self.gradient, self.values)
