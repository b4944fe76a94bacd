"""How each op of a graph becomes tasks: `steps_of` makes the steps of a list of ops."""

from __future__ import annotations

from collections.abc import Sequence

from .....formats import TYPES, PlanError
from .....simd.team import TaskKernel
from ....graph import ops as o
from ....graph.signatures import unsupported
from ..compiled_graph import CompiledGraph
from ..kernels.attention.flash import ATTEND
from ..kernels.experts import choose_experts, combine
from ..kernels.recurrent import delta_rule
from . import (  # noqa: F401, they fill STEPS  # noqa: F401
    activations,
    attention,
    compressed_attention,
    elementwise,
    hyper_connections,
    latent_attention,
    linear,
    recurrent,
    sparse_attention,
)
from .experts import find_mixtures
from .reference_step import ReferenceStep
from .step import STEPS, SUPPORT, Step

# Op -> those of its kernels whose compiling takes seconds (see simd.compile.background).
SLOW_KERNELS: dict[type[o.Op], tuple[TaskKernel, ...]] = {
    o.Attention: tuple(ATTEND.values()),
    o.LatentAttention: tuple(ATTEND.values()),
    o.GatedDeltaRule: (delta_rule,),
    o.Route: (choose_experts, combine),
}


def slow_kernels(op: type[o.Op], cache_types: tuple[str, str]) -> tuple[TaskKernel, ...]:
    """Those of an op's that are called for keys and values of these types."""
    keys, values = (not TYPES[name].is_float for name in cache_types)
    needed = SLOW_KERNELS.get(op, ())
    return tuple(each for each in needed if each not in ATTEND.values() or each is ATTEND[keys, values])


def steps_of(compiled: CompiledGraph, ops: Sequence[o.Op]) -> list[Step]:
    """One step per op; the ops of a mixture of experts have a common one, in the place of the last of them.

    Raises PlanError for an op of a mixture of experts outside of one, and for one without a step that the reference backend's
    function cannot stand for.
    """
    mixtures = find_mixtures(compiled, ops)
    grouped = {id(op) for mixture in mixtures.values() for op in mixture.ops}
    out: list[Step] = []
    for op in ops:
        if id(op) in mixtures:
            out.append(mixtures[id(op)])
        elif id(op) not in grouped:
            if isinstance(op, o.ExpertLinear | o.CombineExperts | o.ScaleByRouting | o.IdentityExperts):
                raise PlanError(f"the cpu backend cannot run {type(op).__name__} outside of a mixture of experts")
            known = SUPPORT.get(type(op))  # None: a class lowers all that the op can ask for
            lowered = type(op) in STEPS and (known is None or unsupported(op, known) is None)
            out.append(STEPS[type(op)](compiled, op) if lowered else ReferenceStep(compiled, op))
    return out
