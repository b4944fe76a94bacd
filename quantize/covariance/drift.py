"""Targets that follow what was quantised before: how the inputs of a matrix drift, and weights that make up for it.

The layers before a matrix are quantised by the time it is encoded, so that it is given Z where the original one has X. What it
should compute is W X. Of all weights T those that come nearest to that, the mean of |W X - T Z|^2 over the text, are

    T = W + W C (H + damping)^-1,    C = mean of (x - z) z^T,  H = mean of z z^T,

the regression of the drift on the inputs, and T takes the place of W in the encoder. Both moments are estimates, and a drift
that is noise cannot be undone: so the step is made shorter, T = W + step * (T - W), by what it is worth on text that it was not
computed from. The text has two halves; of each half the regression is applied to the other, and `step` is that of least error.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .matrix.covariance_matrix import Covariance, enough_tokens
from .matrix.panels import in_panels, multiply_rows, padded

_SAMPLED_ROWS = 256  # of a matrix, on which the step is chosen


@dataclass(frozen=True)
class DriftSums:
    """Sums over the tokens of one half of a text.

    squares  float32 [n, n]: z z^T; drifts: float32 [n, n]: (x - z) z^T; tokens: how many
    """

    squares: np.ndarray = field(repr=False)
    drifts: np.ndarray = field(repr=False)
    tokens: int

    def plus(self, other: DriftSums) -> DriftSums:
        """Those of both."""
        return DriftSums(self.squares + other.squares, self.drifts + other.drifts, self.tokens + other.tokens)

    def covariance(self) -> Covariance:
        """H, undamped."""
        return Covariance(self.squares / np.float32(max(1, self.tokens)), self.tokens)


@dataclass(frozen=True)
class Correction:
    """What weights become for their inputs' drift. step: 0 to 1; panels: float32, step * C (H + damping)^-1 in panels."""

    step: float
    panels: np.ndarray = field(repr=False)

    def target(self, x: np.ndarray) -> np.ndarray:
        """The weights to encode in place of the rows x, float32 [rows, n]. A row with a weight that is not finite stays."""
        rows, n = x.shape
        size, finite = padded(n), np.asarray(np.isfinite(x).all(axis=1))
        out = np.zeros((rows, size), np.float32)
        out[:, :n] = x
        multiply_rows(np.where(finite[:, None], x, np.float32(0)), self.panels, size, out.reshape(-1))
        return np.ascontiguousarray(out[:, :n])


def correction_of(halves: tuple[DriftSums, DriftSums], rows: np.ndarray) -> Correction | None:
    """The correction of a matrix; None where the halves of the text do not agree on one, or have too few tokens.

    rows: float32 [rows, n] of its weights, a sample of which the step is chosen on. Takes 3 n^3 multiplications or so.
    """
    n = len(halves[0].squares)
    if not all(enough_tokens(half.tokens, n) and half.squares.any() for half in halves):
        return None
    rows = rows[np.asarray(np.isfinite(rows).all(axis=1))]
    step = step_of(halves, rows[:: -(-len(rows) // _SAMPLED_ROWS)].astype(np.float64)) if len(rows) else 0.0
    if step == 0:
        return None
    whole = halves[0].plus(halves[1])
    return Correction(step, in_panels((step * _regressed(whole, whole.drifts / whole.tokens)).astype(np.float32)).reshape(-1))


def step_of(halves: tuple[DriftSums, DriftSums], rows: np.ndarray) -> float:
    """The share, 0 to 1, of the regression of one half that is best on the other: rows float64 [rows, n]."""
    gained = spent = 0.0
    for fitted, judging in (halves, halves[::-1]):
        change = _regressed(fitted, rows @ (fitted.drifts / fitted.tokens))
        gained += float((change * (rows @ judging.drifts)).sum())
        spent += float((change * (change @ judging.squares)).sum())
    return min(1.0, max(0.0, gained / spent)) if spent > 0 else 0.0


def _regressed(sums: DriftSums, drifts: np.ndarray) -> np.ndarray:
    """drifts (H + damping)^-1: float64 [rows, n]."""
    damped = sums.covariance().damped().astype(np.float64)
    return np.linalg.solve(damped, drifts.T.astype(np.float64)).T
