"""Scale codes of types whose groups cannot be searched code by code (codebooks, trellis, parity), by least squares."""

from __future__ import annotations

import numpy as np

from ...simd.compile import kernel
from ...simd.lanes import fma_lanes, load, splat, store
from .matrix.panels import WIDTH, add_products, multiply_rows
from .values import ScalarRows
from .vectors import VectorRows


@kernel
def _fit_groups(width, levels, unit, panels, size, gradient, values, scales):
    """Chooses the scale code of every group of `width` columns; see `fit_scale_codes`."""
    rows, n = values.shape
    columns, steps, counts = np.empty(rows * 64, np.int32), np.empty(rows * 64, np.float32), np.empty(rows, np.int32)
    buffer, product = np.empty(64, np.float32), np.empty(64, np.float32)
    for first in range(0, n, 64):
        tile = (first // 64 * size + first) * 64
        for row in range(rows):
            buffer[:] = gradient[row * size + first : row * size + first + 64]
            count = 0
            for start in range(0, min(64, n - first), width):
                g = (first + start) // width
                level = levels[scales[row, g]]
                if level == 0 or unit[row, g] == 0 or not abs(unit[row, g]) < 1e30:
                    continue
                product[:] = 0
                for i in range(start, start + width):
                    lanes = splat(values[row, first + i])
                    for at in range(start // 16 * 16, start + width, 16):
                        store(product, at, fma_lanes(lanes, load(panels, tile + i * 64 + at), load(product, at)))
                slope, square = 0.0, 0.0
                for i in range(start, start + width):
                    slope += np.float64(values[row, first + i]) * np.float64(buffer[i])
                    square += np.float64(values[row, first + i]) * np.float64(product[i])
                least, choice = -1e-6 * square, -1
                for code in range(len(levels)):
                    t = np.float64(levels[code]) / np.float64(level) - 1
                    change = t * (t * square - 2 * slope)
                    if levels[code] != 0 and change < least:
                        least, choice = change, code
                if choice < 0:
                    continue
                old, new = unit[row, g] * level, unit[row, g] * levels[choice]
                scales[row, g] = choice
                for i in range(start, start + width):
                    value = values[row, first + i] / old * new
                    step = values[row, first + i] - value
                    values[row, first + i] = value
                    if step != 0:
                        columns[row * 64 + count], steps[row * 64 + count] = i, step
                        count += 1
                        lanes = splat(step)
                        for at in range(0, 64, 16):
                            store(buffer, at, fma_lanes(lanes, load(panels, tile + i * 64 + at), load(buffer, at)))
            counts[row] = count
        add_products(columns, steps, counts, panels, size, first, 0, size // 64, rows, size, gradient)


def fit_scale_codes(rows: ScalarRows | VectorRows, damped, gradient: np.ndarray, values: np.ndarray) -> None:
    """Scale codes of a type without minima, each the one of least error under H with all codes of weights as they are.

    A group's values v times 1 + t change the error by t^2 v H v^T - 2 t v g^T. Updates the rows' scales, values and gradient.
    """
    levels = rows.fields.layout.levels
    if rows.scales is None or levels is None or rows.dmin is not None:
        return
    n = values.shape[1]
    numbers = rows.scales.shape[1]
    unit = rows.d * np.float32(rows.fields.layout.unit)
    if rows.signs is not None or n // numbers > WIDTH:
        return
    unit = np.ascontiguousarray(np.repeat(unit, numbers // unit.shape[1], axis=1))
    before = values.copy()
    _fit_groups(n // numbers, levels.astype(np.float32), unit, damped.panels, damped.size, gradient, values, rows.scales)
    exact = rows.values()  # rounded as decoders do
    rounding = values - exact
    values[:] = exact
    if not np.array_equal(before, exact):
        multiply_rows(rounding, damped.panels, damped.size, gradient)
