"""The ops of several residual streams, as `functions`, for arrays of numpy as for tensors of torch, which has no others."""

from __future__ import annotations

from typing import Any

from ...graph import Value, hyper_connection_ops
from .reference_pass import Array, ReferencePass


def _with_magnitude(x: Array, like: Array, epsilon: float) -> Array:
    """x [n, streams, width] with the root mean square of like [n, width]."""
    squares = (x * x).mean(axis=-1, keepdims=True).clip(min=epsilon)
    return x * (like * like).mean(axis=-1)[:, None, None] ** 0.5 / squares**0.5


def expand_streams(step: ReferencePass, x: Array, weight: Array, epsilon: float) -> Array:
    others = step.xp.einsum("nc,src->nsr", x, weight)
    return step.xp.concatenate([x[:, None], _with_magnitude(others, x, epsilon)], axis=1)


def merge_streams(step: ReferencePass, x: Array, weight: Array, epsilon: float) -> Array:
    others = _with_magnitude(step.xp.einsum("nsc,src->nsr", x[:, 1:], weight), x[:, 0], epsilon)
    return (x[:, 0] + others.sum(axis=1)) / x.shape[1]


def mix(step: ReferencePass, x: Array, coefficients: Array, adds: bool) -> Array:
    n, streams, _ = x.shape
    mixed = step.xp.einsum("nos,nsw->now", coefficients.reshape(n, streams, streams), x)
    return x + mixed if adds else mixed


def add(step: ReferencePass, x: Array, update: Array, coefficients: Array | None, constants: tuple[float, ...]) -> Array:
    factors = step.constants(constants)[None]
    factors = factors if coefficients is None else factors + coefficients
    return x + factors[..., None] * update[:, None]


def repeat_streams(step: ReferencePass, x: Array, out: Value) -> Array:
    return step.xp.concatenate([x[:, None]] * out.shape[0], axis=1)


def weights(step: ReferencePass, x: Array, scale: Array, base: Array, streams: int, iterations: int, epsilon: float) -> Array:
    xp = step.xp

    def factors(run: int, size: int) -> Array:
        part = slice(run * streams, run * streams + size)
        return x[:, part] * scale[run] + base[part]

    def sigmoid(x: Array) -> Array:
        return 1 / (1 + xp.exp(-x))

    before = sigmoid(factors(0, streams)) + epsilon
    if len(scale) == 1:
        return before
    behind = 2 * sigmoid(factors(1, streams))
    mixed = factors(2, streams * streams).reshape(-1, streams, streams)
    mixed = xp.exp(mixed - xp.amax(mixed, axis=2, keepdims=True))
    mixed = mixed / mixed.sum(axis=2, keepdims=True) + epsilon
    for turn in range(2 * iterations - 1):
        mixed = mixed / (mixed.sum(axis=2 if turn % 2 else 1, keepdims=True) + epsilon)
    return xp.concatenate([before, behind, mixed.swapaxes(1, 2).reshape(len(x), -1)], axis=1)


def collapse_streams(step: ReferencePass, x: Array, factors: Array) -> Array:
    return step.xp.einsum("nsw,ns->nw", x, factors)


def score_streams(step: ReferencePass, x: Array, weight: Array, epsilon: float) -> Array:
    scores = x @ weight / ((x * x).mean(axis=-1) + epsilon) ** 0.5
    scores = step.xp.exp(scores - step.xp.amax(scores, axis=1, keepdims=True))
    return scores / scores.sum(axis=1, keepdims=True)


def match_streams(step: ReferencePass, x: Array, y: Array) -> Array:
    products = step.xp.einsum("nsw,nsw->ns", x, y) / x.shape[2] ** 0.5
    return step.xp.sign(products) * step.xp.sqrt(abs(products).clip(min=1e-6))


HYPER_CONNECTION_FUNCTIONS: dict[Any, Any] = {
    hyper_connection_ops.ExpandStreams: expand_streams,
    hyper_connection_ops.MergeStreams: merge_streams,
    hyper_connection_ops.HyperConnectionMix: mix,
    hyper_connection_ops.HyperConnectionAdd: add,
    hyper_connection_ops.RepeatStreams: repeat_streams,
    hyper_connection_ops.HyperConnectionWeights: weights,
    hyper_connection_ops.CollapseStreams: collapse_streams,
    hyper_connection_ops.ScoreStreams: score_streams,
    hyper_connection_ops.MatchStreams: match_streams,
}
