"""Sequences that keep what their items are made of in columns: there may be a million items, and an object for each would take
gigabytes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TypeVar, overload

Item = TypeVar("Item")


class LazySequence(Sequence[Item]):
    """Each item is made when it is asked for, and is an object only while somebody holds it."""

    @abstractmethod
    def item(self, number: int) -> Item:
        """The item of a number, from 0 to len(self) - 1."""

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...

    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        if isinstance(index, slice):
            return [self.item(number) for number in range(*index.indices(len(self)))]
        return self.item(range(len(self))[index])

    def __iter__(self) -> Iterator[Item]:
        return map(self.item, range(len(self)))
