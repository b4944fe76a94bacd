"""What a type does to a tensor: the error of rows that are encoded and decoded, weighted by importance."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...formats import TYPES, PlanError, SourceTensor, TensorType, dims
from ..codecs.registry import can_encode, decode, encode
from ..planning import Importance
from ..recipes.type_selection import EMBEDDINGS

RUN = 8  # rows that lie together: as many as the widest interleave of a type without a base holds

# What a search chooses from unless told otherwise: types of a good error for their size whose products run at full speed.
USUAL = (
    *("iq1_s", "iq1_m", "iq2_xxs", "iq2_ks", "iq2_k", "iq2_kl", "iq3_ks", "iq3_k", "iq4_kss", "iq4_ks", "iq4_k"),
    *("iq5_ks", "iq5_k", "iq6_k", "q8_0", "iq4_nl", "q5_0", "q6_0"),
)


@dataclass(frozen=True)
class Sample:
    """Rows of a tensor, float32 [n, columns] a run, each with the importance float32 [columns] of its matrix or None."""

    runs: list[tuple[np.ndarray, np.ndarray | None]]

    @cached_property
    def energy(self) -> float:
        """The weighted sum of the squared weights."""
        return sum(_weighted(x.astype(np.float64) ** 2, weights) for x, weights in self.runs)

    def error(self, kind: TensorType) -> float:
        """The weighted squared error of the rows as that type, relative to their energy; 0 where there is none."""
        if not self.energy:
            return 0.0
        plain = TYPES[kind.base] if kind.base else kind  # a repacked type has the same numbers
        off = 0.0
        for x, weights in self.runs:
            back = decode(encode(x, plain.name, weights), plain.name, x.shape[1])
            off += _weighted((back.astype(np.float64) - x) ** 2, weights)
        return off / self.energy


def _weighted(squares: np.ndarray, weights: np.ndarray | None) -> float:
    return float(squares.sum() if weights is None else (squares @ weights.astype(np.float64)).sum())


def sample(tensor: SourceTensor, importance: Importance | None, rows: int, seed: int) -> Sample:
    """About `rows` rows in runs of neighbours, spread over the tensor's matrices; the same for the same seed and name."""
    _, per_matrix, matrices = dims(tensor.shape)
    weights = importance.of(tensor) if importance is not None else None
    count, height = max(1, rows // RUN), min(RUN, per_matrix)
    draw = np.random.default_rng([seed, zlib.crc32(tensor.name.encode())])
    slots = max(1, per_matrix // height) * matrices  # runs that there are, none overlapping another
    picked = np.sort(draw.choice(slots, min(count, slots), replace=False))
    runs = []
    for slot in picked.tolist():
        matrix, at = divmod(slot, slots // matrices)
        start = matrix * per_matrix + at * height
        x = np.ascontiguousarray(tensor.read(start, start + height), np.float32)
        runs.append((np.where(np.isfinite(x), x, np.float32(0)), weights[matrix] if weights is not None else None))
    return Sample(runs)


def fitting(tensor: SourceTensor, types: Sequence[TensorType], has_importance: bool) -> list[TensorType]:
    """The types of a set that a tensor can become, smallest first: what does not fit is replaced by its fallback, and what
    needs importance is left out where there is none. Raises PlanError when nothing is left."""
    found: dict[str, TensorType] = {}
    for wanted in types:
        kind = wanted
        if tensor.name in EMBEDDINGS and kind.rows > 1:
            kind = TYPES[kind.base] if kind.base else TYPES.fallback_for(kind, (tensor.shape[0], 1))[0]
        try:
            kind, _ = TYPES.fallback_for(kind, tensor.shape)
        except PlanError:
            continue
        base = TYPES[kind.base] if kind.base else kind
        if (kind.imatrix or base.imatrix) and not has_importance:
            continue
        if can_encode(kind):
            found[kind.name] = kind
    if not found:
        raise PlanError(f"none of the types allowed can hold {tensor.name}: allow q8_0 too, which needs no importance data")
    return sorted(found.values(), key=lambda kind: (kind.nbytes(tensor.shape), kind.name))


def errors(
    tensors: Mapping[str, SourceTensor],
    options: Mapping[str, Sequence[TensorType]],
    importance: Importance | None,
    known: Mapping[str, Mapping[str, float]],
    *,
    rows: int,
    seed: int,
) -> Iterator[tuple[str, dict[str, float]]]:
    """(tensor name, type name -> relative error) tensor by tensor; what is `known` is not worked out again."""
    for name, kinds in options.items():
        found = dict(known.get(name, {}))
        missing = [kind for kind in kinds if kind.name not in found]
        if missing:
            rows_ = sample(tensors[name], importance, rows, seed)
            found |= {kind.name: rows_.error(kind) for kind in missing}
        yield name, {kind.name: found[kind.name] for kind in kinds}
