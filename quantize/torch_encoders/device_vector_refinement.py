"""Entries of codebook types chosen on a device: the sweep of `quantize.covariance.descent.vector_descent`, a vector of all
rows at a time.

The error p H' p^T - 2 p g'^T / f of an entry p is linear in its elements, their products of two and their squares. So the
errors of all entries for all rows are one product of matrices: [rows, features] times [features, entries]. (Of trellis
codebooks the CPU tries the entries near the optimum only, so that a device would come to other codes.)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from ...simd.lanes import LANES
from ..covariance.coupling import ALONE, Coupling
from ..covariance.descent.vector_descent import MARGIN, invert_diagonal_blocks
from ..covariance.matrix.panels import WIDTH
from ..covariance.matrix.prepared import DampedCovariance, FeedbackMatrix
from ..covariance.vector_refinement import VectorRefinement
from ..covariance.vectors import SIGNS_EVEN, SIGNS_IN_ENTRIES, VectorRows, vector_table
from .device_refinement import OnDevice, Owner, kept_on
from .memory import one_at_a_time

_ERRORS_AT_ONCE = 1 << 27  # of entries for rows: 512 MB, and as much again while the best is looked for


def rows_at_once(type_name: str) -> int:
    """How many rows a device with ordinary memory refines together."""
    return max(1, _ERRORS_AT_ONCE // len(vector_table(type_name).codes))


@dataclass(frozen=True, eq=False)
class _Entries:
    """The entries of a `VectorTable`, all books one after the other.

    entries   float32 [entries, size]
    squares   float32 [size, entries]: of their elements
    products  float32 [pairs, entries]: of the elements `first` and `second`, int64 [pairs]
    """

    entries: Tensor
    squares: Tensor
    products: Tensor
    first: Tensor
    second: Tensor


@cache
def _entries_of(type_name: str, device: str) -> _Entries:
    table = vector_table(type_name)
    entries = table.lanes.reshape(-1, table.size, LANES).transpose(0, 2, 1).reshape(-1, table.size)
    first, second = np.triu_indices(table.size, 1)
    columns = entries.T
    arrays = entries, columns * columns, columns[first] * columns[second], first, second
    return _Entries(*(torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in arrays))


class DeviceVectorRefinement(OnDevice, VectorRefinement):
    """Refinement of codebook types."""

    def __init__(self, x: np.ndarray, rows: VectorRows, damped: DampedCovariance, effort: int, device: str):
        self.device = device
        super().__init__(x, rows, damped, effort)

    def _sweep(
        self, coupling: Coupling, active: np.ndarray, matrix: DampedCovariance | FeedbackMatrix, gradient: np.ndarray
    ) -> None:
        assert coupling is ALONE  # coupled rows are encoded by the processor
        with one_at_a_time:
            rows, count = self.rows, len(self.x)
            state = _State(
                self.sent(active), self.sent(rows.parameters()[0]), self.sent(self.values), self.sent(rows.entries).long(),
                self.sent(rows.weight_signs), self.sent(gradient.reshape(count, -1)),
                torch.zeros(count, dtype=torch.int64, device=self.device),
            )  # fmt: skip
            h, inverses = self.matrix(matrix), self._inverses(matrix)
            for first in range(0, self.values.shape[1], WIDTH):
                self._sweep_panel(first, state, h, inverses)
            self.values[:], rows.entries[:] = state.values.cpu().numpy(), state.entries.cpu().numpy()
            rows.weight_signs[:], self._changed[:] = state.signs.cpu().numpy(), state.changed.cpu().numpy()
            gradient[:] = state.gradient.cpu().numpy().reshape(-1)

    def _inverses(self, owner: Owner) -> Tensor:
        """float32 [vectors, size, size]: those of the blocks on the matrix's diagonal."""
        size, columns = self.rows.table.size, self.damped.size

        def invert() -> np.ndarray:
            out = np.empty((columns // size, size * size), np.float32)
            invert_diagonal_blocks(owner.panels, columns, size, out)
            return out.reshape(-1, size, size)

        return kept_on(self.device, owner, f"inverses of {size}", invert)

    def _sweep_panel(self, first: int, state: _State, h: Tensor, inverses: Tensor) -> None:
        size = self.rows.table.size
        block = slice(first, min(first + WIDTH, state.values.shape[1]))
        buffer, before = state.gradient[:, block].clone(), state.values[:, block].clone()
        for start in range(block.start, block.stop, size):
            at = slice(start - first, start - first + size)
            columns = slice(start, start + size)
            step = self._move_vector(columns, buffer[:, at], state, h[columns, columns], inverses[start // size])
            buffer[:, at.stop :] += step @ h[columns, columns.stop : block.stop]
        state.gradient += (before - state.values[:, block]) @ h[block]

    def _move_vector(self, columns: slice, gradient: Tensor, state: _State, h: Tensor, inverse: Tensor) -> Tensor:
        """Gives each row's vector in these columns the entry of least error: the steps, float32 [rows, size]."""
        table, known = self.rows.table, _entries_of(self.rows.fields.type.name, self.device)
        v, per_book = columns.start // table.size, table.entries * (table.books if table.flagged else 1)
        scale, entry = state.factor[:, v], state.entries[:, v]
        gradient = gradient / torch.where(scale != 0, scale, 1.0)[:, None]
        signed = table.signs != SIGNS_IN_ENTRIES
        old_signs = state.signs[:, columns] if signed else torch.ones_like(gradient)
        old = known.entries[entry] * old_signs
        linear = -2 * (old @ h + gradient)
        current = (old * (old @ h + linear)).sum(1)
        signs = _new_signs(old + gradient @ inverse, old_signs, h, table.signs == SIGNS_EVEN) if signed else old_signs
        best, error = self._best(known, linear, signs, h, entry // per_book, per_book)
        moves = state.active & (scale != 0) & (error < current - float(MARGIN) * current.abs())
        value = torch.where(moves[:, None], signs * (known.entries[best] * scale[:, None]), state.values[:, columns])
        step = state.values[:, columns] - value
        state.values[:, columns] = value
        state.entries[:, v] = torch.where(moves, best, entry)
        if signed:
            state.signs[:, columns] = torch.where(moves[:, None], signs, old_signs)
        state.changed += moves
        return step

    def _best(self, known: _Entries, linear: Tensor, signs: Tensor, h: Tensor, book: Tensor, per_book: int):
        """The entry of least error with these signs, of each row's book: (int64 [rows], float32 [rows], that error)."""
        products = 2 * h[known.first, known.second]
        errors = h.diagonal() @ known.squares
        if self.rows.table.signs == SIGNS_IN_ENTRIES:
            errors = torch.addmm(errors + products @ known.products, linear, known.entries.T)
        else:
            errors = torch.addmm(errors, linear * signs, known.entries.T)
            errors.addmm_(products * (signs[:, known.first] * signs[:, known.second]), known.products)
        if errors.shape[1] > per_book:
            errors = errors.view(len(errors), -1, per_book)[torch.arange(len(errors), device=errors.device), book]
        error, best = errors.min(1)
        return best + book * per_book, error


@dataclass
class _State:
    """What a sweep reads and changes of all rows; signs: of no columns where they are part of entries."""

    active: Tensor
    factor: Tensor
    values: Tensor
    entries: Tensor
    signs: Tensor
    gradient: Tensor
    changed: Tensor


def _new_signs(target: Tensor, old_signs: Tensor, h: Tensor, even: bool) -> Tensor:
    """The signs of the best values without codes; even: or all but the weakest, to keep their number even."""
    signs = torch.where(target < 0, -1.0, 1.0)
    if even:
        odd = (signs != old_signs).sum(1, keepdim=True) % 2 > 0
        weakest = (target * target * h.diagonal()).argmin(1, keepdim=True)
        turned = signs.scatter(1, weakest, -signs.gather(1, weakest))
        signs = torch.where(odd, turned, signs)
    return signs
