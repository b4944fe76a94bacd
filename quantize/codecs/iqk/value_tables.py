"""Value tables of the IQK types, and what is derived from them for searching.

A type of this family stores codes of a non-uniform table; a flag per block picks the table or a copy shifted by a constant.
Numbers from the ik_llama.cpp fork (spec part B).
"""

from __future__ import annotations

import numpy as np


def _with_shifted(values: list[int], shift: int) -> np.ndarray:
    base = np.array(values, np.float32)
    return np.stack([base, base + np.float32(shift)])


# float32 [2, entries]: row 0 the table, row 1 its shifted copy
V2 = _with_shifted([-31, -13, 1, 17], 5)
V3 = _with_shifted([-63, -40, -23, -10, 1, 13, 28, 47], 4)
V4 = _with_shifted([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], 4)
V5 = _with_shifted(
    [-126, -114, -103, -92, -83, -74, -65, -57, -50, -43, -36, -30, -24, -18, -12, -6,
     -1, 5, 11, 17, 23, 29, 36, 43, 51, 59, 68, 77, 87, 97, 109, 121],
    2,
)  # fmt: skip
V6 = _with_shifted(
    [-127, -121, -115, -109, -104, -98, -93, -88, -84, -79, -74, -70, -66, -62, -58, -54,
     -51, -47, -44, -40, -37, -34, -31, -28, -25, -22, -19, -16, -13, -11, -8, -5,
     -2, 0, 3, 6, 9, 12, 14, 17, 20, 23, 27, 30, 33, 36, 40, 44,
     47, 51, 55, 59, 63, 68, 72, 77, 82, 87, 92, 98, 103, 109, 115, 121],
    1,
)  # fmt: skip


def _smooth_v6() -> np.ndarray:
    """What iq6_k decodes with in place of V6: a cubic of the code, in fused multiply-adds, of which V6 is the rounding."""
    a, b, c, d = (float(np.float32(k)) for k in (-127.0, 6.2568, 0.11218, 0.0011972))
    q = np.arange(64, dtype=np.float64)
    # A product of two float32 is exact in float64, so each step is rounded like a fused one.
    value = np.float32(q * d - c)
    value = np.float32(q * value.astype(np.float64) + b)
    value = np.float32(q * value.astype(np.float64) + a)
    return np.stack([value, value + np.float32(1)])


V6_DECODED = _smooth_v6()


def midpoints(table: np.ndarray) -> np.ndarray:
    """float32 [2, entries] -> float32 [2, entries - 1]: the nearest entry of y is the number of midpoints that are <= y."""
    return (table[:, 1:] + table[:, :-1]) / np.float32(2)


# A search scales a block so that its weights come to lie between -CENTRE and CENTRE.
CENTRE = 128
CHOICE = 16  # numbers in a row of `choices`; the second half is for the factor of opposite sign


def choices(table: np.ndarray, widest: float) -> np.ndarray:
    """Which entries a search has to choose between, float32 [2, 2 * CENTRE * CHOICE].

    A search scales a block by factors that differ by at most `widest` (relative) from a middle one. So the few entries that a
    weight may get are known from where the middle factor puts it. Row CENTRE + round(y) of table 0 or 1 holds, for a weight
    that the middle factor puts at y: a midpoint, the entries below and above it, the next midpoint, the entry above that; then
    from CHOICE / 2 on the same for -y, the midpoints negated. The second midpoint is infinite where two entries are enough.
    Raises ValueError if some weight could reach four entries.
    """
    mids = midpoints(table)
    y = np.arange(-CENTRE, CENTRE, dtype=np.float64)
    inside = np.abs(y) <= CENTRE - 1
    reach = np.abs(y) * widest + 0.51  # y was rounded
    out = np.zeros((2, y.size, CHOICE), np.float32)
    for flag in range(2):
        for column, sign in ((0, 1), (CHOICE // 2, -1)):
            first = np.searchsorted(mids[flag], sign * y - reach)
            beyond = np.searchsorted(mids[flag], sign * y + reach, side="right")
            if np.any(inside & (beyond - first > 2)):
                raise ValueError("a weight can reach four entries of the table")
            first = np.minimum(first, mids.shape[1] - 1)
            second = np.where(beyond - first > 1, np.append(mids[flag], np.inf)[first + 1], np.inf)
            third = table[flag][np.minimum(first + 2, table.shape[1] - 1)]
            out[flag, :, column : column + 5] = np.stack(
                [sign * mids[flag][first], table[flag][first], table[flag][first + 1], sign * second, third], axis=1
            )
    return out.reshape(2, -1)


def needs_three(nearby: np.ndarray) -> bool:
    """Whether the table of `choices` uses second midpoints."""
    return bool(np.isfinite(nearby.reshape(2, -1, CHOICE)[..., 3]).any())
