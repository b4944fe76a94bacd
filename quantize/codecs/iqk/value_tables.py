"""Value tables of the IQK types, and what is derived from them for searching.

A type of this family stores codes of a non-uniform table; a flag per block picks the table or a copy shifted by a constant.
The tables themselves stand in formats/layouts/tables.py.
"""

from __future__ import annotations

import numpy as np

from ....formats.layouts.tables import IQ4_SHIFTS, IQ4_VALUES


def value_table(values: np.ndarray, shifts: tuple[int, int]) -> np.ndarray:
    """float32 [2, entries]: the values that codes stand for where the flag is not set, and where it is."""
    return (values + np.array(shifts, np.float32)[:, None]).astype(np.float32)


V4 = value_table(IQ4_VALUES, IQ4_SHIFTS)


def midpoints(table: np.ndarray) -> np.ndarray:
    """float32 [2, entries] -> float32 [2, entries - 1]: the nearest entry of y is the number of midpoints that are <= y."""
    return (table[:, 1:] + table[:, :-1]) / np.float32(2)


# A search scales a block so that its weights lie between -MAX_SCALED and MAX_SCALED.
MAX_SCALED = 128
CANDIDATE_ROW = 16  # numbers in a row of candidate_values; the second half is for the factor of opposite sign


def candidate_values(table: np.ndarray, max_deviation: float) -> np.ndarray:
    """The table values that a search has to choose between, float32 [2, 2 * MAX_SCALED * CANDIDATE_ROW].

    A search scales a block by factors that differ by at most `max_deviation` (relative) from a middle one. So the few values
    that a weight may get follow from the weight times the middle factor, y. Row MAX_SCALED + round(y) of table 0 or 1 holds: a
    midpoint, the values below and above it, the next midpoint, the value above that; then from CANDIDATE_ROW / 2 on the same
    for -y. The second midpoint is infinite where two values are enough. Raises ValueError if a weight could reach four values.
    """
    mids = midpoints(table)
    y = np.arange(-MAX_SCALED, MAX_SCALED, dtype=np.float64)
    inside = np.abs(y) <= MAX_SCALED - 1
    reach = np.abs(y) * max_deviation + 0.51  # y was rounded
    out = np.zeros((2, y.size, CANDIDATE_ROW), np.float32)
    for flag in range(2):
        for column, sign in ((0, 1), (CANDIDATE_ROW // 2, -1)):
            first = np.searchsorted(mids[flag], sign * y - reach)
            beyond = np.searchsorted(mids[flag], sign * y + reach, side="right")
            if np.any(inside & (beyond - first > 2)):
                raise ValueError("a weight can reach four entries of the table")
            first = np.minimum(first, mids.shape[1] - 1)
            second = np.where(beyond - first > 1, np.append(mids[flag], np.inf)[first + 1], np.inf)
            third = table[flag][np.minimum(first + 2, table.shape[1] - 1)]
            out[flag, :, column : column + 5] = np.stack(
                [mids[flag][first], table[flag][first], table[flag][first + 1], second, third], axis=1
            )
    return out.reshape(2, -1)


def needs_three_candidates(candidates: np.ndarray) -> bool:
    """Whether a table from candidate_values uses second midpoints."""
    return bool(np.isfinite(candidates.reshape(2, -1, CANDIDATE_ROW)[..., 3]).any())
