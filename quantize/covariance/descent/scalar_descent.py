"""Codes of rows under a covariance: error feedback from column to column, and coordinate descent.

With r = w - q the error of a row is r H r^T and its gradient g = r H. When all other codes stay, the error is least for the
value of column j that is nearest to q_j + g_j / H_jj: that is the step of coordinate descent. It never raises the error.

Feedback (GPTQ, arXiv 2210.17323; as LDLQ in QuIP, 2307.13304) rounds the columns in order. With H = U D U^T, U upper triangular
with ones on its diagonal, the error is the sum over j of D_jj (r_j + sum over i < j of r_i U_ij)^2. If all later weights could
still move freely, the best value of column j would be the one nearest to w_j + sum over i < j of r_i U_ij.

All kernels work on blocks of 64 columns, one row after the other inside a block; what a block changes is then added to the
other columns of all rows at once (`panels.add_products`). Every sum has one order, whatever the rows that are encoded together.
"""

from __future__ import annotations

import numpy as np

from ....jobs.steps import begin_step
from ....simd.compile import kernel
from ....simd.cuda.work_items import WorkItems
from ....simd.lanes import fma_lanes, load, splat, store
from ..coupling import Coupling, mix, share_steps, take_row
from ..matrix.panels import add_products

MAX_SWEEPS = 12


@kernel
def nearest_entry(x, flag, midpoints, nearest, lowest):
    """The number of the entry of a `ValueTable` that is nearest to x, in units of the group's factor."""
    last = midpoints.shape[1] - 1
    cell = (x - lowest) * np.float32(2)
    limit = np.float32(nearest.shape[1] - 1)
    if not cell > 0:  # NaN too
        cell = np.float32(0)
    if cell > limit:
        cell = limit
    entry = np.int64(nearest[flag, np.int64(cell)])
    if x > midpoints[flag, entry] and entry < last:
        entry += 1
    elif entry > 0 and x < midpoints[flag, entry - 1]:
        entry -= 1
    return entry


