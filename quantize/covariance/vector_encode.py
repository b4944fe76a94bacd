"""Better entries for encoded rows of codebook and trellis types: the same size, a smaller error under the covariance."""

from __future__ import annotations

import numpy as np

from ...simd.lanes import LANES
from ...simd.memory import scratch
from .descent import row_errors
from .panels import multiply_rows
from .prepared import DampedCovariance
from .scales import refit
from .vector_descent import SWEEPS, invert_diagonal_blocks
from .vectors import VectorRows, trellis_search

_SWEEPS = (1, 4, 8, 8)  # by effort
_ROUNDS = (0, 0, 1, 3)  # of fitting d and sweeping again, by effort
_LEAST_CHANGES = 1 / 64  # of a row's vectors: a sweep that changes fewer is the last


def refine_vectors(x: np.ndarray, q: np.ndarray, type_name: str, damped: DampedCovariance, effort: int) -> np.ndarray:
    """As `encode.refine`, for a type for which `vectors.is_vector` holds."""
    rows, n = x.shape
    state = VectorRows.of(q, type_name)
    table, values = state.table, state.values()
    gradient = scratch("covariance_gradient", (rows * damped.size,), np.float32)
    gradient[:] = 0
    errors_before, errors = np.empty(rows), np.empty(rows)
    multiply_rows(x - values, damped.panels, damped.size, gradient)
    row_errors(x, values, gradient, damped.size, errors_before)
    inverses = np.empty((n // table.size, table.size**2), np.float32)
    invert_diagonal_blocks(damped.panels, damped.size, table.size, inverses)
    runs = table.entries * (table.books if table.flagged else 1) // LANES
    changed = np.empty(rows, np.int64)
    for round in range(1 + _ROUNDS[effort]):
        if round:
            refit(state, damped, gradient, values)
        factor, active = state.parameters()[0], np.isfinite(errors_before)
        for _ in range(_SWEEPS[effort]):
            SWEEPS[table.size](
                active, factor, table.signs, table.lanes, runs, trellis_search(type_name), damped.panels, inverses, damped.size,
                gradient, values, state.entries, state.weight_signs, changed,
            )  # fmt: skip
            active &= changed > _LEAST_CHANGES * n / table.size
            if not active.any():
                break
    row_errors(x, values, gradient, damped.size, errors)
    out = q.copy()
    state.write(out)
    better = errors < errors_before
    out[~better] = q[~better]
    return out
