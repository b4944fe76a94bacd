"""Descent for codes that come in fours of even parity (iq4_kss): one code moves to another of its parity, or two move together.

A code's parity is that of its set bits. The fours of a block of 32 are 2k, 2k + 1, 16 + 2k, 17 + 2k: those that share a word.
"""

from __future__ import annotations

import numpy as np

from ....jobs.steps import begin_step
from ....simd.compile import kernel
from ....simd.cuda.work_items import WorkItems
from ....simd.lanes import fma_lanes, load, splat, store
from ..coupling import Coupling, mix, share_steps, take_row
from ..matrix.panels import add_products
from .scalar_descent import nearest_entry

MOVES = 4  # for each four codes and sweep at most
# The columns of 64, four after four.
FOURS = np.array([k for b in range(0, 64, 32) for i in range(0, 16, 2) for k in (b + i, b + i + 1, b + i + 16, b + i + 17)])


@kernel
def _odd(entry):
    """1 if a number of four bits has an odd number of ones."""
    return 0x6996 >> entry & 1


@kernel
def _other_parity(x, flag, entry, entries):
    """The number of the entry nearest to x among those whose code has not the parity of the nearest one, `entry`."""
    odd = _odd(entry)
    below, above = entry - 1, entry + 1
    while below >= 0 and _odd(below) == odd:
        below -= 1
    while above < 16 and _odd(above) == odd:
        above += 1
    if below < 0:
        return above
    if above > 15:
        return below
    return below if x - entries[flag, below] <= entries[flag, above] - x else above


@kernel
def _move(buffer, step, panels, row):
    """buffer[64] += step times 64 numbers of a panel."""
    lanes = splat(step)
    for at in range(0, 64, 16):
        store(buffer, at, fma_lanes(lanes, load(panels, row + at), load(buffer, at)))


_ITEMS = WorkItems(
    ("factor", "offset", "flag", "active"), ("changed", "gradient", "values", "codes"), whole=("panels", "diagonal")
)


@kernel(items=_ITEMS)
def sweep_fours(
    coupling, order, active, factor, offset, flag, group, table, panels, diagonal, size, gradient, values, codes, changed,
    feedback,
):  # fmt: skip
    """One sweep over the fours of the rows that are active; arguments as of `descent.sweep`, order: `FOURS`.

    feedback  whether panels and diagonal are those of a `prepared.FeedbackMatrix` of that order, and gradient is its product
    """
    entries, midpoints, entry_codes, nearest, lowest = table
    rows, n = values.shape
    columns, steps, counts = np.empty(rows * 64, np.int32), np.empty(rows * 64, np.float32), np.empty(rows, np.int32)
    buffer, before, mixed = np.empty(64, np.float32), np.empty(64, np.float32), np.empty(rows * 64, np.float32)
    choices, pushes, changes = np.empty((2, 4), np.int64), np.empty((2, 4)), np.empty((2, 4))  # of this parity, of the other
    changed[:] = 0
    for first in range(0, n, 64):
        tile = (first // 64 * size + first) * 64
        width = min(64, n - first)
        mix(coupling, gradient, size, first, rows, mixed)
        for row in range(rows - 1, -1, -1):
            counts[row] = 0
            if not active[row]:
                continue
            take_row(coupling, mixed, row, buffer)
            for i in range(width):
                before[i] = values[row, first + i]
            for four in range(0, width, 4):
                g = (first + order[four]) // group
                a, b, t = factor[row, g], offset[row, g], flag[row, g]
                if a == 0:
                    continue
                for _ in range(MOVES):
                    for p in range(4):
                        i = order[four + p]
                        h, value = diagonal[first + i], values[row, first + i]
                        x = (value + buffer[i] / h - b) / a
                        entry = nearest_entry(x, t, midpoints, nearest, lowest)
                        other = _other_parity(x, t, entry, entries)
                        if _odd(entry) != _odd(codes[row, first + i]):
                            entry, other = other, entry
                        choices[0, p], choices[1, p] = entry, other
                        for k in range(2):
                            step = np.float64(value - (a * entries[t, choices[k, p]] + b))
                            pushes[k, p] = step
                            changes[k, p] = step * (2 * np.float64(buffer[i]) + step * h)
                    least, one, two = 0.0, -1, -1
                    for p in range(4):
                        if changes[0, p] < least:
                            least, one, two = changes[0, p], p, -1
                        for m in range(p):
                            cross = pushes[1, p] * pushes[1, m] * panels[tile + order[four + p] * 64 + order[four + m]]
                            change = changes[1, p] + changes[1, m] + 2 * cross
                            if change < least:
                                least, one, two = change, p, m
                    if one < 0:
                        break
                    pair = 0 if two < 0 else 1
                    for p in (one, two):
                        if p >= 0:
                            i, entry = order[four + p], choices[pair, p]
                            new = a * entries[t, entry] + b
                            _move(buffer, values[row, first + i] - new, panels, tile + i * 64)
                            values[row, first + i], codes[row, first + i] = new, entry_codes[entry]
            count = 0
            for i in range(width):
                if values[row, first + i] != before[i]:
                    columns[row * 64 + count] = i
                    steps[row * 64 + count] = before[i] - values[row, first + i]
                    count += 1
            counts[row] = count
            changed[row] += count
            share_steps(coupling, columns, steps, count, row, panels, tile, mixed)
        before_panel = first // 64 if feedback else 0
        add_products(columns, steps, counts, panels, size, first, before_panel, size // 64, rows, size, gradient)


def descend_fours(coupling: Coupling, least_changes: int, max_sweeps: int, *arguments) -> None:
    """As `descent.descend`, with half as many sweeps: one costs several times as much."""
    values = arguments[-2]
    active, changed = np.ones(len(values), np.bool_), np.empty(len(values), np.int64)
    for number in range(-(-max_sweeps // 2)):
        begin_step(f"sweep {number + 1}")
        sweep_fours(coupling, FOURS, active, *arguments, changed, False)
        if coupling.shares.size:
            if changed.sum() <= least_changes * len(values):
                break
            continue
        active &= changed > least_changes
        if not active.any():
            break
