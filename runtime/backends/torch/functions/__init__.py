"""One function per op with torch, on whatever device its values are; the first axis of every tensor is that of the tokens.

A function's parameters are the fields of its op by name: values as tensors, weights as tensors too or, where the annotation
says so, as a `Matrix`, whose bytes stay packed.
"""

from __future__ import annotations

from typing import get_type_hints

from ....graph import Op, activation_ops, compressed_attention_ops, ops
from ....graph.signatures import functions_of, support_of
from ...reference import compressed_attention as reference
from ...reference.elementwise import ELEMENTWISE_FUNCTIONS
from ...reference.hyper_connections import HYPER_CONNECTION_FUNCTIONS
from ..weights import Matrix
from . import attention, compressed_attention, elementwise, mixtures, recurrent

_BY_CLASS = {
    ops.Embedding: elementwise.embedding,
    ops.Linear: elementwise.linear,
    ops.Split: elementwise.split,
    ops.Norm: elementwise.norm,
    ops.Rope: elementwise.rope,
    ops.Attention: attention.attention,
    ops.LatentAttention: attention.latent_attention,
    ops.SelectKeys: attention.select_keys,
    ops.SelectBlocks: attention.select_blocks,
    ops.ShortConvolution: recurrent.short_convolution,
    ops.GatedDeltaRule: recurrent.gated_delta_rule,
    ops.SelectiveScan: recurrent.selective_scan,
    ops.Activation: elementwise.activation,
    ops.GatedActivation: elementwise.gated_activation,
    ops.Route: mixtures.route,
    ops.ExpertLinear: mixtures.expert_linear,
    ops.SigmoidGate: elementwise.sigmoid_gate,
    activation_ops.Xielu: elementwise.xielu,
    activation_ops.SoftplusGate: elementwise.softplus_gate,
    ops.GroupedLinear: compressed_attention.grouped_linear,
    ops.NgramEmbedding: reference.ngram_embedding,
    compressed_attention_ops.AverageRun: reference.average_run,
    compressed_attention_ops.Compress: reference.compress,
    compressed_attention_ops.WindowAttention: compressed_attention.window_attention,
    **ELEMENTWISE_FUNCTIONS,
    **HYPER_CONNECTION_FUNCTIONS,
    ops.Add: elementwise.add,
}
FUNCTIONS = functions_of(_BY_CLASS)
SUPPORT = support_of(FUNCTIONS)
# Class of ops -> the fields whose weights are a `Matrix`, tables among them.
PACKED = {
    op: {name for name, hint in get_type_hints(function).items() if name == "table" or hint in (Matrix, Matrix | None)}
    for op, function in _BY_CLASS.items()
}
# Ops whose functions wait for nothing on the device, and ask only for positions and lengths that lie there: those of a pass
# that can be recorded (`fixed_pass.py`).
FIXED = {
    *(ops.Linear, ops.Split, ops.Reshape, ops.Concat, ops.Norm, ops.Rope, ops.Attention, ops.Add, ops.Scale, ops.SoftCap),
    *(ops.Activation, ops.GatedActivation, ops.GateHeads, ops.SigmoidGate, activation_ops.Xielu, activation_ops.SoftplusGate),
    *(activation_ops.Clamp, activation_ops.Multiply, activation_ops.GaussianTopK),
    *(ops.Route, ops.ExpertLinear, ops.ScaleByRouting, ops.IdentityExperts, ops.CombineExperts),
}


def is_fixed(op: Op) -> bool:
    """Whether an op can be in a pass that is recorded."""
    if isinstance(op, ops.Attention):
        return op.selection is None and op.causal
    return type(op) in FIXED and not (isinstance(op, ops.Route) and op.by_token is not None)
