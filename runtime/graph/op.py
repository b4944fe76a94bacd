"""The base of all ops."""

from __future__ import annotations

from dataclasses import fields
from functools import cached_property
from math import prod
from typing import ClassVar

from ...data_classes import dataclass
from .values import Value, Weight


@dataclass(frozen=True)
class Op:
    """Base of all ops. out: what it computes."""

    out: Value
    LOOKED_UP: ClassVar[bool] = False  # rows of its tensors, with which nothing is multiplied

    @cached_property
    def inputs(self) -> tuple[Value, ...]:
        """The values it reads, in the order of its fields."""
        given = (getattr(self, f.name) for f in fields(self) if f.name not in ("out", "more"))
        return tuple(value for value in given if isinstance(value, Value))

    @cached_property
    def outputs(self) -> tuple[Value, ...]:
        return (self.out,)

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        """The tensors it reads."""
        given = (getattr(self, f.name) for f in fields(self))
        return tuple(value for value in given if isinstance(value, Weight))

    @property
    def multiplied(self) -> int:
        """Numbers of its tensors that tokens are multiplied with, those of all experts: what it takes, roughly."""
        return 0 if self.LOOKED_UP else sum(prod(weight.shape) for weight in self.weights)
