"""Descriptions of tensors, made when they are asked for: a file may have a million, and a dict of each would take gigabytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar, overload

Tensor = TypeVar("Tensor")
Row = TypeVar("Row")


class Rows(Sequence[Row], Generic[Tensor, Row]):
    """What `describe` makes of each tensor, in their order."""

    def __init__(self, tensors: Mapping[str, Tensor], describe: Callable[[Tensor], Row]):
        self._tensors, self._names, self._describe = tensors, list(tensors), describe

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self._describe(self._tensors[name]) for name in self._names[index]]
        return self._describe(self._tensors[self._names[index]])

    def __iter__(self) -> Iterator[Row]:
        return map(self._describe, self._tensors.values())

    def __len__(self) -> int:
        return len(self._names)
