"""Groups of a model's tensors that differ in the numbers in their names alone: a model may have a million tensors, and has few
groups of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .source import SourceTensor

_NUMBER = re.compile(r"\.\d+(?=\.)")


@lru_cache(16)  # the name that is looked at, by several
def form_of(name: str) -> str:
    """The name with 0 for each number between dots: 'blk.3.ffn_up.12.weight' -> 'blk.0.ffn_up.0.weight'. A model may have a
    million names, and has few forms."""
    return _NUMBER.sub(".0", name)


class TensorGroups:
    """Tensors of a group have names of one form, and the same shape, source type and stored type; all or none of them have
    stored bytes, and factors.

    names    of all tensors, in order
    first    the first tensor of each group, in order
    """

    def __init__(self, tensors: Iterable[SourceTensor]):
        self.names: list[str] = []
        self.first: list[SourceTensor] = []
        numbers: dict[tuple[object, ...], int] = {}
        group_of: list[int] = []
        for tensor in tensors:
            stored = tensor.stored.name if tensor.stored is not None else None
            what = tensor.shape, tensor.source_type, stored, tensor.raw is None, tensor.scale is None
            number = numbers.setdefault((form_of(tensor.name), *what), len(self.first))
            if number == len(self.first):
                self.first.append(tensor)
            self.names.append(tensor.name)
            group_of.append(number)
        self._group_of = np.array(group_of, np.int32)
        self._first_at = np.unique(self._group_of, return_index=True)[1]

    def to_look_at(self, apart: Sequence[bool]) -> tuple[np.ndarray, np.ndarray]:
        """(places of tensors, ascending, int64 [m]; for each tensor the index there of the one that it is like, int64 [n]).

        apart: of each group, whether each tensor of it has to be looked at; else its first one stands for all.
        """
        alone = np.array(apart, bool)[self._group_of]
        is_looked_at = alone.copy()
        is_looked_at[self._first_at] = True
        index = np.cumsum(is_looked_at) - 1
        return np.flatnonzero(is_looked_at), np.where(alone, index, index[self._first_at[self._group_of]])

    def first_at(self, place: int) -> SourceTensor | None:
        """The tensor at a place if it is the first of its group."""
        group = self._group_of[place]
        return self.first[group] if self._first_at[group] == place else None
