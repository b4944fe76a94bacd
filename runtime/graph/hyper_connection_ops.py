"""Ops of several residual streams, which are one value (streams, width): alternating updates (arXiv:2301.13310; Gemma 3n), and
hyper-connections, whose mixing depends on the token (arXiv:2512.24880; DeepSeek-V4, Qwen 4 Exp), and attention residuals."""

from __future__ import annotations

from ...data_classes import dataclass
from .op import Op
from .values import Value, Weight


@dataclass(frozen=True)
class ExpandStreams(Op):
    """x (width,) -> (streams, width): x, and the product of each matrix with x, with the root mean square of x.

    weight (width, width, streams - 1); epsilon: the least mean square of a product
    """

    x: Value
    weight: Weight
    epsilon: float


@dataclass(frozen=True)
class MergeStreams(Op):
    """x (streams, width) -> (width,): the mean of the first stream and of the products of the matrices with the others, which
    get the root mean square of the first stream. weight, epsilon: as in `ExpandStreams`."""

    x: Value
    weight: Weight
    epsilon: float


@dataclass(frozen=True)
class RepeatStreams(Op):
    """x (width,) -> (streams, width): every stream is x."""

    x: Value


@dataclass(frozen=True)
class HyperConnectionWeights(Op):
    """From the numbers of a token, in runs of s, s and s * s (or the first run alone), each times its scale plus its base: the
    factors of streams before a block, sigmoid + epsilon; those of the block's result for each stream, 2 * sigmoid; and the
    matrix that mixes the streams behind the block, a row for each result.

    The matrix is the transpose of what softmax of each row makes, plus epsilon, whose columns and rows are divided by their
    sums plus epsilon: columns first, and `iterations` times in all (Sinkhorn-Knopp).

    scale (3,), or (1,) for the first run alone; base: of x's size
    """

    x: Value
    scale: Weight
    base: Weight
    streams: int
    iterations: int
    epsilon: float


@dataclass(frozen=True)
class HyperConnectionMix(Op):
    """x (streams, width), coefficients (streams * streams,), a row for each result -> x + coefficients @ x.

    adds: else without x"""

    x: Value
    coefficients: Value
    adds: bool = True


@dataclass(frozen=True)
class HyperConnectionAdd(Op):
    """x (streams, width), update (width,), coefficients (streams,) -> each stream plus its coefficient, which `constants` are
    added to, times the update. coefficients None: the constants alone."""

    x: Value
    update: Value
    coefficients: Value | None
    constants: tuple[float, ...]


@dataclass(frozen=True)
class CollapseStreams(Op):
    """x (streams, width), factors (streams,) -> (width,): the sum of the streams, each times its factor."""

    x: Value
    factors: Value


@dataclass(frozen=True)
class ScoreStreams(Op):
    """x (streams, width), weight (width,) -> (streams,): softmax over the streams of weight . x / sqrt(mean of x^2 + epsilon)
    (attention residuals; Kimi K3)."""

    x: Value
    weight: Weight
    epsilon: float


@dataclass(frozen=True)
class MatchStreams(Op):
    """x, y (streams, width) -> (streams,): s = x . y / sqrt(width) of each stream as sign(s) sqrt(max(abs(s), 1e-6))."""

    x: Value
    y: Value
