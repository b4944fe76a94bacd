"""Targets that follow what was quantised before: how the inputs of a matrix drift, and weights that make up for it.

The layers before a matrix are quantised by the time it is encoded, so that it is given Z where the original one has X, and what
it makes of a token is added to a stream that misses M of what it has in the original. What it should compute is W X + M. Of all
weights T those that come nearest to that, the mean of |W X + M - T Z|^2 over the text, are

    T = W + (W C + E) (H + damping)^-1,    C = mean of (x - z) z^T,  E = mean of m z^T,  H = mean of z z^T,

the regression of drift and stream on the inputs, and T takes the place of W in the encoder. These moments are estimates, and a
drift that is noise cannot be undone: so the step is made shorter, T = W + step * (T - W), by what it is worth on text that it
was not computed from. The text has two halves; of each half the regression is applied to the other, and `step` is that of least
error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

import numpy as np

from ...data_classes import dataclass
from ...errors import PlanError
from ...simd.workers import ALONE, Workers
from .matrix.covariance_matrix import SecondMoments
from .matrix.panels import WIDTH, in_panels, multiply_rows, padded
from .matrix.prepared import PreparedCovariance, prepare
from .matrix.solve import solve_rows

_SAMPLED_ROWS = 256  # of a matrix, on which the step is chosen
_MISSES = "misses of "  # tensors, in files
_KEPT = 3  # triangles: the factor of H, beside what types of vectors need
# Bytes, times the square of the columns: the sums of both halves; one half's H and factor, or a matrix in panels, beside them;
# and what is kept while rows are encoded, H, its triangles and C.
SUMS, FINDING, FOLLOWING = 4 * 4, 4 + 2, 4 + 2 * _KEPT + 4
MISSED = 2 * 4  # the same times rows and columns of a matrix: what both halves say that its results are added to misses


@dataclass(frozen=True, eq=False)
class DriftSums(SecondMoments):
    """Sums over the tokens of a text, or of one half of it; as second moments, the mean of z z^T.

    squares  float32 [n, n]: z z^T, symmetric; drifts: float32 [n, n]: (x - z) z^T; tokens: how many
    misses   name of a tensor -> float32 [rows, n]: m z^T, m being what the values that its results are added to miss
    """

    squares: np.ndarray = field(repr=False)
    drifts: np.ndarray = field(repr=False)
    tokens: int
    misses: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False)

    @property
    def diagonal(self) -> np.ndarray:
        return np.diagonal(self.squares) / np.float32(max(1, self.tokens))

    def check(self) -> None:
        if not np.isfinite(self.squares.max(initial=0.0)) or not np.isfinite(self.squares.min(initial=0.0)):
            raise PlanError("the inputs of a matrix are not finite where it follows others")

    def write_panels(self, panels: np.ndarray, workers: Workers) -> None:
        n = self.columns
        for panel, first in zip(panels, range(0, n, WIDTH), strict=True):
            width = min(WIDTH, n - first)
            np.divide(self.squares[:, first : first + width], np.float32(max(1, self.tokens)), out=panel[:n, :width])
            panel[n:], panel[:, width:] = 0, 0


@dataclass(frozen=True, eq=False)
class Drift:
    """What a text tells of the inputs of a matrix, or of several that share them.

    sums       over all of it
    steps      name of a tensor -> 0 to 1, of those alone that are to be changed
    is_enough  whether either half has tokens enough for more than the diagonal
    """

    sums: DriftSums
    steps: Mapping[str, float]
    is_enough: bool

    def save(self, path: Path) -> None:
        """Writes it to a file, for `load`; the moments only if they are used."""
        sums, names, steps = self.sums, list(self.steps), list(self.steps.values())
        squares, drifts = (sums.squares, sums.drifts) if self.is_enough else (np.empty((0, 0), np.float32),) * 2
        arrays: dict[str, Any] = {f"{_MISSES}{name}": x for name, x in sums.misses.items() if name in self.steps}
        np.savez(path, squares=squares, drifts=drifts, tokens=sums.tokens, names=np.array(names, str), steps=steps, **arrays)

    @classmethod
    def load(cls, path: Path) -> Drift:
        with np.load(path, allow_pickle=False) as stored:
            steps = dict(zip(stored["names"].tolist(), stored["steps"].tolist(), strict=True))
            misses = {key.removeprefix(_MISSES): stored[key] for key in stored.files if key.startswith(_MISSES)}
            sums = DriftSums(stored["squares"], stored["drifts"], int(stored["tokens"]), misses)
            return cls(sums, steps, bool(sums.columns))


def drift_of(halves: tuple[DriftSums, DriftSums], samples: Mapping[str, np.ndarray], workers: Workers = ALONE) -> Drift:
    """The drift of the inputs of some tensors. The sums become those of the text: their memory is taken over.

    samples: name -> float32 [rows, n] of its weights, of which the step is chosen on some. Takes n^3 / 3 multiplications, and
    FINDING bytes times n^2 beside the sums.
    """
    first, second = halves
    is_enough = all(half.has_enough_tokens and bool(half.diagonal.any()) for half in halves)
    steps = {}
    if is_enough:
        finite = {name: np.flatnonzero(np.isfinite(rows).all(axis=1)) for name, rows in samples.items()}
        chosen = {name: rows[:: -(-len(rows) // _SAMPLED_ROWS)] for name, rows in finite.items() if len(rows)}
        found = steps_of(halves, _wanted(first, samples, chosen), _wanted(second, samples, chosen), workers)
        steps = {name: step for name, step in zip(chosen, found, strict=True) if step > 0}
    for ours, theirs in ((first.squares, second.squares), (first.drifts, second.drifts)):
        ours += theirs
    for name, missed in first.misses.items():
        missed += second.misses[name]
    return Drift(DriftSums(first.squares, first.drifts, first.tokens + second.tokens, first.misses), steps, is_enough)


def steps_of(
    halves: tuple[DriftSums, DriftSums], first: list[np.ndarray], second: list[np.ndarray], workers: Workers = ALONE
) -> list[float]:
    """For each sample of rows the share, 0 to 1, of the regression of one half that is best on the other. first, second: what
    either half wants of the samples, float32 [rows, n]."""
    gained, spent, wanted = np.zeros(len(first)), np.zeros(len(first)), (first, second)
    for fitted in (0, 1):
        prepared = prepare(halves[fitted], workers)
        changes = [_solved(one, prepared) / np.float32(halves[fitted].tokens) for one in wanted[fitted]]
        del prepared
        made = _products(changes, halves[1 - fitted].squares)
        gained += [_dot(change, one) for change, one in zip(changes, wanted[1 - fitted], strict=True)]
        spent += [_dot(change, one) for change, one in zip(changes, made, strict=True)]
    return [min(1.0, max(0.0, g / s)) if s > 0 else 0.0 for g, s in zip(gained.tolist(), spent.tolist(), strict=True)]


class Following:
    """The weights to encode in place of those of some tensors, and the covariance of what they are given.

    tokens: of the text; prepared: H, None if these are too few for more than its diagonal. Takes FOLLOWING bytes times the
    square of the columns; the drift, of which it is made, is not kept.
    """

    def __init__(self, drift: Drift, workers: Workers = ALONE):
        self.tokens, self._steps, self.prepared = drift.sums.tokens, drift.steps, None
        if drift.is_enough:
            self.prepared = prepare(drift.sums, workers, _KEPT)
            self._panels, self._misses = in_panels(drift.sums.drifts).reshape(-1), drift.sums.misses

    def target(self, name: str, x: np.ndarray, first: int = 0) -> np.ndarray:
        """What becomes of the rows x of a tensor, float32 [rows, n], from row `first` of their matrix on. A row with a weight
        that is not finite stays."""
        step = self._steps.get(name)
        if step is None or self.prepared is None:
            return x
        finite = np.asarray(np.isfinite(x).all(axis=1))
        wanted = _product(np.where(finite[:, None], x, np.float32(0)), self._panels)
        if name in self._misses:
            wanted += self._misses[name][first : first + len(x)] * finite[:, None]
        return np.ascontiguousarray(x + np.float32(step / self.tokens) * _solved(wanted, self.prepared))


def _wanted(sums: DriftSums, tensors: Mapping[str, np.ndarray], rows: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """What the results of some rows of tensors are to be changed by, times z^T: the drift that they have, and what the values
    that they are added to miss."""
    made = _products([tensors[name][some] for name, some in rows.items()], sums.drifts)
    return [one + sums.misses[name][rows[name]] if name in sums.misses else one for name, one in zip(rows, made, strict=True)]


def _products(rows: list[np.ndarray], matrix: np.ndarray) -> list[np.ndarray]:
    panels = in_panels(matrix).reshape(-1)
    return [_product(x, panels) for x in rows]


def _product(x: np.ndarray, panels: np.ndarray) -> np.ndarray:
    """float32 [rows, n] times a matrix in panels."""
    rows, n = x.shape
    out = np.zeros(rows * padded(n), np.float32)
    multiply_rows(np.ascontiguousarray(x), panels, padded(n), out)
    return out.reshape(rows, -1)[:, :n]


def _solved(rows: np.ndarray, prepared: PreparedCovariance) -> np.ndarray:
    """rows (H + damping)^-1: float32 [rows, n]."""
    assert prepared.damped is not None
    count, n = rows.shape
    full = np.zeros((count, prepared.damped.size), np.float32)
    full[:, :n] = rows
    solve_rows(full.reshape(-1), prepared.damped)
    return full[:, :n]


def _dot(a: np.ndarray, b: np.ndarray) -> float:
    return float((a.astype(np.float64) * b).sum())
