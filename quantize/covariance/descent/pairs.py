"""Descent by pairs of codes: two weights of one block of 64 columns move by one entry each where that lowers the error although
neither move alone does."""

from __future__ import annotations

import numpy as np

from ....simd.compile import kernel
from ....simd.lanes import fma_lanes, load, splat, store
from ..matrix.panels import add_products

_NEVER = 1e30  # the change of the error by a move that does not exist


@kernel
def _find_moves(i, first, row, factor, offset, flag, group, entries, diagonal, values, numbers, buffer, steps, changes):
    """Steps of column first + i to the next lower and higher entry, and how much each changes the error, into [2, 64] each."""
    j = first + i
    g = j // group
    a, b, t = factor[row, g], offset[row, g], flag[row, g]
    for side in range(2):
        entry = numbers[i] + 2 * side - 1
        steps[side, i], changes[side, i] = 0, _NEVER
        if a != 0 and 0 <= entry < entries.shape[1]:
            step = values[row, j] - (a * entries[t, entry] + b)
            steps[side, i] = step
            changes[side, i] = step * (np.float32(2) * buffer[i] + step * diagonal[j])


@kernel
def sweep_pairs(entry_of, factor, offset, flag, group, table, panels, diagonal, size, gradient, values, codes):
    """One sweep over all rows: every column is tried with the best partner of its block. Arguments as of `descent.sweep`;
    entry_of: the entry of each code. Returns how many pairs moved."""
    entries, _, entry_codes, _, _ = table
    rows, n = values.shape
    columns, moved, counts = np.empty(rows * 64, np.int32), np.empty(rows * 64, np.float32), np.empty(rows, np.int32)
    buffer, before, numbers = np.zeros(64, np.float32), np.empty(64, np.float32), np.zeros(64, np.int64)
    steps, changes, both = np.zeros((2, 64), np.float32), np.empty((2, 64), np.float32), np.empty((2, 64), np.float32)
    total = 0
    for first in range(0, n, 64):
        tile = (first // 64 * size + first) * 64
        width = min(64, n - first)
        for row in range(rows):
            buffer[:] = gradient[row * size + first : row * size + first + 64]
            before[:width] = values[row, first : first + width]
            changes[:] = _NEVER
            for i in range(width):
                numbers[i] = entry_of[codes[row, first + i]]
                _find_moves(
                    i, first, row, factor, offset, flag, group, entries, diagonal, values, numbers, buffer, steps, changes
                )
            for i in range(width):
                least, mine, partner, side = np.float32(0), -1, -1, -1
                for s in range(2):
                    if changes[s, i] >= _NEVER:
                        continue
                    twice = np.float32(2) * steps[s, i]
                    for p in range(2):
                        for k in range(64):
                            both[p, k] = changes[p, k] + twice * steps[p, k] * panels[tile + i * 64 + k]
                        both[p, i] = _NEVER
                    for p in range(2):
                        for k in range(64):
                            change = both[p, k] + changes[s, i]
                            if change < least:
                                least, mine, partner, side = change, s, k, p
                if partner < 0 or not least < np.float32(-1e-6) * (changes[mine, i] + abs(changes[side, partner])):
                    continue
                total += 1
                for k, s in ((i, mine), (partner, side)):
                    numbers[k] += 2 * s - 1
                    j = first + k
                    g = j // group
                    new = factor[row, g] * entries[flag[row, g], numbers[k]] + offset[row, g]
                    step = splat(values[row, j] - new)
                    values[row, j], codes[row, j] = new, entry_codes[numbers[k]]
                    for at in range(0, 64, 16):
                        store(buffer, at, fma_lanes(step, load(panels, tile + k * 64 + at), load(buffer, at)))
                for k in range(width):
                    _find_moves(
                        k, first, row, factor, offset, flag, group, entries, diagonal, values, numbers, buffer, steps, changes
                    )
            count = 0
            for i in range(width):
                if values[row, first + i] != before[i]:
                    columns[row * 64 + count] = i
                    moved[row * 64 + count] = before[i] - values[row, first + i]
                    count += 1
            counts[row] = count
        add_products(columns, moved, counts, panels, size, first, 0, size // 64, rows, size, gradient)
    return total
