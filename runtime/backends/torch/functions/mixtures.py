"""The ops of mixtures of experts."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ....graph.observer import ExpertInputs
from ..device_pass import DevicePass, to_numpy
from ..weights import Matrix
from .elementwise import softplus

_SMALL = 1e-20  # least sum that weights are divided by


def route(
    step: DevicePass,
    logits: Tensor,
    used: int,
    gating: Literal["softmax", "sigmoid", "sqrt_softplus", "sparse_mixer"],
    bias: Tensor | None,
    groups: int,
    groups_used: int,
    normalise: bool,
    scale: float,
    jitter: float,
    factors: Tensor | None,
    zeros: int,
    by_token: Matrix | None,
) -> tuple[Tensor, Tensor]:
    n, count = logits.shape
    if gating == "sparse_mixer":
        return _sparse_mixer(logits, used, jitter)
    if gating == "sigmoid":
        scores = torch.sigmoid(logits)
    elif gating == "sqrt_softplus":
        scores = softplus(logits).sqrt()
    else:
        scores = torch.softmax(logits, dim=1)
    choice = scores if bias is None else scores + bias
    if groups > 1:
        members = choice.view(n, groups, -1)
        counted = 2 if gating == "sigmoid" and members.shape[2] > 1 else 1
        strength = members.topk(counted, dim=2).values.sum(dim=2)
        is_open = torch.zeros_like(strength, dtype=torch.bool).scatter_(1, _best(strength, groups_used), True)
        choice = members.masked_fill(~is_open[..., None], -torch.inf).view(n, count)
    experts = _best(choice, used) if by_token is None else by_token.gather(step.on_device(step.tokens)).long()
    weights = scores.gather(1, experts)
    if normalise:
        weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=_SMALL)
    weights = weights * scale
    if step.reduction is not None:
        experts, weights = _reduced(experts, weights, *step.reduction, normalise)
    if zeros:
        experts = torch.where(experts < count - zeros, experts, -1)
    return experts, weights if factors is None else weights * factors[experts.clamp(min=0)]


def _reduced(experts: Tensor, weights: Tensor, keep: int, share: float, normalise: bool) -> tuple[Tensor, Tensor]:
    """Without the experts after the first `keep` that weigh less than `share` times the strongest: -1, with the weight 0."""
    weak = weights < share * weights.amax(dim=1, keepdim=True)
    weak[:, :keep] = False
    kept = weights.masked_fill(weak, 0)
    if normalise:
        kept = kept * (weights.sum(dim=1, keepdim=True) / kept.sum(dim=1, keepdim=True).clamp(min=_SMALL))
    return experts.masked_fill(weak, -1), kept


def _sparse_mixer(logits: Tensor, used: int, jitter: float) -> tuple[Tensor, Tensor]:
    experts, left = _best(logits, used), logits
    weights = torch.empty(experts.shape, device=logits.device)
    for k in range(used):
        best = left.amax(dim=1, keepdim=True)
        far = (best - logits) / torch.maximum(logits.abs(), best) > 2 * jitter
        weights[:, k] = 1 / torch.exp(left.masked_fill(far, -torch.inf) - best).sum(dim=1)
        left = left.scatter(1, experts[:, k : k + 1], -torch.inf)
    return experts, weights


def _best(values: Tensor, n: int) -> Tensor:
    """Indices of each row's n largest values, largest first, of equals the first."""
    return torch.sort(values, dim=1, descending=True, stable=True).indices[:, :n]


def expert_linear(step: DevicePass, x: Tensor, routing: tuple[Tensor, Tensor], weight: Matrix, bias: Tensor | None) -> Tensor:
    experts = routing[0]
    if observing := step.observing():
        observer, op = observing
        observer.on_expert_inputs(op, op.weights[0], ExpertInputs.of(to_numpy(x), to_numpy(experts)))
    chosen = experts.clamp(min=0)  # of none, -1, the result counts with the weight 0
    out = weight.multiply_experts(x, chosen, step.prepared_of(getattr(step.op, "x", None)))
    return out if bias is None else out + bias[chosen]
