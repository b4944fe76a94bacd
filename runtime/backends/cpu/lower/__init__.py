"""How each op of a graph becomes tasks: `steps_of` makes the steps of a list of ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .....formats import PlanError
from .....simd.team import Part
from ....graph import Support
from ....graph import ops as o
from ..kernels.attention.flash import attend
from ..kernels.experts import combine_part, route_part
from ..kernels.recurrent import delta_rule
from ..passes import Step
from .attention import AttentionStep
from .compressed import COMPRESSED_STEPS, COMPRESSED_SUPPORT
from .elementwise import (
    ACTIVATIONS,
    GATES,
    AddStep,
    ConcatStep,
    EmbeddingStep,
    GateHeadsStep,
    GateStep,
    HiddenInputStep,
    NormStep,
    ReshapeStep,
    RopeStep,
    ScaleByPositionStep,
    ScaleStep,
    SigmoidGateStep,
    SoftCapStep,
    SplitStep,
)  # fmt: skip
from .experts import GATINGS, find_mixtures
from .latent_attention import LatentAttentionStep
from .linear import LinearStep
from .recurrent import GatedDeltaRuleStep, SelectiveScanStep, ShortConvolutionStep
from .sparse_attention import SelectBlocksStep, SelectKeysStep
from .special import SPECIAL_STEPS, SPECIAL_SUPPORT
from .streams import STREAM_STEPS, STREAM_SUPPORT

if TYPE_CHECKING:
    from ..executable import Executable

STEPS: dict[type[o.Op], Callable[[Executable, Any], Step]] = {
    o.Activation: GateStep,
    o.Add: AddStep,
    o.Attention: AttentionStep,
    o.Concat: ConcatStep,
    o.Embedding: EmbeddingStep,
    o.GateHeads: GateHeadsStep,
    o.GatedActivation: GateStep,
    o.GatedDeltaRule: GatedDeltaRuleStep,
    o.HiddenInput: HiddenInputStep,
    o.LatentAttention: LatentAttentionStep,
    o.Linear: LinearStep,
    o.Norm: NormStep,
    o.Reshape: ReshapeStep,
    o.Rope: RopeStep,
    o.Scale: ScaleStep,
    o.ScaleByPosition: ScaleByPositionStep,
    o.SelectBlocks: SelectBlocksStep,
    o.SelectKeys: SelectKeysStep,
    o.SelectiveScan: SelectiveScanStep,
    o.ShortConvolution: ShortConvolutionStep,
    o.SigmoidGate: SigmoidGateStep,
    o.SoftCap: SoftCapStep,
    o.Split: SplitStep,
    **SPECIAL_STEPS,
    **STREAM_STEPS,
    **COMPRESSED_STEPS,
}

# Op -> those of its parts whose compiling takes seconds (see simd.background).
SLOW_PARTS: dict[type[o.Op], tuple[Part, ...]] = {
    o.Attention: (attend,),
    o.LatentAttention: (attend,),
    o.GatedDeltaRule: (delta_rule,),
    o.Route: (route_part, combine_part),
}

# Supported ops, their fields, and the values of these where only some are supported (see graph.check_support).
SUPPORT: Support = {
    o.Activation: {"x": None, "function": tuple(ACTIVATIONS)},
    o.Add: dict.fromkeys(("a", "b", "scale")),
    o.Attention: dict.fromkeys(
        ("q", "k", "v", "layer", "scale", "window", "softcap", "sinks", "chunked", "selection", "block", "alibi", "causal")
    ),
    o.CombineExperts: dict.fromkeys(("x", "routing", "weighted")),
    o.Concat: dict.fromkeys(("a", "b")),
    o.Embedding: {"table": None, "scale": None, "by": ("token", "position", "segment"), "separator": None},
    o.ExpertLinear: dict.fromkeys(("x", "routing", "weight", "bias")),
    o.GateHeads: dict.fromkeys(("x", "gate")),
    o.GatedActivation: {"gate": None, "up": None, "function": tuple(GATES), "limit": None},
    o.GatedDeltaRule: dict.fromkeys(("q", "k", "v", "alpha", "beta", "decay", "alpha_bias", "layer", "tiled", "epsilon")),
    o.HiddenInput: {},
    o.LatentAttention: dict.fromkeys(
        ("q", "latent", "k_pe", "layer", "scale", "v_width", "prefix", "kv_b", "k_b", "v_b", "selection")
    ),
    o.IdentityExperts: dict.fromkeys(("x", "routing")),
    o.Linear: dict.fromkeys(("x", "weight", "bias")),
    o.Norm: {"x": None, "weight": None, "epsilon": None, "bias": None, "kind": ("rms", "layer"), "over": ("last", "all")},
    o.Reshape: dict.fromkeys(("x",)),
    o.Rope: dict.fromkeys(("x", "rope", "start")),
    o.Route: {
        **dict.fromkeys(("logits", "used", "bias", "groups", "groups_used", "normalise", "scale", "jitter")),
        **dict.fromkeys(("factors", "zeros", "by_token")),
        "gating": tuple(GATINGS),
    },
    o.Scale: dict.fromkeys(("x", "factor")),
    o.ScaleByPosition: dict.fromkeys(("x", "temperature")),
    o.ScaleByRouting: dict.fromkeys(("x", "routing")),
    o.SelectBlocks: dict.fromkeys(("q", "k", "layer", "block", "top_k", "local")),
    o.SelectiveScan: dict.fromkeys(("x", "dt", "b", "c", "decay", "skip", "layer", "dt_bias")),
    o.ShortConvolution: {
        **dict.fromkeys(("x", "weight", "layer", "bias", "state", "dilation")),
        "activation": ("silu", "none"),
    },
    o.SelectKeys: dict.fromkeys(("q", "k", "factors", "layer", "top_k", "every", "open_run")),
    o.SigmoidGate: dict.fromkeys(("x", "y", "gate")),
    o.SoftCap: dict.fromkeys(("x", "cap")),
    o.Split: dict.fromkeys(("x", "sizes", "more")),
    **SPECIAL_SUPPORT,
    **STREAM_SUPPORT,
    **COMPRESSED_SUPPORT,
}


def steps_of(executable: Executable, ops: Sequence[o.Op]) -> list[Step]:
    """One step per op; the ops of a mixture of experts have a common one, in the place of the last of them.

    Raises PlanError for an op of a mixture of experts outside of one.
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
                raise PlanError(f"the cpu backend cannot run {type(op).__name__} outside of a mixture of experts")
            out.append(step(executable, op))
    return out
