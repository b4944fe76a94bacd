"""Quantisation error of a type on a tensor: sampled rows are encoded and decoded, errors weighted by importance or H."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from ...formats import TYPES, PlanError, SourceTensor, TensorType, dims
from ...operating_system.processors import available_cpus
from ..encode import can_encode, decode, encode_rows
from ..importance import Importance
from ..recipes.loader_types import LoaderTypes
from ..recipes.type_selection import plain_for_lookup

if TYPE_CHECKING:
    from ..covariance.prepared import PreparedCovariance
    from ..covariance.source import Covariances

RUN_ROWS = 8  # neighbouring rows per run: as many as the widest interleaved type without a base type needs

# What a search selects from by default: types with a low error for their size whose matrix products run at full speed.
DEFAULT_TYPES = (
    *("iq1_s", "iq1_m", "iq2_xxs", "iq2_ks", "iq2_k", "iq2_kl", "iq3_ks", "iq3_k", "iq4_kss", "iq4_ks", "iq4_k"),
    *("iq5_ks", "iq5_k", "iq6_k", "q8_0", "iq4_nl", "q5_0", "q6_0"),
)


@dataclass(frozen=True)
class SampledRows:
    """Neighbouring rows of one matrix: float32 [rows, columns]; importance: float32 [columns] or None."""

    matrix: int
    x: np.ndarray
    importance: np.ndarray | None


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

    def errors(self, types: Sequence[TensorType]) -> dict[str, float]:
        """Type name -> the weighted squared error of the rows in that type over their energy; 0 for rows of zeros.

        Without a covariance the squares of the weights' errors r are weighted by importance. With one it is r H r^T, H damped,
        of the rows as they are encoded with it, over the sum of squares that the diagonal of H weights: what r H r^T is when
        errors of different columns are independent, so that tensors with and without a covariance can be compared.
        """
        plain = {t.name: TYPES.plain(t).name for t in types}  # a repacked type has the same values
        sums, energy = dict.fromkeys(plain.values(), 0.0), 0.0
        for _, group in groupby(self.runs, lambda run: self.key_of(run.matrix)):
            runs = list(group)
            prepared = self.prepared_of(runs[0].matrix)
            energy += sum(_energy(run, prepared) for run in runs)
            for name in sums if energy else ():
                sums[name] += self._error(name, runs, prepared)
            del prepared
        return {name: sums[base] / energy if energy else 0.0 for name, base in plain.items()}

    def _error(self, name: str, runs: Sequence[SampledRows], prepared: PreparedCovariance | None) -> float:
        """Of runs with the same covariance. Encoded as `encode` does it: rows do not depend on each other."""
        if prepared is None or prepared.damped is None:
            return sum(_error_by_importance(name, run, _importance(run, prepared)) for run in runs)
        from ..covariance.errors import product_errors
        from ..covariance.refine import refine

        x = np.concatenate([run.x for run in runs])
        q = np.concatenate([encode_rows(run.x, name, _importance(run, prepared)) for run in runs])
        decoded = decode(refine(x, q, name, prepared, self.effort), name, x.shape[1])
        return float(product_errors(x, decoded, prepared.damped).sum())


def _importance(run: SampledRows, prepared: PreparedCovariance | None) -> np.ndarray | None:
    """What `encode` takes for importance: that of the covariance stands in where there is none."""
    return prepared.importance if run.importance is None and prepared is not None else run.importance


def _energy(run: SampledRows, prepared: PreparedCovariance | None) -> float:
    """The sum of squares of the weights, weighted by importance or by the diagonal of the damped covariance."""
    squares, damped = run.x.astype(np.float64) ** 2, prepared.damped if prepared is not None else None
    return _weighted_sum(squares, _importance(run, prepared) if damped is None else damped.diagonal[: run.x.shape[1]])


def _error_by_importance(name: str, run: SampledRows, importance: np.ndarray | None) -> float:
    decoded = decode(encode_rows(run.x, name, importance), name, run.x.shape[1])
    return _weighted_sum((decoded.astype(np.float64) - run.x) ** 2, importance)


def _weighted_sum(squares: np.ndarray, importance: np.ndarray | None) -> float:
    return float(squares.sum() if importance is None else (squares @ importance.astype(np.float64)).sum())


def sample_rows(
    tensor: SourceTensor, importance: Importance | None, rows: int, seed: int, covariances: Covariances | None = None
) -> RowSample:
    """About `rows` rows of a tensor, in runs of RUN_ROWS neighbours spread over its matrices.

    Which ones depends on the seed and the tensor's name alone. Weights that are not finite are taken as 0. covariances: of the
    inputs; a matrix without one, or one of too few tokens, has its errors weighted by importance.
    """
    _, matrix_rows, matrices = dims(tensor.shape)
    weights = importance.for_tensor(tensor) if importance is not None else None
    run_count, run_rows = max(1, rows // RUN_ROWS), min(RUN_ROWS, matrix_rows)
    rng = np.random.default_rng([seed, zlib.crc32(tensor.name.encode())])
    slots = max(1, matrix_rows // run_rows) * matrices  # runs that do not overlap
    picked = np.sort(rng.choice(slots, min(run_count, slots), replace=False))
    runs = []
    for slot in picked.tolist():
        matrix, index = divmod(slot, slots // matrices)
        start = matrix * matrix_rows + index * run_rows
        x = np.ascontiguousarray(tensor.read(start, start + run_rows), np.float32)
        x = np.where(np.isfinite(x), x, np.float32(0))
        runs.append(SampledRows(matrix, x, weights[matrix] if weights is not None else None))
    if covariances is None:
        return RowSample(runs)
    return RowSample(runs, covariances.effort, covariances.of(tensor), lambda matrix: covariances.key_of(tensor, matrix))


def usable_types(
    tensor: SourceTensor, types: Sequence[TensorType], has_importance: bool, program: str | None = None
) -> list[TensorType]:
    """The types of a set that a tensor can get, smallest first. program: that is to load the file; None: any.

    A type that does not fit the tensor's shape is replaced by its fallback; one that needs importance is left out where there
    is none. Raises PlanError when nothing is left.
    """
    usable: dict[str, TensorType] = {}
    fallbacks = LoaderTypes(program).fallbacks
    for requested in types:
        try:
            tensor_type, _ = TYPES.fallback_for(plain_for_lookup(tensor, requested), tensor.shape, fallbacks)
        except PlanError:
            continue
        if can_encode(tensor_type) and (has_importance or not TYPES.imatrix_need(tensor_type)):
            usable[tensor_type.name] = tensor_type
    if not usable:
        raise PlanError(f"none of the types allowed can hold {tensor.name}: allow q8_0 too, which needs no importance data")
    return sorted(usable.values(), key=lambda t: (t.nbytes(tensor.shape), t.name))


def relative_errors(
    tensors: Mapping[str, SourceTensor],
    options: Mapping[str, Sequence[TensorType]],
    importance: Importance | None,
    known: Mapping[str, Mapping[str, float]],
    *,
    rows: int,
    seed: int,
    covariances: Covariances | None = None,
    threads: int | None = 1,
) -> Generator[tuple[str, dict[str, float]], None, None]:
    """(tensor name, {type name: relative error}) for each tensor in `options` and its types, in this order.

    known: errors from an earlier run, which are not computed again. rows, seed, covariances: as in `sample_rows`. threads: that
    many tensors at a time, None: as many as there are processors; the errors do not depend on it.
    """

    def measure(name: str, types: Sequence[TensorType]) -> dict[str, float]:
        errors = dict(known.get(name, {}))
        missing = [t for t in types if t.name not in errors]
        if missing:
            sample = sample_rows(tensors[name], importance, rows, seed, covariances)
            errors |= sample.errors(missing)
        return {t.name: errors[t.name] for t in types}

    count = threads or available_cpus()
    if count == 1:
        for name, types in options.items():
            yield name, measure(name, types)
        return
    pool = ThreadPoolExecutor(count)
    try:
        futures = [(name, pool.submit(measure, name, types)) for name, types in options.items()]
        for name, future in futures:
            yield name, future.result()
    finally:
        pool.shutdown(cancel_futures=True)
