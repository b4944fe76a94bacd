"""Codes of scalar types chosen on a device: the steps of `quantize.covariance.descent.scalar_descent`, a column of all
rows at a time.

A block's 64 columns are done one after the other, with what each changes added to the rest of the block; what the block changed
then meets all other columns in one product of matrices. Sums have another order than on the CPU.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..covariance.coupling import CoupledRows
from ..covariance.descent.scalar_descent import MAX_SWEEPS
from ..covariance.matrix.panels import WIDTH, from_panels
from ..covariance.matrix.prepared import DampedCovariance
from ..covariance.scalar_refinement import ScalarRefinement
from ..covariance.values import ScalarRows, ValueTable
from .device_refinement import OnDevice, kept_on
from .memory import one_at_a_time


class DeviceScalarRefinement(OnDevice, ScalarRefinement):
    """Refinement of types with a code for each weight."""

    def __init__(
        self,
        x: np.ndarray,
        rows: ScalarRows,
        damped: DampedCovariance,
        effort: int,
        device: str,
        coupled: CoupledRows | None = None,
    ):
        self.device = device
        self._levels = Levels(rows.table, device)
        super().__init__(x, rows, damped, effort, coupled)

    def round_in_order(self) -> None:
        damped = self.damped
        with one_at_a_time:
            triangle = kept_on(self.device, damped, "triangle", lambda: from_panels(damped.triangle, damped.size))
            self._round_in_order(triangle)

    def _round_in_order(self, triangle: Tensor) -> None:
        groups, x, values, codes = self._groups(), self.sent(self.x), self.sent(self.values), self.sent(self.rows.codes)
        sums = torch.zeros(len(values), self.damped.size, device=self.device)
        for first in range(0, values.shape[1], WIDTH):
            block = slice(first, min(first + WIDTH, values.shape[1]))
            buffer, within = sums[:, block], triangle[block, block]
            for i, j in enumerate(range(block.start, block.stop)):
                factor, offset, flag = groups.of_column(j)
                level = self._levels.nearest((x[:, j] + buffer[:, i] - offset) / factor, flag)
                is_free = factor != 0
                values[:, j] = torch.where(is_free, factor * self._levels.values[flag, level] + offset, values[:, j])
                codes[:, j] = torch.where(is_free, self._levels.codes[level], codes[:, j])
                buffer[:, i + 1 :] += (x[:, j] - values[:, j])[:, None] * within[i, i + 1 :]
            sums[:, block.stop :] += (x[:, block] - values[:, block]) @ triangle[block, block.stop :]
        self._take(values, codes)

    def choose_codes(self) -> None:
        with one_at_a_time:
            groups, values, codes = self._groups(), self.sent(self.values), self.sent(self.rows.codes)
            gradient = self.sent(self.gradient.reshape(len(values), -1))
            least, active = self._least_changes(), torch.ones(len(values), dtype=torch.bool, device=self.device)
            for _ in range(MAX_SWEEPS if self.effort > 0 else 2):
                active &= self._sweep(active, groups, values, codes, gradient) > least
                if not active.any():
                    break
            self.gradient[:] = gradient.cpu().numpy().reshape(-1)
            self._take(values, codes)

    def _sweep(self, active: Tensor, groups: Groups, values: Tensor, codes: Tensor, gradient: Tensor) -> Tensor:
        """One sweep of descent over the active rows: int64 [rows], how many codes of each changed."""
        h = self.matrix(self.damped)
        changed = torch.zeros(len(values), dtype=torch.int64, device=self.device)
        for first in range(0, values.shape[1], WIDTH):
            block = slice(first, min(first + WIDTH, values.shape[1]))
            buffer, within, before = gradient[:, block].clone(), h[block, block], values[:, block].clone()
            for i, j in enumerate(range(block.start, block.stop)):
                factor, offset, flag = groups.of_column(j)
                level = self._levels.nearest((values[:, j] + buffer[:, i] / within[i, i] - offset) / factor, flag)
                new = factor * self._levels.values[flag, level] + offset
                moves = active & (factor != 0) & (within[i, i] > 0) & (new != values[:, j])
                step = torch.where(moves, values[:, j] - new, 0)
                values[:, j] = torch.where(moves, new, values[:, j])
                codes[:, j] = torch.where(moves, self._levels.codes[level], codes[:, j])
                buffer[:, i + 1 :] += step[:, None] * within[i, i + 1 :]
                changed += moves
            gradient += (before - values[:, block]) @ h[block]
        return changed

    def _groups(self) -> Groups:
        factor, offset, flag = map(self.sent, self.rows.parameters())
        return Groups(factor, offset, flag, self.rows.table.group)

    def _take(self, values: Tensor, codes: Tensor) -> None:
        self.values[:], self.rows.codes[:] = values.cpu().numpy(), codes.cpu().numpy()


class Groups:
    """Factor, offset and flag of the groups of rows, [rows, groups] each."""

    def __init__(self, factor: Tensor, offset: Tensor, flag: Tensor, group: int):
        self._columns = factor.T.contiguous(), offset.T.contiguous(), flag.T.long().contiguous()
        self._group = group

    def of_column(self, j: int) -> tuple[Tensor, Tensor, Tensor]:
        """Factor, offset and flag of the group that column j belongs to, [rows] each."""
        factor, offset, flag = (each[j // self._group] for each in self._columns)
        return factor, offset, flag


class Levels:
    """A `ValueTable` on a device."""

    def __init__(self, table: ValueTable, device: str):
        self.values, self.codes = (torch.from_numpy(a).to(device) for a in (table.values, table.codes))
        self._midpoints = torch.from_numpy(np.ascontiguousarray(table.midpoints[:, :-1])).to(device)

    def nearest(self, x: Tensor, flag: Tensor) -> Tensor:
        """The numbers of the entries that are nearest to x [rows], in units of the groups' factors."""
        found = torch.searchsorted(self._midpoints[0], x)
        return found if len(self._midpoints) == 1 else torch.where(flag > 0, torch.searchsorted(self._midpoints[1], x), found)
