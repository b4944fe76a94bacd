"""How each op of a graph becomes tasks: `steps_of` makes the steps of a list of ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .....formats import PlanError
from ....graph import ops as o
from .attention import AttentionStep
from .elementwise import (
    AddStep, EmbeddingStep, GateStep, NormStep, ReshapeStep, RopeStep, ScaleStep, SigmoidGateStep, SoftCapStep, SplitStep,
)  # fmt: skip
from .experts import ExpertsStep, find_mixtures
from .latent_attention import LatentAttentionStep
from .linear import LinearStep
from .step import Step

if TYPE_CHECKING:
    from ..executable import Executable

STEPS: dict[type[o.Op], Callable[[Executable, Any], Step]] = {
    o.Activation: GateStep,
    o.Add: AddStep,
    o.Attention: AttentionStep,
    o.Embedding: EmbeddingStep,
    o.GatedActivation: GateStep,
    o.LatentAttention: LatentAttentionStep,
    o.Linear: LinearStep,
    o.Norm: NormStep,
    o.Reshape: ReshapeStep,
    o.Rope: RopeStep,
    o.Scale: ScaleStep,
    o.SigmoidGate: SigmoidGateStep,
    o.SoftCap: SoftCapStep,
    o.Split: SplitStep,
}


def steps_of(executable: Executable, ops: Sequence[o.Op]) -> list[Step]:
    """One step per op; the ops of a mixture of experts have one together, in place of the last of them.

    Raises PlanError for an op, or an option of one, that is not known.
    """
    mixtures = find_mixtures(executable, ops)
    grouped = {id(op) for mixture in mixtures.values() for op in mixture.ops}
    out: list[Step] = []
    for op in ops:
        if id(op) in mixtures:
            out.append(mixtures[id(op)])
        elif id(op) not in grouped:
            step = STEPS.get(type(op))
            if step is None:
                raise PlanError(f"the cpu backend does not know the op {type(op).__name__} here")
            out.append(step(executable, op))
    return out


__all__ = ["STEPS", "ExpertsStep", "Step", "steps_of"]
