"""Better entries and scales for rows of codebook and trellis types."""

from __future__ import annotations

import numpy as np

from ...jobs.steps import begin_step
from ...simd.lanes import LANES
from .coupling import CoupledRows, Coupling
from .descent.vector_descent import SWEEPS, invert_diagonal_blocks, squares_of
from .matrix.prepared import DampedCovariance, FeedbackMatrix
from .refinement import Refinement
from .scale_codes import fit_scale_codes
from .vectors import VectorRows, trellis_tree

SWEEPS_BY_EFFORT = (1, 4, 8, 8)  # by effort
LEAST_CHANGES = 1 / 64  # of a row's vectors: a sweep that changes fewer is the last


class VectorRefinement(Refinement):
    """Refinement of a type for which `vectors.is_vector` holds."""

    rows: VectorRows

    def __init__(
        self, x: np.ndarray, rows: VectorRows, damped: DampedCovariance, effort: int, coupled: CoupledRows | None = None
    ):
        super().__init__(x, rows, damped, effort, coupled)
        self._finite = np.isfinite(self.errors())
        self._changed = np.empty(len(x), np.int64)

    def codes(self) -> list[np.ndarray]:
        return [self.rows.entries, self.rows.weight_signs]

    def choose_codes(self) -> None:
        active = self._finite.copy()
        for number in range(SWEEPS_BY_EFFORT[self.effort]):
            begin_step(f"sweep {number + 1}")
            self._sweep(self.along, active, self.damped)
            changed = self._changed if self.coupled is None else self._changed.mean()
            active &= changed > LEAST_CHANGES * self.rows.groups
            if not active.any():
                break

    def polish_codes(self) -> None:
        self.choose_codes()

    def round_in_order(self) -> None:
        self._sweep(self.ahead, self._finite, self.damped.feedback(self.rows.table.size))

    def search_scales(self, round: int) -> None:
        fit_scale_codes(self.rows, self.damped, self.gradient, self.values)

    def _sweep(self, coupling: Coupling, active: np.ndarray, matrix: DampedCovariance | FeedbackMatrix) -> None:
        gradient = self.feedback_sums(matrix) if isinstance(matrix, FeedbackMatrix) else self.gradient
        rows, table, size = self.rows, self.rows.table, self.damped.size
        runs = table.entries * (table.books if table.flagged else 1) // LANES
        inverses = np.empty((rows.groups, table.size**2), np.float32)
        invert_diagonal_blocks(matrix.panels, size, table.size, inverses)
        tree = trellis_tree(rows.fields.type.name)
        squares = squares_of(matrix.panels, self.x.shape[1], size, table, tree.boxes.size > 0)
        SWEEPS[table.size](
            coupling, active, rows.parameters()[0], table.signs, table.lanes, runs, tree, matrix.panels, inverses, squares,
            size, gradient, self.values, rows.entries, rows.weight_signs, self._changed,
            isinstance(matrix, FeedbackMatrix),
        )  # fmt: skip
