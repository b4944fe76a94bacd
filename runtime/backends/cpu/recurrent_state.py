"""The recurrent state of a sequence: of a fixed size, with checkpoints that the sequence can go back to.

A pass reads the state after the tokens of the past and writes the one after its own tokens to other memory; `commit` makes
this the current one. So a pass that fails changes nothing, and the state before the last pass is always there. Other positions
can only be gone back to where `checkpoint` was called: what lies between is computed again when it is needed.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from ....data_classes import dataclass
from ....simd.memory import aligned_empty


@dataclass(eq=False)
class State:
    """The states of all layers behind the first `length` tokens, uint8 [bytes]; of backends with other memory what these have.

    is_shared  others than the current sequence hold on to it: its memory is not written to again
    """

    length: int
    memory: Any
    is_shared: bool = False


class RecurrentState:
    """The current state of a sequence, the one before the last pass, and up to `limit` checkpoints. nbytes: of one state."""

    def __init__(self, nbytes: int, limit: int):
        self.size, self.limit = nbytes, limit
        self.current = self._zeros()
        self._previous: State | None = None
        self._next: Any = None  # written by the pass under way
        self._checkpoints: list[State] = []  # by length

    def _zeros(self) -> State:
        memory = aligned_empty((self.size,), np.uint8)
        memory[:] = 0
        return State(0, memory)

    def addresses(self) -> tuple[int, int]:
        """Of the state that a pass reads, and of the one that it writes."""
        if self._next is None:
            self._next = self._zeros().memory
        return self.current.memory.ctypes.data, self._next.ctypes.data

    def arrays(self, offset: int, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """The state at an offset of the memory that a pass reads, and of that which it writes: float32 of this shape."""
        if self._next is None:
            self._next = self._zeros().memory
        stop = offset + 4 * prod(shape)
        read, written = (memory[offset:stop].view(np.float32).reshape(shape) for memory in (self.current.memory, self._next))
        return read, written

    def commit(self, n: int) -> None:
        """The pass under way, of n tokens, is done."""
        assert self._next is not None
        before = self._previous
        self._previous, self.current = self.current, State(self.current.length + n, self._next)
        self._next = before.memory if before is not None and not before.is_shared else None

    def checkpoint(self) -> None:
        """Keeps the current state; of more than `limit` checkpoints the one goes whose neighbours are closest to each other."""
        if not self.current.length or any(self.current is state for state in self._checkpoints):
            return
        self.current.is_shared = True
        self._checkpoints.append(self.current)
        if len(self._checkpoints) > self.limit:
            lengths = [0, *(state.length for state in self._checkpoints)]
            gaps = [lengths[i + 2] - lengths[i] for i in range(len(lengths) - 2)]
            del self._checkpoints[gaps.index(min(gaps))]

    def resumable(self, length: int) -> int:
        """The longest beginning of the sequence, of at most `length` tokens, whose state is there."""
        return max((state.length for state in self._states() if state.length <= length), default=0)

    def truncate(self, length: int) -> int:
        """Goes back to the last state of at most `length` tokens; returns its length."""
        if length < self.current.length:
            target = self.resumable(length)
            found = next((state for state in self._states() if state.length == target), None)
            self._checkpoints = [state for state in self._checkpoints if state.length <= target]
            self._previous, self.current = None, found or self._zeros()
        return self.current.length

    def fork(self, length: int) -> RecurrentState:
        """A state of its own at `resumable(length)`, with the checkpoints up to there."""
        copy = type(self)(0, self.limit)
        copy.size = self.size
        copy._checkpoints = list(self._checkpoints)
        for state in filter(None, (self.current, self._previous)):
            state.is_shared = True
        copy.current, copy._previous = self.current, self._previous
        copy.truncate(length)
        return copy

    def restore(self, memory: np.ndarray, length: int) -> None:
        """Makes a state behind `length` tokens, uint8 [size], the only one."""
        self.current, self._previous, self._checkpoints = self._zeros(), None, []
        self.current.memory[:], self.current.length = memory, length

    @property
    def nbytes(self) -> int:
        """Bytes taken at present."""
        states = {id(state): state for state in self._states()}
        return self.size * (len(states) + (self._next is not None))

    def _states(self) -> list[State]:
        return [*self._checkpoints, *filter(None, (self._previous, self.current))]
