"""Importance of columns as planning takes it: what was measured, and what stands for it before it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from functools import cache
from typing import Any, ClassVar

import numpy as np

from ..data_classes import dataclass
from ..formats import PlanError, SourceTensor, dims
from .recipes.type_selection import EMBEDDINGS

# Whose imatrix entry a tensor without one may use (docs/formats/mixes.md): (end of its name, end of the other's name).
IMPORTANCE_SUBSTITUTES = (
    ("ffn_up_exps.weight", "ffn_gate_up_exps.weight"),
    ("ffn_gate_exps.weight", "ffn_gate_up_exps.weight"),
    ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    ("ffn_gate_up_exps.weight", "ffn_up_exps.weight"),
    ("ffn_gate.weight", "ffn_up.weight"),
    ("attn_v_b.weight", "attn_kv_b.weight"),
    ("attn_kv_b.weight", "attn_v_b.weight"),
)

# that a new file does not get from its source


@dataclass(frozen=True)
class Importance:
    """Mean squared activations: tensor name -> float32 [matrices, columns]. metadata: quantize.imatrix.* keys for the file."""

    means: Mapping[str, np.ndarray]
    metadata: dict[str, Any] = field(default_factory=dict)
    tells_apart: ClassVar[bool] = True  # whether tensors that differ in the numbers in their names alone may have it and not

    def renamed(self, old_names: Mapping[str, str]) -> Importance:
        """The same data under the names of a model whose layers were renumbered; old_names: new name -> name in this data."""
        return replace(self, means={new: self.means[old] for new, old in old_names.items() if old in self.means})

    def for_tensor(self, tensor: SourceTensor) -> np.ndarray | None:
        """float32 [shape[2] or 1, shape[0]]: the tensor's entry, or that of a substitute; None if there is neither.

        Raises PlanError when the entry has another shape than the tensor needs: then it was collected from another model.
        """
        names = [tensor.name]
        names += [tensor.name.replace(part, other) for part, other in IMPORTANCE_SUBSTITUTES if tensor.name.endswith(part)]
        columns, _, matrices = dims(tensor.shape)
        for name in names:
            mean = self.means.get(name)
            if mean is None:
                continue
            if mean.shape[1] == columns and mean.shape[0] in (1, matrices):
                return np.ascontiguousarray(np.broadcast_to(mean, (matrices, columns)), np.float32)
            if name == tensor.name and name not in EMBEDDINGS:
                raise PlanError(
                    f"imatrix entry {name} is {mean.shape[0]} x {mean.shape[1]}, the tensor needs "
                    f"{matrices} x {columns}: this imatrix was made from another model"
                )
        return None


@cache
def _ones(matrices: int, columns: int) -> np.ndarray:
    return np.broadcast_to(np.float32(1), (matrices, columns))


class PendingImportance(Importance):
    """Stands for an imatrix that has yet to be computed: ones, without using memory, for each tensor that will get an entry.

    includes_embeddings: also for embeddings and output, which are only collected on request.
    """

    includes_embeddings = False
    tells_apart = False

    def for_tensor(self, tensor: SourceTensor) -> np.ndarray | None:
        columns, _, matrices = dims(tensor.shape)
        collected = self.includes_embeddings or tensor.name.startswith("blk.")
        return _ones(matrices, columns) if collected else None


class AssumedImportance(PendingImportance):
    """As PendingImportance, for every tensor: to plan a recipe as if a complete imatrix were there."""

    includes_embeddings = True
