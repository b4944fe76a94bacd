"""Ops of single families of models: activations and gates, embeddings of n-grams, and several residual streams (alternating
updates, arXiv:2301.13310; Gemma 3n), which are one value (streams, width).
"""

from __future__ import annotations

from dataclasses import dataclass

from .ops import Op
from .values import NgramHash, Value, Weight


@dataclass(frozen=True)
class Xielu(Op):
    """xIELU (arXiv:2411.13010): alpha_p x^2 + beta x for x above 0, else alpha_n (e^min(x, epsilon) - 1 - x) + beta x."""

    x: Value
    alpha_p: float
    alpha_n: float
    beta: float
    epsilon: float


@dataclass(frozen=True)
class Clamp(Op):
    """x limited to -limit ... limit."""

    x: Value
    limit: float


@dataclass(frozen=True)
class SoftplusGate(Op):
    """x times ln(1 + e^gate): x (heads, width), and gate (heads,), a factor for each head, or (heads * width,) (Laguna)."""

    gate: Value
    x: Value


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
class MixStreams(Op):
    """x (streams, width), coefficients (streams * streams,), a row for each result -> x + coefficients @ x.

    adds: else without x"""

    x: Value
    coefficients: Value
    adds: bool = True


@dataclass(frozen=True)
class AddToStreams(Op):
    """x (streams, width), update (width,), coefficients (streams,) -> each stream plus its coefficient, which `constants` are
    added to, times the update. coefficients None: the constants alone."""

    x: Value
    update: Value
    coefficients: Value | None
    constants: tuple[float, ...]


@dataclass(frozen=True)
class ScaleChannels(Op):
    """x times weight, of one shape."""

    x: Value
    weight: Weight


@dataclass(frozen=True)
class KeepLargest(Op):
    """max(0, x - (mean(x) + factor * standard deviation of x)): keeps a share of normally distributed numbers."""

    x: Value
    factor: float


@dataclass(frozen=True)
class NgramEmbedding(Op):
    """The rows of a table that stand for the n-grams that end at a token, one after the other (Qwen 4 Exp).

    table (width, rows) -> (heads * width,); the state 'tokens' of `layer` has the last tokens' ids plus 1
    """

    table: Weight
    layer: int
    ngrams: NgramHash


@dataclass(frozen=True)
class MatchStreams(Op):
    """x, y (streams, width) -> (streams,): s = x . y / sqrt(width) of each stream as sign(s) sqrt(max(abs(s), 1e-6))."""

    x: Value
    y: Value