@kernel
def _add_within(buffer, factor, panels, tile, after):
    """buffer[64] += factor * a row of a 64 x 64 tile, from the sixteen columns on that hold `after`."""
    lanes = splat(factor)
    for at in range(after // 16 * 16, 64, 16):
        store(buffer, at, fma_lanes(lanes, load(panels, tile + at), load(buffer, at)))


# Work items are rows, of which a GPU takes 64 columns at a time.
_FEEDBACK_ITEMS = WorkItems(("x", "factor", "offset", "flag"), ("values", "codes", "sums"), whole=("triangle",))
_SWEEP_ITEMS = WorkItems(
    ("factor", "offset", "flag", "active"), ("changed", "gradient", "values", "codes"), whole=("panels", "diagonal")
)


@kernel(items=_FEEDBACK_ITEMS)
def feed_back(coupling, x, factor, offset, flag, group, table, triangle, size, sums, values, codes):
    """Rounds rows column by column with error feedback; fills values (float32 [rows, n]) and codes.

    coupling  `coupling.Coupling` of the rows
    x         float32 [rows, n]
    sums      float32 [rows * size], flat: of what columns before these leave to make up for, so 0; updated
    table     the arrays of a `ValueTable`: values, midpoints, codes, nearest, lowest
    triangle  float32, flat: U in panels of `size` rows
    """
    entries, midpoints, entry_codes, nearest, lowest = table
    rows, n = x.shape
    columns, residuals, counts = np.empty(rows * 64, np.int32), np.empty(rows * 64, np.float32), np.empty(rows, np.int32)
    buffer, mixed = np.empty(64, np.float32), np.empty(rows * 64, np.float32)
    for first in range(0, n, 64):
        diagonal = (first // 64 * size + first) * 64
        mix(coupling, sums, size, first, rows, mixed)
        for row in range(rows - 1, -1, -1):
            take_row(coupling, mixed, row, buffer)
            count = 0
            for i in range(min(64, n - first)):
                j = first + i
                g = j // group
                a = factor[row, g]
                if a != 0:
                    t = flag[row, g]
                    entry = nearest_entry((x[row, j] + buffer[i] - offset[row, g]) / a, t, midpoints, nearest, lowest)
                    codes[row, j] = entry_codes[entry]
                    values[row, j] = a * entries[t, entry] + offset[row, g]
                residual = x[row, j] - values[row, j]
                if residual != 0:
                    columns[row * 64 + count] = i
                    residuals[row * 64 + count] = residual
                    count += 1
                    _add_within(buffer, residual, triangle, diagonal + i * 64, i + 1)
            counts[row] = count
            share_steps(coupling, columns, residuals, count, row, triangle, diagonal, mixed)
        add_products(columns, residuals, counts, triangle, size, first, first // 64 + 1, size // 64, rows, size, sums)


@kernel(items=_SWEEP_ITEMS)
def sweep(coupling, active, factor, offset, flag, group, table, panels, diagonal, size, gradient, values, codes, changed):
    """One sweep of coordinate descent over the codes of the rows that are active.

    coupling  `coupling.Coupling` of the rows
    active    bool [rows]; changed: int64 [rows], how many codes of each changed
    panels    float32, flat: H in panels; diagonal: float32 [size], its diagonal
    gradient  float32 [rows * size], flat: (x - values) H, updated
    """
    entries, midpoints, entry_codes, nearest, lowest = table
    rows, n = values.shape
    columns, steps, counts = np.empty(rows * 64, np.int32), np.empty(rows * 64, np.float32), np.empty(rows, np.int32)
    buffer, mixed = np.empty(64, np.float32), np.empty(rows * 64, np.float32)
    changed[:] = 0
    for first in range(0, n, 64):
        tile = (first // 64 * size + first) * 64
        mix(coupling, gradient, size, first, rows, mixed)
        for row in range(rows - 1, -1, -1):
            counts[row] = 0
            if not active[row]:
                continue
            take_row(coupling, mixed, row, buffer)
            count = 0
            for i in range(min(64, n - first)):
                j = first + i
                g = j // group
                a, h = factor[row, g], diagonal[j]
                if a == 0 or not h > 0:
                    continue
                t, value = flag[row, g], values[row, j]
                entry = nearest_entry((value + buffer[i] / h - offset[row, g]) / a, t, midpoints, nearest, lowest)
                new = a * entries[t, entry] + offset[row, g]
                if new != value:
                    values[row, j] = new
                    codes[row, j] = entry_codes[entry]
                    columns[row * 64 + count] = i
                    steps[row * 64 + count] = value - new
                    count += 1
                    _add_within(buffer, value - new, panels, tile + i * 64, i + 1)
            counts[row] = count
            changed[row] += count
            share_steps(coupling, columns, steps, count, row, panels, tile, mixed)
        add_products(columns, steps, counts, panels, size, first, 0, size // 64, rows, size, gradient)


def descend(coupling: Coupling, least_changes: int, max_sweeps: int, *arguments) -> None:
    """Sweeps until a row's last one changed at most `least_changes` of its codes (coupled rows: on average), `max_sweeps` at
    most. arguments: those of `sweep` from `factor` to `codes`."""
    rows = len(arguments[-2])
    active, changed = np.ones(rows, np.bool_), np.empty(rows, np.int64)
    for number in range(max_sweeps):
        begin_step(f"sweep {number + 1}")
        sweep(coupling, active, *arguments, changed)
        if coupling.shares.size:
            if changed.sum() <= least_changes * rows:
                break
            continue
        active &= changed > least_changes
        if not active.any():
            break


@kernel(items=WorkItems(("x", "values", "gradient"), ("errors",)))
def add_row_errors(x, values, gradient, errors):
    """Adds (x - values) . gradient of some columns to the errors of rows, in the order of `row_errors`. float32 [rows, n]."""
    for row in range(x.shape[0]):
        total = errors[row]
        for j in range(x.shape[1]):
            total += np.float64(x[row, j] - values[row, j]) * np.float64(gradient[row, j])
        errors[row] = total


@kernel
def row_errors(x, values, gradient, size, errors):
    """errors (float64 [rows]) = (x - values) . gradient: the rows' errors, if the gradient is that of these values."""
    for row in range(x.shape[0]):
        total = 0.0
        for j in range(x.shape[1]):
            total += np.float64(x[row, j] - values[row, j]) * np.float64(gradient[row * size + j])
        errors[row] = total
