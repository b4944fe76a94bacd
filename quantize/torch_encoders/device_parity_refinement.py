"""Codes in fours of even parity (iq4_kss) chosen on a device: the steps of `quantize.covariance.descent.parity`, a four of all
rows at a time."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..covariance.descent.parity import FOURS, MOVES
from ..covariance.descent.scalar_descent import MAX_SWEEPS
from ..covariance.matrix.panels import WIDTH
from ..covariance.matrix.prepared import DampedCovariance
from ..covariance.values import ScalarRows, ValueTable
from .device_refinement import Owner
from .device_scalar_refinement import DeviceScalarRefinement, Groups
from .memory import one_at_a_time, wide

# Moves of a four: one code to another of its parity, or two codes to the other parity. In the order of the CPU's trials.
_SINGLE_AND_PAIRS = [(p, m) for p in range(4) for m in (-1, *range(p))]


class DeviceParityRefinement(DeviceScalarRefinement):
    """Refinement of iq4_kss."""

    def __init__(self, x: np.ndarray, rows: ScalarRows, damped: DampedCovariance, effort: int, device: str):
        super().__init__(x, rows, damped, effort, device)
        self._by_parity = [_Entries(rows.table, parity, device) for parity in range(2)]
        self._moved = self.sent(np.array([[i in pair for i in range(4)] for pair in _SINGLE_AND_PAIRS]))
        self._is_pair = self.sent(np.array([second >= 0 for _, second in _SINGLE_AND_PAIRS]))
        self._order = self.sent(FOURS)

    def round_in_order(self) -> None:
        matrix = self.damped.feedback(4, FOURS)
        gradient = self.sent(self.feedback_sums(matrix).reshape(len(self.x), -1))
        with one_at_a_time:
            self._sweeps(1, matrix, gradient)

    def choose_codes(self) -> None:
        with one_at_a_time:
            gradient = self.sent(self.gradient.reshape(len(self.x), -1))
            self._sweeps(-(-(MAX_SWEEPS if self.effort > 0 else 2) // 2), self.damped, gradient)
            self.gradient[:] = gradient.cpu().numpy().reshape(-1)

    def _sweeps(self, count: int, owner: Owner, gradient: Tensor) -> None:
        groups, values, codes = self._groups(), self.sent(self.values), self.sent(self.rows.codes)
        active = torch.ones(len(values), dtype=torch.bool, device=self.device)
        h, diagonal = self.matrix(owner), self.sent(owner.diagonal)
        for _ in range(count):
            active &= self._sweep_fours(active, groups, values, codes, gradient, h, diagonal) > self._least_changes()
            if not active.any():
                break
        self._take(values, codes)

    def _sweep_fours(
        self, active: Tensor, groups: Groups, values: Tensor, codes: Tensor, gradient: Tensor, h: Tensor, diagonal: Tensor
    ) -> Tensor:
        """One sweep over the fours of the active rows: int64 [rows], how many codes of each changed. h may be the matrix of
        feedback; then gradient is its product."""
        changed = torch.zeros(len(values), dtype=torch.int64, device=self.device)
        for first in range(0, values.shape[1], WIDTH):
            block = slice(first, first + WIDTH)
            buffer, within, before = gradient[:, block].clone(), h[block, block], values[:, block].clone()
            for four in range(0, WIDTH, 4):
                places = self._order[four : four + 4]
                group = groups.of_column(first + int(FOURS[four]))
                for _ in range(MOVES):
                    if not self._move_four(active, group, first, places, values, codes, buffer, within, diagonal):
                        break
            changed += (values[:, block] != before).sum(1)
            gradient += (before - values[:, block]) @ h[block]
        return changed

    def _move_four(self, active, group, first, places, values, codes, buffer, within, diagonal) -> bool:
        """The move that lowers each row's error most, if any does: whether any row has moved."""
        factor, offset, flag = (each[:, None] for each in group)
        columns = places + first
        value, code, h, pushed = values[:, columns], codes[:, columns], diagonal[columns], buffer[:, places]
        x = (value + pushed / h - offset) / factor
        even, odd = (entries.nearest(x, flag) for entries in self._by_parity)
        is_odd = self._by_parity[1].holds[code.long()]
        choices = torch.stack([torch.where(is_odd, odd, even), torch.where(is_odd, even, odd)])  # of its parity, of the other
        new = factor * self._levels.values[flag.expand_as(x), choices] + offset
        steps = (value - new).to(wide(value.device))
        changes = steps * (2 * pushed + steps * h)
        costs = []
        for one, two in _SINGLE_AND_PAIRS:
            if two < 0:
                costs.append(changes[0, :, one])
            else:
                cross = steps[1, :, one] * steps[1, :, two] * within[places[one], places[two]]
                costs.append(changes[1, :, one] + changes[1, :, two] + 2 * cross)
        least, move = torch.stack(costs).min(0)
        moves = active & (least < 0) & (factor[:, 0] != 0)
        if not moves.any():
            return False
        moved = self._moved[move] & moves[:, None]
        to_other = self._is_pair[move][:, None].expand_as(moved)
        new, choice = torch.where(to_other, new[1], new[0]), torch.where(to_other, choices[1], choices[0])
        buffer += torch.where(moved, value - new, 0) @ within[places]
        values[:, columns] = torch.where(moved, new, value)
        codes[:, columns] = torch.where(moved, self._levels.codes[choice], code)
        return True


class _Entries:
    """The entries of a `ValueTable` whose codes have one parity, on a device. holds: bool [codes], which these are."""

    def __init__(self, table: ValueTable, parity: int, device: str):
        numbers = np.flatnonzero([int(code).bit_count() % 2 == parity for code in table.codes])
        values = table.values[:, numbers]
        self._numbers = torch.from_numpy(numbers).to(device)
        self._midpoints = torch.from_numpy(np.ascontiguousarray((values[:, 1:] + values[:, :-1]) / 2)).to(device)
        self.holds = torch.tensor([code.bit_count() % 2 == parity for code in range(256)], device=device)

    def nearest(self, x: Tensor, flag: Tensor) -> Tensor:
        """The numbers of the entries of this parity that are nearest to x [rows, n], in units of the groups' factors."""
        plain, shifted = (torch.searchsorted(midpoints, x) for midpoints in self._midpoints)
        return self._numbers[torch.where(flag > 0, shifted, plain)]
