"""The ops of mixtures of experts, as `functions`."""

from __future__ import annotations

from typing import Literal

import numpy as np

from ...graph.observer import ExpertInputs
from .reference_pass import ReferencePass


def sigmoid(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


def route(
    step: ReferencePass,
    logits: np.ndarray,
    used: int,
    gating: Literal["softmax", "sigmoid", "sqrt_softplus", "sparse_mixer"],
    bias: np.ndarray | None,
    groups: int,
    groups_used: int,
    normalise: bool,
    scale: float,
    jitter: float,
    factors: np.ndarray | None,
    zeros: int,
    by_token: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    n, count = logits.shape
    if gating == "sparse_mixer":
        return _sparse_mixer(logits, used, jitter)
    if gating == "sigmoid":
        scores = sigmoid(logits)
    elif gating == "sqrt_softplus":
        scores = np.sqrt(np.logaddexp(np.float32(0), logits))
    else:
        scores = np.exp(logits - logits.max(axis=1, keepdims=True))
        scores /= scores.sum(axis=1, keepdims=True)
    choice = scores if bias is None else scores + bias
    if groups > 1:
        members = choice.reshape(n, groups, -1)
        counted = 2 if gating == "sigmoid" and members.shape[2] > 1 else 1
        strength = np.sort(members, axis=2)[..., -counted:].sum(axis=2)
        open_groups = np.zeros((n, groups), bool)
        np.put_along_axis(open_groups, _best(strength, groups_used), True, axis=1)
        choice = np.where(open_groups[..., None], members, -np.inf).reshape(n, count)
    experts = _best(choice, used) if by_token is None else by_token[step.tokens].astype(np.int64)
    weights = np.take_along_axis(scores, experts, axis=1)
    if normalise:
        weights = weights / np.maximum(weights.sum(axis=1, keepdims=True), np.float32(1e-20))
    weights = weights * np.float32(scale)
    if zeros:
        experts = np.where(experts < count - zeros, experts, -1)
    return experts, weights if factors is None else weights * factors[experts]


def _sparse_mixer(logits: np.ndarray, used: int, jitter: float) -> tuple[np.ndarray, np.ndarray]:
    experts, left = _best(logits, used), logits.copy()
    weights = np.empty(experts.shape, np.float32)
    for k in range(used):
        best = left.max(axis=1, keepdims=True)
        far = (best - logits) / np.maximum(np.abs(logits), best) > np.float32(2 * jitter)
        scores = np.exp(np.where(far, -np.inf, left) - best)
        weights[:, k] = 1 / scores.sum(axis=1)
        np.put_along_axis(left, experts[:, k : k + 1], -np.inf, axis=1)
    return experts, weights


def _best(values: np.ndarray, n: int) -> np.ndarray:
    """Indices of each row's n largest values, largest first, of equals the first."""
    return np.argsort(-values, axis=1, kind="stable")[:, :n]


def expert_linear(
    step: ReferencePass, x: np.ndarray, routing: tuple[np.ndarray, np.ndarray], weight: np.ndarray, bias: np.ndarray | None
) -> np.ndarray:
    experts, out = routing[0], np.zeros((routing[0].size, weight.shape[1]), np.float32)
    inputs = ExpertInputs.of(x, experts)
    if observing := step.observing():
        observer, op = observing
        observer.on_expert_inputs(op, op.weights[0], inputs)
    for i, expert in enumerate(inputs.matrices):
        places = np.flatnonzero(experts == expert)
        out[places] = inputs.run(i)[1] @ weight[expert].T
        if bias is not None:
            out[places] += bias[expert]
    return out.reshape(*experts.shape, -1)
