"""A pass of the reference backend: the caches of the sequences, and what the functions of ops are given beside their values."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ....data_classes import dataclass
from ...graph import Observer, Op

Array = Any  # of numpy or, in functions that torch's backend shares, a tensor


class ReferenceCache:
    """The cache of a sequence of at most `limit` tokens: (layer, name) -> float32 [tokens, ...]. Of a recurrent state it holds
    what it was behind every token."""

    def __init__(self, limit: int):
        self.limit, self.length = limit, 0
        self.rows: dict[tuple[int, str], np.ndarray] = {}

    def append(self, layer: int, name: str, new: np.ndarray) -> np.ndarray:
        """The rows of the past and the new ones after them; they become past when the pass ends."""
        past = self.rows.get((layer, name), new[:0])[: self.length]
        self.rows[layer, name] = np.concatenate([past, new])
        return self.rows[layer, name]

    def extend(self, layer: int, name: str, new: np.ndarray, first: int) -> np.ndarray:
        """The rows from position `first` on, zeros where that is negative, and the new ones after them, which become past as
        with `append`. Of ops that read no others, backends need not keep those before."""
        rows = self.append(layer, name, new)
        return np.concatenate([np.zeros((-min(first, 0), *new.shape[1:]), new.dtype), rows[max(first, 0) :]])

    def truncate(self, length: int) -> None:
        """Drops all tokens from position `length` on."""
        self.length = min(self.length, length)

    def fork(self, length: int | None = None) -> ReferenceCache:
        """A copy with the first `length` tokens (all if None)."""
        copy = ReferenceCache(self.limit)
        copy.length, copy.rows = self.length, dict(self.rows)
        copy.truncate(self.length if length is None else length)
        return copy


@dataclass
class ReferencePass:
    """One pass, with arrays of numpy. op: the one that is being computed; segments: each sequence's cache, and the rows that
    are its tokens; inputs: rows for `HiddenInput`."""

    tokens: np.ndarray
    positions: np.ndarray
    segments: list[tuple[Any, slice]]
    observer: Observer
    op: Op | None = None
    inputs: np.ndarray | None = None

    xp: Any = np  # the functions of arrays

    def on_device(self, array: np.ndarray) -> Any:
        """An array of numpy as one of those that functions get."""
        return array

    def to_numpy(self, array: Any) -> np.ndarray:
        return array

    def constants(self, numbers: ArrayLike) -> Any:
        """float32 numbers."""
        return self.on_device(np.array(numbers, np.float32))

    def observing(self) -> tuple[Observer, Op] | None:
        """The observer and the op, if it wants that op's inputs."""
        return (self.observer, self.op) if self.op is not None and self.observer.wants_input(self.op) else None
