"""Quantisation error of a type on a tensor: sampled rows are encoded and decoded, errors weighted by importance."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...formats import TYPES, PlanError, SourceTensor, TensorType, dims
from ..codecs.registry import can_encode, decode, encode
from ..planning import Importance
from ..recipes.type_selection import plain_for_lookup

RUN_ROWS = 8  # neighbouring rows per run: as many as the widest interleaved type without a base type needs

# What a search selects from by default: types with a low error for their size whose matrix products run at full speed.
DEFAULT_TYPES = (
    *("iq1_s", "iq1_m", "iq2_xxs", "iq2_ks", "iq2_k", "iq2_kl", "iq3_ks", "iq3_k", "iq4_kss", "iq4_ks", "iq4_k"),
    *("iq5_ks", "iq5_k", "iq6_k", "q8_0", "iq4_nl", "q5_0", "q6_0"),
)


@dataclass(frozen=True)
class RowSample:
    """Rows of one tensor: runs of float32 [rows, columns], each with its matrix' importance, float32 [columns] or None."""

    runs: list[tuple[np.ndarray, np.ndarray | None]]

    @cached_property
    def energy(self) -> float:
        """The sum of squares of the weights, weighted by importance."""
        return sum(_weighted_sum(x.astype(np.float64) ** 2, importance) for x, importance in self.runs)

    def error(self, tensor_type: TensorType) -> float:
        """The squared error of the rows in that type, weighted by importance, over their energy; 0 for rows of zeros."""
        if not self.energy:
            return 0.0
        plain = TYPES.plain(tensor_type)  # a repacked type has the same values
        squared_error = 0.0
        for x, importance in self.runs:
            decoded = decode(encode(x, plain.name, importance), plain.name, x.shape[1])
            squared_error += _weighted_sum((decoded.astype(np.float64) - x) ** 2, importance)
        return squared_error / self.energy


def _weighted_sum(squares: np.ndarray, importance: np.ndarray | None) -> float:
    return float(squares.sum() if importance is None else (squares @ importance.astype(np.float64)).sum())


def sample_rows(tensor: SourceTensor, importance: Importance | None, rows: int, seed: int) -> RowSample:
    """About `rows` rows of a tensor, in runs of RUN_ROWS neighbours spread over its matrices.

    Depends on the seed and the tensor's name alone. Weights that are not finite are taken as 0.
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
        runs.append((np.where(np.isfinite(x), x, np.float32(0)), weights[matrix] if weights is not None else None))
    return RowSample(runs)


def usable_types(tensor: SourceTensor, types: Sequence[TensorType], has_importance: bool) -> list[TensorType]:
    """The types of a set that a tensor can get, smallest first.

    A type that does not fit the tensor's shape is replaced by its fallback; one that needs importance is left out where there
    is none. Raises PlanError when nothing is left.
    """
    usable: dict[str, TensorType] = {}
    for requested in types:
        try:
            tensor_type, _ = TYPES.fallback_for(plain_for_lookup(tensor, requested), tensor.shape)
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
) -> Iterator[tuple[str, dict[str, float]]]:
    """(tensor name, {type name: relative error}) for each tensor in `options` and its types.

    known: errors from an earlier run, which are not computed again. rows, seed: as in `sample_rows`.
    """
    for name, types in options.items():
        errors = dict(known.get(name, {}))
        missing = [t for t in types if t.name not in errors]
        if missing:
            sample = sample_rows(tensors[name], importance, rows, seed)
            errors |= {t.name: sample.error(t) for t in missing}
        yield name, {t.name: errors[t.name] for t in types}
