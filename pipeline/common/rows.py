"""Descriptions of tensors, made when they are asked for: a file may have a million, and a dict of each would take gigabytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from ...formats.lazy_sequence import LazySequence

Tensor = TypeVar("Tensor")
Row = TypeVar("Row")


class Rows(LazySequence[Row], Generic[Tensor, Row]):
    """What `describe` makes of each tensor, in their order."""

    def __init__(self, tensors: Mapping[str, Tensor], describe: Callable[[Tensor], Row]):
        self._tensors, self._names, self._describe = tensors, list(tensors), describe

    def item(self, number: int) -> Row:
        return self._describe(self._tensors[self._names[number]])

    def __iter__(self) -> Iterator[Row]:
        return map(self._describe, self._tensors.values())

    def __len__(self) -> int:
        return len(self._names)


def type_histogram(tensors: Iterable[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """type -> tensors and bytes, most bytes first."""
    types: dict[str, dict[str, int]] = {}
    for t in tensors:
        entry = types.setdefault(t["type"], {"tensors": 0, "nbytes": 0})
        entry["tensors"], entry["nbytes"] = entry["tensors"] + 1, entry["nbytes"] + t["nbytes"]
    return dict(sorted(types.items(), key=lambda item: -item[1]["nbytes"]))
