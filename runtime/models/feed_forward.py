"""Feed-forward blocks: what a layer's tensors say, dense or a mixture of experts.

The variants of routing (softmax or sigmoid scores, a bias for the choice only, groups, weights that sum to one, a scale) are
those of DeepSeek-V2 (arXiv:2405.04434, section 2.2) and V3 (arXiv:2412.19437, section 2.1.2).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ...data_classes import dataclass
from ...formats import FormatError, PlanError
from ..hparams import HParams

if TYPE_CHECKING:
    from ..graph import GraphBuilder, Value
    from ..graph.values import RoutingValue, Weight

SOFTMAX, SIGMOID, SQRT_SOFTPLUS = 1, 2, 4  # values of expert_gating_func in GGUF
GATINGS = {SOFTMAX: "softmax", SIGMOID: "sigmoid", SQRT_SOFTPLUS: "sqrt_softplus"}
_KNOWN = ", ".join(f"{number} {name}" for number, name in GATINGS.items())
SWISH_LIMIT = 7.0  # of gpt-oss's clamped activations, where the metadata does not say


@dataclass(frozen=True)
class FeedForward:
    """What neither tensors nor metadata say: see `variants.Variant`, whose fields these are.

    situ: of the activation 'situ' (Kimi K3), a tanh(gate / a) sigmoid(gate) b tanh(up / b): a, and b, 0 for up as it is
    """

    activation: str = "silu"
    ungated: str = "gelu"
    gating: str = ""
    shared_average: bool = False
    weigh_inputs: bool = False
    situ: tuple[float, float] = (0.0, 0.0)


def feed_forward(graph: GraphBuilder, hparams: HParams, layer: int, x: Value, block: FeedForward | None = None) -> Value:
    """Experts where the layer has a router (ffn_gate_inp), else a dense block: gated where it has a gate (ffn_gate or, as in
    Phi 3, the first half of ffn_up), else with the activation `ungated`.

    Raises FormatError for missing keys and tensors of a wrong shape, PlanError for a gating function that is not known.
    """
    block, prefix = block or FeedForward(), f"blk.{layer}.ffn_"
    if f"{prefix}gate_inp.weight" in graph:
        return _experts(graph, hparams, layer, x, block)
    return dense_block(graph, hparams, layer, x, block)


def dense_block(graph: GraphBuilder, hparams: HParams, layer: int, x: Value, block: FeedForward) -> Value:
    """`feed_forward` without experts."""
    prefix, limit = f"blk.{layer}.ffn_", _limit(hparams, "shexp", layer)
    n_ff = hparams.of_layer("feed_forward_length", layer)
    if f"{prefix}gate.weight" in graph or f"{prefix}up.weight" not in graph:
        return _gated(graph, x, prefix, "", n_ff, block, limit)
    if graph.shape(f"{prefix}up.weight")[-1] == 2 * n_ff:
        gate, up = graph.split(graph.linear(x, f"{prefix}up", 2 * n_ff), n_ff, n_ff)
        inner = _activated(graph, gate, up, block, limit)
    else:
        inner = _ungated(graph, hparams, layer, graph.linear(x, f"{prefix}up", n_ff), block.ungated)
    return graph.linear(inner, f"{prefix}down", x.shape[0])


def _ungated(graph: GraphBuilder, hparams: HParams, layer: int, x: Value, function: str) -> Value:
    if function != "xielu":
        return graph.activation(x, function)
    alpha_p, alpha_n, beta, epsilon = (hparams.shared_float(f"xielu.{k}", layer) for k in ("alpha_p", "alpha_n", "beta", "eps"))
    # Stored are numbers whose softplus is alpha_p, and alpha_n - beta.
    return graph.xielu(x, math.log1p(math.exp(alpha_p)), beta + math.log1p(math.exp(alpha_n)), beta, epsilon)


def _gated(graph: GraphBuilder, x: Value, prefix: str, suffix: str, n_ff: int, block: FeedForward, limit: float) -> Value:
    """down(activation(gate(x)) * up(x)) (SwiGLU and its like, arXiv:2002.05202)."""
    gate, up = (graph.linear(x, f"{prefix}{part}{suffix}", n_ff) for part in ("gate", "up"))
    return graph.linear(_activated(graph, gate, up, block, limit), f"{prefix}down{suffix}", x.shape[0])


def _activated(graph: GraphBuilder, gate: Value, up: Value, block: FeedForward, limit: float) -> Value:
    activation = block.activation
    if activation == "situ":
        limited = graph.gated(graph.softcap(gate, block.situ[0]), graph.softcap(up, block.situ[1]), "identity")
        return graph.gated(gate, limited, "sigmoid")
    if activation == "clamped_swish":
        return graph.gated(gate, up, activation, limit or SWISH_LIMIT)
    return graph.gated(gate, up, activation if limit or activation != "clamped_silu" else "silu", limit)


def _limit(hparams: HParams, part: str, layer: int) -> float:
    """Of the gate's and up's numbers in a layer's experts ('exp'), or its shared expert and dense block ('shexp'); 0: none."""
    return hparams.float_of_layer(f"swiglu_clamp_{part}", layer, 0.0)


def _experts(graph: GraphBuilder, hparams: HParams, layer: int, x: Value, block: FeedForward) -> Value:
    """The routed experts' results, added to those of the shared expert, if there is one."""
    shared = _shared_expert(graph, hparams, layer, x, block)
    routed = routed_experts(graph, hparams, layer, x, block)
    if shared is None:
        return routed
    both = graph.add(shared, routed)
    return graph.scale(both, 0.5) if block.shared_average else both


