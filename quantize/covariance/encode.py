"""Better codes for encoded rows: the same type, scales and size, a smaller error under the covariance of the inputs."""

from __future__ import annotations

import numpy as np

from ...formats import TensorType
from ...simd.memory import scratch
from .descent import MAX_SWEEPS, feed_back, row_errors
from .descent import descend as descend_codes
from .pairs import sweep_pairs
from .panels import multiply_rows
from .parity import descend_fours
from .prepared import DampedCovariance, PreparedCovariance
from .scales import MAX_GROUP, refit, search_scales
from .values import ScalarRows, is_scalar
from .vector_encode import refine_vectors
from .vectors import is_vector

_ROUNDS = {2: 1, 3: 3}  # of searching scales
_PAIR_SWEEPS = {2: 1, 3: 2}  # after each
_LEAST_CHANGES = 1 / 256  # of a row's codes: a sweep that changes fewer is the last


def takes_covariance(tensor_type: TensorType) -> bool:
    """Whether rows of this type (interleaved ones too) get other codes with a covariance than without."""
    name = tensor_type.name if tensor_type.codec is not None else tensor_type.base_name
    return is_scalar(name) or is_vector(name)


def refine(x: np.ndarray, q: np.ndarray, type_name: str, prepared: PreparedCovariance, effort: int) -> np.ndarray:
    """Rows that a plain type's encoder made -> rows of no larger error r H r^T, r = x - decoded, H being damped.

    x float32 [rows, n], q uint8 [rows, row_bytes] -> uint8 [rows, row_bytes]. Rows that cannot be made better come back as they
    are, as do all rows of types that are neither scalar nor of vectors.
    """
    if prepared.damped is None:
        return q
    if is_vector(type_name):
        return refine_vectors(x, q, type_name, prepared.damped, effort)
    if not is_scalar(type_name):
        return q
    return _refine_scalar(x, q, type_name, prepared.damped, effort)


def _refine_scalar(x: np.ndarray, q: np.ndarray, type_name: str, damped: DampedCovariance, effort: int) -> np.ndarray:
    rows, n = x.shape
    size = damped.size
    state = ScalarRows.of(q, type_name)
    table = state.table
    arrays = (table.values, table.midpoints, table.codes, table.nearest, np.float32(table.lowest))
    parameters = (*state.parameters(), table.group, arrays)
    before = state.values()
    gradient = scratch("covariance_gradient", (rows * size,), np.float32)
    gradient[:] = 0
    errors_before, errors = np.empty(rows), np.empty(rows)
    multiply_rows(x - before, damped.panels, size, gradient)
    row_errors(x, before, gradient, size, errors_before)
    values = before.copy()
    in_fours = state.fields.layout.gray_words
    descend = descend_fours if in_fours else descend_codes
    if effort > 0 and not in_fours:
        feed_back(x, *parameters, damped.triangle, size, values, state.codes)
        multiply_rows(before - values, damped.panels, size, gradient)
    sweeps = MAX_SWEEPS if effort > 0 else 2
    least = int(n * _LEAST_CHANGES)
    descend(least, sweeps, *parameters, damped.panels, damped.diagonal, size, gradient, values, state.codes)
    for _ in range(_ROUNDS.get(effort, 0)):
        if table.group <= MAX_GROUP and not in_fours:
            search_scales(state, effort, arrays, damped, gradient, values)
        refit(state, damped, gradient, values)
        parameters = (*state.parameters(), table.group, arrays)
        descend(least, sweeps, *parameters, damped.panels, damped.diagonal, size, gradient, values, state.codes)
        for _ in range(0 if in_fours else _PAIR_SWEEPS[effort]):
            sweep_pairs(table.entries, *parameters, damped.panels, damped.diagonal, size, gradient, values, state.codes)
            descend(least, sweeps, *parameters, damped.panels, damped.diagonal, size, gradient, values, state.codes)
    row_errors(x, values, gradient, size, errors)
    out = q.copy()
    state.write(out)
    better = errors < errors_before
    out[~better] = q[~better]
    return out
