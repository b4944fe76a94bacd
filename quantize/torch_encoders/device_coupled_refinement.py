"""Codes of scalar types chosen on a device for rows whose errors are weighed together: the steps of
`quantize.covariance.descent.scalar_descent` with a `Coupling`, an antidiagonal of rows and columns at a time.

Row i takes its column j in step j + (rows - 1 - i), one column behind the row after it. So feedback over both axes, which
reaches a weight from the rows after it and the columns before it only, has the CPU's terms: all of these were rounded in
earlier steps. In descent the weights of a step do reach each other, by A_ik H_jl. If all moves of a step together would not
lower the error, the best of them alone is made, which does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..covariance.coupling import Coupling
from ..covariance.descent.scalar_descent import MAX_SWEEPS
from .device_scalar_refinement import DeviceScalarRefinement, Levels
from .memory import one_at_a_time, wide


class DeviceCoupledRefinement(DeviceScalarRefinement):
    """Refinement of types with a code for each weight, with the curvature of the rows' outputs."""

    def errors(self) -> np.ndarray:
        with one_at_a_time:
            gradient = self.sent(self.gradient.reshape(len(self.x), -1))[:, : self.x.shape[1]]
            mixed = self.sent(self.along.shares) @ gradient
            total = (mixed.to(wide(mixed.device)) * self.sent(self.x - self.values)).sum()
        return np.full(len(self.x), float(total))

    def _round_in_order(self, triangle: Tensor) -> None:
        state, x = self._staggered(self.ahead), self.sent(self.x)
        sums = torch.zeros(len(x), self.damped.size, device=self.device)
        for at in _steps(x):
            wanted = x[at.rows, at.columns]
            codes, values = state.nearest(wanted + state.mixed(sums, at), at)
            state.put(at, codes, values)
            sums[at.block].addcmul_((wanted - values)[:, None], triangle[at.columns])
        self._take(state.values, state.codes)

    def choose_codes(self) -> None:
        with one_at_a_time:
            state, h = self._staggered(self.along), self.matrix(self.damped)
            gradient = self.sent(self.gradient.reshape(len(self.x), -1))
            for _ in range(MAX_SWEEPS if self.effort > 0 else 2):
                if self._descend(state, gradient, h) <= self._least_changes() * len(self.x):
                    break
            self.gradient[:] = gradient.cpu().numpy().reshape(-1)
            self._take(state.values, state.codes)

    def _descend(self, state: _State, gradient: Tensor, h: Tensor) -> int:
        """One sweep of descent: how many codes changed. gradient: (x - values) H, updated."""
        squares, weights = h.diagonal(), state.shares.diagonal()
        changed = torch.zeros((), dtype=torch.int64, device=gradient.device)
        for at in _steps(state.values):
            cells = at.rows, at.columns
            value, mixed, own = state.values[cells], state.mixed(gradient, at), weights[at.block] * squares[at.columns]
            codes, new = state.nearest(value + mixed / own, at)
            step = torch.where(own > 0, value - new, 0)
            among = state.shares[at.block, at.block] * h[at.columns[:, None], at.columns]
            together = (step * (2 * mixed + among @ step)).sum()
            best = torch.arange(len(step), device=step.device) == (step * (2 * mixed + own * step)).argmin()
            moves = (step != 0) & ((together < 0) | best)
            state.put(at, torch.where(moves, codes, state.codes[cells]), torch.where(moves, new, value))
            gradient[at.block].addcmul_(torch.where(moves, step, 0)[:, None], h[at.columns])
            changed += moves.sum()
        return int(changed)

    def _staggered(self, coupling: Coupling) -> _State:
        factor, offset, flag = map(self.sent, self.rows.parameters())
        return _State(
            self.sent(self.values), self.sent(self.rows.codes), self.sent(coupling.shares), factor, offset, flag.long(),
            self.rows.table.group, self._levels,
        )  # fmt: skip


@dataclass(frozen=True)
class _Step:
    """The weights of a step: rows and columns int64 [weights], one of each row of `block`."""

    block: slice
    rows: Tensor
    columns: Tensor


def _steps(x: Tensor) -> Iterator[_Step]:
    """The steps that take all weights of x [rows, n]."""
    rows, n = x.shape
    numbers = torch.arange(rows, device=x.device)
    for step in range(n + rows - 1):
        late = step - (rows - 1)  # the column of row 0
        block = slice(max(0, -late), min(rows, n - late))
        yield _Step(block, numbers[block], numbers[block] + late)


@dataclass
class _State:
    """What steps read and change: values [rows, n] and codes, how products of rows are mixed (shares), and factor, offset and
    flag of groups of columns, [rows, groups]."""

    values: Tensor
    codes: Tensor
    shares: Tensor
    factor: Tensor
    offset: Tensor
    flag: Tensor
    group: int
    levels: Levels

    def mixed(self, products: Tensor, at: _Step) -> Tensor:
        """The products of rows with a matrix, [rows, size], mixed for the weights of a step."""
        return (self.shares[:, at.block] * products[:, at.columns]).sum(0)

    def nearest(self, wanted: Tensor, at: _Step) -> tuple[Tensor, Tensor]:
        """The codes and values nearest to those wanted of the weights of a step; of groups without a scale those that are."""
        cells, groups = (at.rows, at.columns), (at.rows, at.columns // self.group)
        factor, offset, flag = self.factor[groups], self.offset[groups], self.flag[groups]
        level = self.levels.nearest((wanted - offset) / factor, flag)
        value = factor * self.levels.values[flag, level] + offset
        is_free = factor != 0
        return torch.where(is_free, self.levels.codes[level], self.codes[cells]), torch.where(
            is_free, value, self.values[cells]
        )

    def put(self, at: _Step, codes: Tensor, values: Tensor) -> None:
        self.codes[at.rows, at.columns], self.values[at.rows, at.columns] = codes, values
