"""Activations and gates of single families of models."""

from __future__ import annotations

from ...data_classes import dataclass
from .op import Op
from .values import Value, Weight


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
class Multiply(Op):
    """x times weight, of one shape."""

    x: Value
    weight: Weight


@dataclass(frozen=True)
class GaussianTopK(Op):
    """max(0, x - (mean(x) + factor * standard deviation of x)): keeps a share of normally distributed numbers."""

    x: Value
    factor: float
