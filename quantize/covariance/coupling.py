"""How the errors of a matrix's rows are weighed together: the curvature A of its outputs beside the covariance H of its inputs.

With R the error of all rows, the loss grows by tr(A R H R^T), A = E[g g^T] being the second moments of the gradients g at the
outputs and H those of the inputs (K-FAC, arXiv 1503.05671; for quantisation YAQA, arXiv 2505.22988). A row alone, the others
being as they are, has the error of `descent` with the gradient

    (sum over k of A_ik R_k) H / A_ii,

and error feedback from row to row has the factor L of A = L D L^T, L lower triangular with ones on its diagonal: row i, the
rows after it being rounded already, is rounded with the sums of (R_i + sum over k > i of L_ki R_k) U. Feedback over both axes
is one sum over all rows k >= i and columns l <= j of L_ki U_lj R_kl, so that any order serves in which these come first.

Kernels keep products of single rows (R_k H, R_k U) and mix them, block after block of 64 columns: `mix` before its rows are
changed, `share_steps` when one row was.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...data_classes import dataclass
from ...simd.compile import kernel
from ...simd.lanes import fma_lanes, load, splat, store
from .matrix.covariance_matrix import Covariance
from .matrix.factor import factor
from .matrix.panels import from_panels, padded

_DAMPING = 0.05  # of the mean of the diagonal, at least: measured on models of 8 M weights, where 0.01 to 0.2 do the same


class Coupling(NamedTuple):
    """What kernels mix the products of rows by: row i gets the sum over k of shares[k, i] times that of row k, times
    inverses[i].

    shares      float32 [rows, rows]: A, or L; of no rows: every row stands alone
    inverses    float32 [rows]: 1 / A_ii, or ones
    triangular  whether shares[k, i] is 0 for i > k
    """

    shares: np.ndarray
    inverses: np.ndarray
    triangular: bool


ALONE = Coupling(np.empty((0, 0), np.float32), np.empty(0, np.float32), False)


@dataclass(frozen=True, eq=False)
class CoupledRows:
    """The damped curvature A = L D L^T of the outputs of some rows.

    descent: A itself; feedback: L; pivots: float32 [rows], the diagonal of D
    """

    descent: Coupling
    feedback: Coupling
    pivots: np.ndarray

    @classmethod
    def of(cls, matrix: np.ndarray, lower: np.ndarray, pivots: np.ndarray) -> CoupledRows:
        """From A and L, float32 [rows, rows], and D."""
        ones = np.ones(len(matrix), np.float32)
        return cls(Coupling(matrix, ones / np.diagonal(matrix), False), Coupling(lower, ones, True), pivots)


def couple(gradients: Covariance) -> CoupledRows | None:
    """What the second moments of the gradients at the outputs of some rows couple; None where too few tokens were seen.

    Takes rows^3 / 6 multiplications on one thread. Raises PlanError as `Covariance.check` does.
    """
    gradients.check()
    if not gradients.has_enough_tokens or not gradients.diagonal.any():
        return None
    matrix = gradients.damped(_DAMPING)
    matrix /= np.diagonal(matrix).mean(dtype=np.float64).astype(np.float32)  # its unit is of no account
    # U D U^T of the rows in reverse order is L D L^T.
    triangle, pivots = factor(np.ascontiguousarray(matrix[::-1, ::-1]))
    n = len(matrix)
    lower = np.ascontiguousarray(from_panels(triangle, padded(n))[:n, :n][::-1, ::-1])
    return CoupledRows.of(matrix, lower, pivots[:n][::-1].copy())


@dataclass(frozen=True, eq=False)
class RowGradients:
    """Second moments A of the gradients at the outputs of some rows, in their own unit.

    matrix   float32 [rows, rows]: A, damped; its diagonal alone where too few tokens were seen for more
    energy   the sum of its diagonal as it was collected
    coupled  for encoding these rows together; None: too few tokens were seen
    """

    matrix: np.ndarray
    energy: float
    coupled: CoupledRows | None


def row_gradients(moments: Covariance, rows: slice) -> RowGradients:
    """Those of some rows of a block. Raises PlanError as `Covariance.check` does."""
    part = Covariance(np.ascontiguousarray(moments.matrix[rows, rows]), moments.tokens)
    coupled = couple(part)
    matrix = np.diag(part.diagonal) if coupled is None else part.damped(_DAMPING)
    return RowGradients(matrix, float(part.diagonal.sum(dtype=np.float64)), coupled)


@kernel
def mix(coupling, source, size, first, rows, mixed):
    """mixed (float32 [rows * 64]) = columns first ... first + 63 of source (float32 [rows * size], flat), mixed over rows, but
    for the factors `inverses`."""
    shares, triangular = coupling[0], coupling[2]
    if shares.shape[0] == 0:
        for row in range(rows):
            for at in range(0, 64, 16):  # numba would look for an overlap of slices, and copy
                store(mixed, row * 64 + at, load(source, row * size + first + at))
        return
    mixed[: rows * 64] = 0
    for k in range(rows):
        at = k * size + first
        s0, s1, s2, s3 = load(source, at), load(source, at + 16), load(source, at + 32), load(source, at + 48)
        _add_share(shares[k], k + 1 if triangular else rows, s0, s1, s2, s3, mixed)


@kernel
def _add_share(shares, rows, s0, s1, s2, s3, mixed):
    """mixed[64 * i ...] += shares[i] times 64 numbers, for the first rows."""
    for i in range(rows):
        share = splat(shares[i])
        store(mixed, i * 64, fma_lanes(share, s0, load(mixed, i * 64)))
        store(mixed, i * 64 + 16, fma_lanes(share, s1, load(mixed, i * 64 + 16)))
        store(mixed, i * 64 + 32, fma_lanes(share, s2, load(mixed, i * 64 + 32)))
        store(mixed, i * 64 + 48, fma_lanes(share, s3, load(mixed, i * 64 + 48)))


@kernel
def take_row(coupling, mixed, row, buffer):
    """buffer (float32 [64]) = a row of what `mix` made."""
    if coupling[0].shape[0] == 0:
        for at in range(0, 64, 16):
            store(buffer, at, load(mixed, row * 64 + at))
        return
    inverse = splat(coupling[1][row])
    zero = splat(np.float32(0))
    for at in range(0, 64, 16):
        store(buffer, at, fma_lanes(inverse, load(mixed, row * 64 + at), zero))


@kernel
def share_steps(coupling, columns, steps, count, row, panels, tile, mixed):
    """Adds what the steps of a row change in its block to the rows before it, which are yet to be taken.

    columns, steps  [rows * 64], of which `count` from row * 64 on are the row's: as for `add_products`
    tile            where the block's 64 x 64 numbers begin in the panel matrix
    """
    shares = coupling[0]
    if shares.shape[0] == 0 or count == 0 or row == 0:
        return
    s0 = s1 = s2 = s3 = splat(np.float32(0))
    for i in range(row * 64, row * 64 + count):
        h = tile + columns[i] * 64
        step = splat(steps[i])
        s0 = fma_lanes(step, load(panels, h), s0)
        s1 = fma_lanes(step, load(panels, h + 16), s1)
        s2 = fma_lanes(step, load(panels, h + 32), s2)
        s3 = fma_lanes(step, load(panels, h + 48), s3)
    _add_share(shares[row], row, s0, s1, s2, s3, mixed)


@kernel
def coupled_error(coupling, x, values, gradient, size):
    """tr(A R H R^T) of rows with R = x - values, gradient being R H."""
    rows, n = x.shape
    mixed, total = np.empty(rows * 64, np.float32), 0.0
    for first in range(0, n, 64):
        mix(coupling, gradient, size, first, rows, mixed)
        for row in range(rows):
            for i in range(min(64, n - first)):
                total += np.float64(x[row, first + i] - values[row, first + i]) * np.float64(mixed[row * 64 + i])
    return total


@kernel
def mixed_row(coupling, gradient, size, row, out):
    """out (float32 [size]) = the gradient of one row, mixed."""
    shares, rows = coupling[0], coupling[0].shape[0]
    out[:] = 0
    for k in range(rows):
        share = splat(shares[row, k] * coupling[1][row])
        for at in range(0, size, 16):
            store(out, at, fma_lanes(share, load(gradient, k * size + at), load(out, at)))