def routed_experts(
    graph: GraphBuilder, hparams: HParams, layer: int, x: Value, block: FeedForward, routed_by: Value | None = None
) -> Value:
    """The sum of the experts' results, gate and up from two tensors or from one.

    Experts without gates have the activation `ungated`. With ffn_latent_down they read what this matrix makes of x, and
    ffn_latent_up multiplies their sum (Nemotron 3 Super); so do ffn_routed_down and _up, with _norm between (Kimi K3). Behind
    them are expert_zero_count experts that return their input. routed_by: the router's input, where it is not x.
    """
    prefix, n_expert = f"blk.{layer}.ffn_", hparams.size("expert_count")
    n_ff = hparams.of_layer("expert_feed_forward_length", layer, 0, 0) or hparams.of_layer("feed_forward_length", layer, 0, 0)
    routing, inputs = _route(graph, hparams, layer, x if routed_by is None else routed_by, n_expert, block.gating), x
    latent = next((f"{prefix}{name}_" for name in ("latent", "routed") if f"{prefix}{name}_down.weight" in graph), None)
    if latent is not None:
        inputs = graph.linear(x, f"{latent}down", graph.shape(f"{latent}down.weight")[1])
    zeros = hparams.size("expert_zero_count", 0, 0)
    unchanged = graph.identity_experts(x, routing) if zeros else None
    if block.weigh_inputs:
        inputs = graph.scale_by_routing(inputs, routing)
    if f"{prefix}gate_up_exps.weight" in graph:
        parts = graph.split(graph.expert_linear(inputs, routing, f"{prefix}gate_up_exps", 2 * n_ff, n_expert), n_ff, n_ff)
    else:
        names = ("gate", "up") if f"{prefix}gate_exps.weight" in graph else ("up",)
        parts = tuple(graph.expert_linear(inputs, routing, f"{prefix}{name}_exps", n_ff, n_expert) for name in names)
    if len(parts) == 2:
        inner = _activated(graph, parts[0], parts[1], block, _limit(hparams, "exp", layer))
    else:
        inner = _ungated(graph, hparams, layer, parts[0], block.ungated)
    out = graph.expert_linear(inner, routing, f"{prefix}down_exps", inputs.shape[-1], n_expert)
    routed = graph.combine(out, routing, not block.weigh_inputs)
    if unchanged is not None:
        routed = graph.add(routed, unchanged)
    if latent is None:
        return routed
    if f"{latent}norm.weight" in graph:
        routed = graph.norm(routed, f"{latent}norm", hparams.float("attention.layer_norm_rms_epsilon"))
    return graph.linear(routed, f"{latent}up", x.shape[0])


def _route(graph: GraphBuilder, hparams: HParams, layer: int, x: Value, n_expert: int, gating: str) -> RoutingValue:
    number = hparams.int("expert_gating_func", 0) or SOFTMAX
    if number not in GATINGS:
        raise PlanError(f"{hparams.path}: expert gating function {number} is not supported ({_KNOWN})")
    zeros = hparams.size("expert_zero_count", 0, 0)
    n_expert += zeros
    used = hparams.size("expert_used_count", maximum=n_expert)
    groups, groups_used = (hparams.size(f"expert_group_{key}", 0, 0, n_expert) or 1 for key in ("count", "used_count"))
    groups_used = 1 if groups == 1 else groups_used  # some files of models without groups say otherwise
    if n_expert % groups or groups_used > groups or used > n_expert // groups * groups_used:
        raise FormatError(
            f"{hparams.path}: {used} experts cannot be chosen from {groups_used} of {groups} equal groups of {n_expert} experts"
        )
    logits = graph.linear(x, f"blk.{layer}.ffn_gate_inp", n_expert)
    logits = graph.softcap(logits, hparams.float("router_logit_softcapping", 0.0))
    # The first files of DeepSeek-V3 have it without a suffix.
    names = (f"blk.{layer}.exp_probs_b.bias", f"blk.{layer}.exp_probs_b")
    bias = next((graph.weight(name, (n_expert,)) for name in names if name in graph), None)
    return graph.route(
        logits,
        used,
        gating=gating or GATINGS[number],
        bias=bias,
        groups=groups,
        groups_used=groups_used,
        normalise=hparams.flag("expert_weights_norm"),
        scale=hparams.float("expert_weights_scale", 0.0) or 1.0,
        jitter=hparams.float("expert_router_jitter", 0.0),
        factors=graph.optional(f"blk.{layer}.ffn_down_exps.scale", (n_expert,)),
        zeros=zeros,
        by_token=_table(graph, layer, used),
    )


def _table(graph: GraphBuilder, layer: int, used: int) -> Weight | None:
    """The experts of each token id, where the layer has such a table (DeepSeek-V4)."""
    name = f"blk.{layer}.ffn_gate_tid2eid.weight"
    if name not in graph:
        return None
    return graph.weight(name, (used, graph.shape("token_embd.weight")[1]))


def _shared_expert(graph: GraphBuilder, hparams: HParams, layer: int, x: Value, block: FeedForward) -> Value | None:
    """The expert that every token goes to, of the width that its tensors have, perhaps with a gate of its own (Qwen 2 MoE)."""
    prefix = f"blk.{layer}.ffn_"
    if f"{prefix}up_shexp.weight" not in graph:
        return None
    n_ff = graph.shape(f"{prefix}up_shexp.weight")[1]
    if f"{prefix}gate_shexp.weight" not in graph:
        inner = _ungated(graph, hparams, layer, graph.linear(x, f"{prefix}up_shexp", n_ff), block.ungated)
        return graph.linear(inner, f"{prefix}down_shexp", x.shape[0])
    limit, gate = _limit(hparams, "shexp", layer), f"{prefix}gate_inp_shexp"
    out = _gated(graph, x, prefix, "_shexp", n_ff, block, limit)
    return graph.sigmoid_gate(x, out, gate) if f"{gate}.weight" in graph else out
