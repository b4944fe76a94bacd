"""Rows of a tensor drawn at random, and the error of a type on them: weighted by importance, by H, or by A and H.

Without a curvature file errors are relative, sum of squares by sum of squares. With one they are the KL divergence in nats that
the type is predicted to cause in the whole tensor: half of tr(A R H R^T) for each token that a matrix sees, A and H being the
second moments of gradients and inputs (`covariance.coupling`), R what the rows lose as they are encoded together.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from ...data_classes import dataclass
from ...formats import TYPES, SourceTensor, TensorType, dims
from ..encode import decode, encode
from ..importance import Importance

if TYPE_CHECKING:
    from ..covariance.coupling import RowGradients
    from ..covariance.matrix.prepared import PreparedCovariance
    from ..covariance.source import Covariances, RowCoupling

RUN_ROWS = 8  # neighbouring rows per run: as many as the widest interleaved type without a base type needs
COUPLED_ROWS = 64  # of a run whose rows are encoded together: enough for types to differ as they do in a whole block
COUPLED_RUNS = 2  # at least: of several matrices, or of several parts of one


@dataclass(frozen=True)
class SampledRows:
    """Neighbouring rows of one matrix.

    x           float32 [rows, columns]; importance: float32 [columns] or None
    gradients   at the rows' outputs; None: rows count alike. weight: nats per unit of tr(A R H R^T)
    """

    matrix: int
    x: np.ndarray
    importance: np.ndarray | None
    gradients: RowGradients | None = None
    weight: float = 1.0


@dataclass(frozen=True)
class RowSample:
    """Rows of one tensor, in runs of neighbours.

    effort       of the encoder for rows with a covariance, 0 to 3
    prepared_of  matrix -> the covariance of its inputs; None: errors are weighted by importance alone. It is asked for one
                 after the other, and none is held when the next one is
    key_of       matrix -> the same for all that have one covariance
    """

    runs: list[SampledRows]
    effort: int = 1
    prepared_of: Callable[[int], PreparedCovariance | None] = lambda matrix: None
    key_of: Callable[[int], Hashable] = lambda matrix: matrix

    def error(self, tensor_type: TensorType) -> float:
        """As `errors`, of one type."""
        return self.errors([tensor_type])[tensor_type.name]

    def errors(self, types: Sequence[TensorType], on_share: Callable[[float], None] = lambda share: None) -> dict[str, float]:
        """Type name -> the error of the rows in that type; 0 for rows of zeros. on_share: called with the share that is done.

        With the curvature of outputs it is the KL divergence in nats that is predicted for the whole tensor. Else it is the
        weighted squared error over the rows' energy: without a covariance the squares of the weights' errors r are weighted by
        importance; with one it is r H r^T, H damped, of the rows as they are encoded with it, over the sum of squares that the
        diagonal of H weights: what r H r^T is when errors of different columns are independent, so that tensors with and
        without a covariance can be compared.
        """
        plain = {t.name: TYPES.plain(t).name for t in types}  # a repacked type has the same values
        sums, energy = dict.fromkeys(plain.values(), 0.0), 0.0
        in_nats = any(run.gradients is not None for run in self.runs)
        groups = [list(group) for _, group in groupby(self.runs, lambda run: self.key_of(run.matrix))]
        for number, runs in enumerate(groups):
            prepared = self.prepared_of(runs[0].matrix)
            energy += sum(_energy(run, prepared) for run in runs)
            for done, name in enumerate(sums if energy else (), 1):
                sums[name] += self._error(name, runs, prepared)
                on_share((number + done / len(sums)) / len(groups))
            del prepared
        unit = 1.0 if in_nats else energy
        return {name: sums[base] / unit if energy else 0.0 for name, base in plain.items()}

    def _error(self, name: str, runs: Sequence[SampledRows], prepared: PreparedCovariance | None) -> float:
        """Of runs with the same covariance. Encoded as `encode` does it: without gradients rows do not depend on each other."""
        if prepared is not None and any(run.gradients is not None for run in runs):
            return sum(_divergence(name, run, prepared, self.effort) for run in runs)
        if prepared is None or prepared.damped is None:
            return sum(_error_by_importance(name, run, _importance(run, prepared)) for run in runs)
        from ..covariance.errors import product_errors
        from ..covariance.refine import refine

        x = np.concatenate([run.x for run in runs])
        q = np.concatenate([encode(run.x, name, _importance(run, prepared), report=False) for run in runs])
        decoded = decode(refine(x, q, name, prepared, self.effort), name, x.shape[1])
        return float(product_errors(x, decoded, prepared.damped).sum())


def _importance(run: SampledRows, prepared: PreparedCovariance | None) -> np.ndarray | None:
    """What `encode` takes for importance: that of the covariance stands in where there is none."""
    return prepared.importance if run.importance is None and prepared is not None else run.importance


def _energy(run: SampledRows, prepared: PreparedCovariance | None) -> float:
    """The sum of squares of the weights, weighted by importance or by the diagonal of the damped covariance."""
    squares, damped = run.x.astype(np.float64) ** 2, prepared.damped if prepared is not None else None
    return _weighted_sum(squares, _importance(run, prepared) if damped is None else damped.diagonal[: run.x.shape[1]])


def _divergence(name: str, run: SampledRows, prepared: PreparedCovariance, effort: int) -> float:
    """Nats that the errors of rows stand for, which are encoded together, or alone where too few tokens were seen."""
    from ..covariance.errors import coupled_error_of

    assert run.gradients is not None
    q = encode(run.x, name, run.importance, prepared, effort, coupled=run.gradients.coupled, report=False)
    return run.weight * coupled_error_of(run.x, decode(q, name, run.x.shape[1]), prepared, run.gradients.matrix)


def _error_by_importance(name: str, run: SampledRows, importance: np.ndarray | None) -> float:
    decoded = decode(encode(run.x, name, importance, report=False), name, run.x.shape[1])
    return _weighted_sum((decoded.astype(np.float64) - run.x) ** 2, importance)


def _weighted_sum(squares: np.ndarray, importance: np.ndarray | None) -> float:
    return float(squares.sum() if importance is None else (squares @ importance.astype(np.float64)).sum())


def sample_rows(
    tensor: SourceTensor, importance: Importance | None, rows: int, seed: int, covariances: Covariances | None = None
) -> RowSample:
    """About `rows` rows of a tensor, in runs of RUN_ROWS neighbours spread over its matrices; with the curvature of outputs in
    COUPLED_RUNS runs at least, of at most COUPLED_ROWS rows, neither reaching from one block into the next.

    Which ones depends on the seed and the tensor's name alone. Weights that are not finite are taken as 0. covariances: of the
    inputs; a matrix without one, or one of too few tokens, has its errors weighted by importance.
    """
    matrix_rows = dims(tensor.shape)[1]
    weights = importance.for_tensor(tensor) if importance is not None else None

    def read(matrix: int, first: int, count: int) -> SampledRows:
        start = matrix * matrix_rows + first
        x = np.ascontiguousarray(tensor.read(start, start + count), np.float32)
        x = np.where(np.isfinite(x), x, np.float32(0))
        return SampledRows(matrix, x, weights[matrix] if weights is not None else None)

    rng = np.random.default_rng([seed, zlib.crc32(tensor.name.encode())])
    coupling = covariances.gradients(tensor) if covariances is not None else None
    if coupling is None:
        runs = [read(*place) for place in _places(tensor, rows, rng)]
    else:
        runs = list(_coupled_runs(coupling, rows, rng, read))
    if covariances is None:
        return RowSample(runs)
    return RowSample(runs, covariances.effort, covariances.of(tensor), lambda matrix: covariances.key_of(tensor, matrix))


def _places(tensor: SourceTensor, rows: int, rng: np.random.Generator) -> Iterator[tuple[int, int, int]]:
    """(matrix, first row, rows) of runs that do not overlap, in order."""
    _, matrix_rows, matrices = dims(tensor.shape)
    run_count, run_rows = max(1, rows // RUN_ROWS), min(RUN_ROWS, matrix_rows)
    slots = max(1, matrix_rows // run_rows) * matrices
    for slot in np.sort(rng.choice(slots, min(run_count, slots), replace=False)).tolist():
        matrix, index = divmod(slot, slots // matrices)
        yield matrix, index * run_rows, run_rows


def _coupled_runs(
    coupling: RowCoupling, rows: int, rng: np.random.Generator, read: Callable[[int, int, int], SampledRows]
) -> Iterator[SampledRows]:
    """Runs of rows that are encoded together.

    What they stand for is scaled to all rows by the gradients' mean squares: those of all rows of a block, and of blocks that
    are not looked at the mean over those that are.
    """
    from ..covariance.coupling import row_gradients

    spans = [coupling.blocks.span(block) for block in range(coupling.blocks.count)]
    sizes = np.array([span.stop - span.start for span in spans])
    run_rows = min(COUPLED_ROWS, int(sizes.max()))
    per_block = np.maximum(1, sizes // run_rows)
    ends = np.cumsum(np.tile(per_block, len(coupling.tokens)))
    count = min(max(COUPLED_RUNS, rows // run_rows), int(ends[-1]))
    picked: list[tuple[int, int, RowGradients, float]] = []
    energies: dict[int, float] = {}  # number of a block that is looked at -> its gradients' mean squares times its tokens
    seen = coupling.tokens.astype(np.float64)
    for slot in np.sort(rng.choice(int(ends[-1]), count, replace=False)).tolist():
        number = int(np.searchsorted(ends, slot, "right"))
        matrix, block = divmod(number, len(spans))
        first = (slot - (int(ends[number - 1]) if number else 0)) * run_rows
        moments = coupling.gradient_of(matrix, block)
        energies[number] = float(moments.diagonal.sum(dtype=np.float64)) * seen[matrix, block]
        part = slice(first, min(first + run_rows, int(sizes[block])))
        gradients = row_gradients(moments, part)
        picked.append((matrix, spans[block].start + first, gradients, seen[matrix, block]))
    exposure = (seen * sizes).reshape(-1)
    looked_at = exposure[list(energies)].sum()
    energy = sum(energies.values()) * exposure.sum() / looked_at if looked_at else 0.0
    sampled = sum(tokens * gradients.energy for _, _, gradients, tokens in picked)
    for matrix, first, gradients, tokens in picked:
        weight = 0.5 * tokens / coupling.text_tokens * energy / sampled if sampled else 0.0
        yield replace(read(matrix, first, len(gradients.matrix)), gradients=gradients, weight=weight)
