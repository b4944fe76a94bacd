"""Codes of scalar types chosen on a device: the steps of `quantize.covariance.descent`, a column of all rows at a time.

A block's 64 columns are done one after the other, with what each changes added to the rest of the block; what the block changed
then meets all other columns in one product of matrices. Sums have another order than on the CPU.
"""

from __future__ import annotations

import weakref

import numpy as np
import torch
from torch import Tensor

from ..covariance.descent import MAX_SWEEPS
from ..covariance.panels import WIDTH, from_panels
from ..covariance.prepared import DampedCovariance
from ..covariance.scalar_refinement import ScalarRefinement
from ..covariance.values import ScalarRows, ValueTable

_matrices: weakref.WeakKeyDictionary[DampedCovariance, tuple[str, Tensor, Tensor]] = weakref.WeakKeyDictionary()


def _matrices_on(device: str, damped: DampedCovariance) -> tuple[Tensor, Tensor]:
    """H and U on the device, which stay there as long as the covariance does."""
    kept = _matrices.get(damped)
    if kept is None or kept[0] != device:
        h, u = (torch.from_numpy(from_panels(p, damped.size)).to(device) for p in (damped.panels, damped.triangle))
        _matrices[damped] = kept = device, h, u
    return kept[1], kept[2]


class DeviceRefinement(ScalarRefinement):
    """A `ScalarRefinement` whose descent, feedback and products are computed on a device; scales are searched by the CPU."""

    def __init__(self, x: np.ndarray, rows: ScalarRows, damped: DampedCovariance, effort: int, device: str):
        self._device = device
        self._h, self._u = _matrices_on(device, damped)
        self._levels = _Levels(rows.table, device)
        self._x = torch.from_numpy(np.ascontiguousarray(x)).to(device)
        super().__init__(x, rows, damped, effort)

    def _sent(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def _product(self, name: str, x: np.ndarray, panels: np.ndarray) -> np.ndarray:
        if panels is not self.damped.panels:
            return super()._product(name, x, panels)
        return (self._sent(x) @ self._h[: x.shape[1]]).cpu().numpy().reshape(-1)

    def feed_back(self) -> None:
        before = self.values.copy()
        self.round_in_order()
        change = self._product("", before - self.values, self.damped.panels)
        np.add(self.gradient, change, out=self.gradient)

    def round_in_order(self) -> None:
        groups, values, codes = self._groups(), self._sent(self.values), self._sent(self.rows.codes)
        sums = torch.zeros(len(values), self.damped.size, device=self._device)
        for first in range(0, values.shape[1], WIDTH):
            block = slice(first, min(first + WIDTH, values.shape[1]))
            buffer, within = sums[:, block], self._u[block, block]
            for i, j in enumerate(range(block.start, block.stop)):
                factor, offset, flag = groups.of_column(j)
                level = self._levels.nearest((self._x[:, j] + buffer[:, i] - offset) / factor, flag)
                is_free = factor != 0
                values[:, j] = torch.where(is_free, factor * self._levels.values[flag, level] + offset, values[:, j])
                codes[:, j] = torch.where(is_free, self._levels.codes[level], codes[:, j])
                buffer[:, i + 1 :] += (self._x[:, j] - values[:, j])[:, None] * within[i, i + 1 :]
            sums[:, block.stop :] += (self._x[:, block] - values[:, block]) @ self._u[block, block.stop :]
        self._take(values, codes)

    def choose_codes(self) -> None:
        groups, values, codes = self._groups(), self._sent(self.values), self._sent(self.rows.codes)
        gradient = self._sent(self.gradient.reshape(len(values), -1))
        least, active = self._least_changes(), torch.ones(len(values), dtype=torch.bool, device=self._device)
        for _ in range(MAX_SWEEPS if self.effort > 0 else 2):
            active &= self._sweep(active, groups, values, codes, gradient) > least
            if not active.any():
                break
        self.gradient[:] = gradient.cpu().numpy().reshape(-1)
        self._take(values, codes)

    def _sweep(self, active: Tensor, groups: _Groups, values: Tensor, codes: Tensor, gradient: Tensor) -> Tensor:
        """One sweep of descent over the active rows: int64 [rows], how many codes of each changed."""
        changed = torch.zeros(len(values), dtype=torch.int64, device=self._device)
        for first in range(0, values.shape[1], WIDTH):
            block = slice(first, min(first + WIDTH, values.shape[1]))
            buffer, within, before = gradient[:, block].clone(), self._h[block, block], values[:, block].clone()
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
            gradient += (before - values[:, block]) @ self._h[block]
        return changed

    def _groups(self) -> _Groups:
        factor, offset, flag = map(self._sent, self.rows.parameters())
        return _Groups(factor, offset, flag, self.rows.table.group)

    def _take(self, values: Tensor, codes: Tensor) -> None:
        self.values[:], self.rows.codes[:] = values.cpu().numpy(), codes.cpu().numpy()


class _Groups:
    """Factor, offset and flag of the groups of rows, [rows, groups] each."""

    def __init__(self, factor: Tensor, offset: Tensor, flag: Tensor, group: int):
        self._columns = factor.T.contiguous(), offset.T.contiguous(), flag.T.long().contiguous()
        self._group = group

    def of_column(self, j: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of the group that column j belongs to, [rows] each."""
        factor, offset, flag = (each[j // self._group] for each in self._columns)
        return factor, offset, flag


class _Levels:
    """A `ValueTable` on a device."""

    def __init__(self, table: ValueTable, device: str):
        self.values, self.codes = (torch.from_numpy(a).to(device) for a in (table.values, table.codes))
        self._midpoints = torch.from_numpy(np.ascontiguousarray(table.midpoints[:, :-1])).to(device)

    def nearest(self, x: Tensor, flag: Tensor) -> Tensor:
        """The numbers of the entries that are nearest to x [rows], in units of the groups' factors."""
        found = torch.searchsorted(self._midpoints[0], x)
        return found if len(self._midpoints) == 1 else torch.where(flag > 0, torch.searchsorted(self._midpoints[1], x), found)
