"""Backends, which run graphs: what a model asks of any of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Protocol

import numpy as np

from ...simd.workers import Workers
from ..graph import Graph, Observer

CACHED_BYTES = 64 << 20  # of the memory of a pass, at most, that a model keeps for the next one of its shape


class Cache(Protocol):
    """The cache of a sequence: of its first `length` tokens, of at most `limit`."""

    length: int
    limit: int

    @property
    def types(self) -> str:
        """The types of keys and values, in words: "f16 and f16"."""
        ...

    def check_capacity(self, n: int) -> None:
        """Raises MillError if n more tokens do not fit."""

    def checkpoint(self) -> None:
        """Has `truncate` and `fork` go back to the present length at no cost."""

    def resumable(self, length: int) -> int:
        """What `length` is after `truncate(length)`: less where a layer's recurrent state is only there for fewer tokens."""
        ...

    def truncate(self, length: int) -> None:
        """Drops all tokens from position `resumable(length)` on."""

    def fork(self, length: int | None = None) -> Cache:
        """A copy with the first `resumable(length)` tokens (all if None)."""
        ...


# The arguments of `hidden`: tokens, caches with the numbers of their tokens, inputs.
PassInputs = tuple[np.ndarray, Sequence[tuple[Any, int]], np.ndarray | None]


class Executable(ABC):
    """A compiled graph: what the executables of all backends are.

    observer              what inputs and outputs of ops are reported to, from the next pass on
    workers               the threads that it computes with
    decode_batch          generated tokens that a pass has at most
    short_prompt          tokens of a prompt that may be computed whole, as if they were generated: `decode_batch` or more
    takes_layers_in_turn  whether several passes are faster by `hidden_passes` than one after the other
    on_share              called with the share of a pass (or of the passes of `hidden_passes`) that is done, after each layer;
                          not for passes that take a moment. None: nobody is
    """

    graph: Graph
    on_share: Callable[[float], None] | None = None

    _observer: Observer | None = None

    @property
    def observer(self) -> Observer | None:
        return self._observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        self._observer = observer

    @property
    @abstractmethod
    def workers(self) -> Workers: ...

    @property
    @abstractmethod
    def decode_batch(self) -> int: ...

    @property
    def short_prompt(self) -> int:
        return self.decode_batch

    @abstractmethod
    def new_cache(self, limit: int) -> Any:
        """An empty cache (see `Cache`) for a sequence of at most `limit` tokens."""

    @abstractmethod
    def hidden(
        self,
        tokens: np.ndarray,
        caches: Sequence[tuple[Any, int]],
        inputs: np.ndarray | None = None,
        generated: bool = False,
        last: Sequence[int] | None = None,
    ) -> np.ndarray:
        """One pass: int [n] -> float32 [n, n_embd], the graph's value `hidden`; the caches then hold the tokens.

        caches: each sequence's cache and how many of the tokens, in order, are its next ones; inputs: float32 [n, n_embd], for
        graphs with a `HiddenInput`; last: how many of each sequence's last tokens are wanted, whose rows alone are returned,
        None: all; generated: whether the kernels are those for tokens that are generated, for at most
        `decode_batch` of them, else those for prompts. The sums of the two have different orders. With the cpu backend neither
        depends on how many tokens a pass has, nor on how those before them were divided into passes. A sequence of more than
        `decode_batch` tokens, but no more than `short_prompt`, that begins with an empty cache and is alone in its pass may
        have sums in an order of its own.
        """

    @property
    def takes_layers_in_turn(self) -> bool:
        return False

    def hidden_passes(self, passes: Sequence[PassInputs]) -> list[np.ndarray]:
        """Passes as `hidden` makes them, no two over the same sequence."""
        return [self.hidden(*inputs) for inputs in passes]

    def pass_bytes(self, counts: Sequence[int], context: int) -> int | None:
        """Bytes of memory that a pass over sequences with so many tokens each takes, which have `context` tokens then, those
        of earlier passes included; None: not known."""
        return None

    def cache_bytes(self, tokens: int, passes: int) -> int | None:
        """Bytes that the cache of a sequence of so many tokens takes, which this many passes fill; None: not known."""
        return None

    def weight_bytes(self) -> int:
        """Bytes of memory that weights take in the end which are not used as they lie in a mapped file."""
        return 0

    def release(self) -> None:
        """Frees what is kept for the next pass, and can be made again."""
        return

    @abstractmethod
    def embeddings(self, ids: np.ndarray) -> np.ndarray:
        """Rows of the table of embeddings: int [n] -> float32 [n, n_embd]."""

    @abstractmethod
    def logits(self, hidden: np.ndarray, generated: bool | None = None) -> np.ndarray:
        """float32 [n, n_embd] -> float32 [n, n_vocab]. generated: as for `hidden`; None: for at most `decode_batch` rows."""


def last_rows(counts: Sequence[int], last: Sequence[int] | None) -> np.ndarray | None:
    """int64, which tokens of a pass are the `last` ones of their sequences, of which it has so many (`counts`); None: all."""
    if last is None or all(wanted >= count for count, wanted in zip(counts, last, strict=True)):
        return None
    ends = accumulate(counts)
    return np.concatenate([np.arange(end - min(wanted, n), end) for end, n, wanted in zip(ends, counts, last, strict=True)])
