"""The memory of a pass: where the values of the graph lie, and what is freed when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

import numpy as np

from ....data_classes import dataclass
from ...graph import Op, Value
from .memory import TOKENS, Partition, Pool, View, dense


@dataclass
class PassValue:
    """A value of the graph in a pass.

    view         its memory
    partition    of the task that writes it, if that has one
    inputs       its forms for products (8-bit codes, blocks of bf16, ...), by block of activations or form of input
    blocks       memory that is freed with it
    is_observed  whether the observer gets it already, as input of an op
    """

    view: View
    partition: Partition | None = None
    inputs: dict[Any, Any] = field(default_factory=dict)
    blocks: list[View] = field(default_factory=list)
    is_observed: bool = False


class PassMemory:
    """The memory of a pass of n tokens.

    last_use       value index -> number of the last step that reads it
    position, ops  number and ops of the step that is being lowered
    """

    def __init__(self, n: int, last_use: Mapping[int, int]):
        self.n, self.pool = n, Pool()
        self.values: dict[int, PassValue] = {}
        self.position, self.ops = 0, tuple[Op, ...]()
        self._last_use = last_use
        self._users: dict[int, int] = {}  # values by block
        self._temporary: list[View] = []

    def allocate(self, rows: int, heads: int, width: int, axis: str = TOKENS) -> View:
        """Dense rows of memory that nothing else uses until it is freed."""
        return dense(self.pool.take(4 * rows * heads * width), rows, heads, width, axis)

    def temporary(self, rows: int, heads: int, width: int, axis: str = TOKENS) -> View:
        """Rows that live until the lowering of this op is done."""
        view = self.allocate(rows, heads, width, axis)
        self._temporary.append(view)
        return view

    def take_temporary(self, view: View) -> View:
        """Has memory live until the lowering of this op is done."""
        self._temporary.append(view)
        return view

    def numbers(self, count: int, dtype: type = np.int64) -> View:
        """Memory for numbers of a dtype, as one row."""
        nbytes = count * np.dtype(dtype).itemsize
        return View(self.pool.take(nbytes), 0, 1, nbytes, 1, nbytes, count, dtype)

    def words(self, count: int, dtype: type = np.int64) -> View:
        """As `numbers`, until the lowering of this op is done."""
        return self.take_temporary(self.numbers(count, dtype))

    def release_temporary(self) -> None:
        for view in self._temporary:
            self.pool.give_back(view.block)
        self._temporary = []

    # --- values -------------------------------------------------------------------------------------------------------

    def new(self, value: Value, like: View | None = None, partition: Partition | None = None) -> View:
        """Memory for a value of the graph, with the rows of `like` (None: the tokens)."""
        heads, width = value.shape if len(value.shape) == 2 else (1, value.shape[0])
        rows, axis = (self.n, TOKENS) if like is None else (like.rows, like.axis)
        if axis != TOKENS:  # per token and expert: the shape's first axis are the experts
            heads = 1
        view = self.allocate(rows, heads, width, axis)
        self.put(value, view, partition)
        return view

    def put(self, value: Value, view: View, partition: Partition | None = None) -> None:
        """Sets the memory of a value; several values may share a block."""
        self.values[value.index] = PassValue(view, partition)
        self._users[id(view.block)] = self._users.get(id(view.block), 0) + 1

    def view(self, value: Value) -> View:
        return self.values[value.index].view

    def borrow(self, value: Value, view: View) -> None:
        """As `put`, with memory that does not belong to this pass."""
        self.put(value, view)
        self._users[id(view.block)] += 1

    def drop(self, index: int) -> None:
        """Frees the value of this index, which no later op reads."""
        stored = self.values.pop(index)
        block = stored.view.block
        for view in stored.blocks:
            self.pool.give_back(view.block)
        self._users[id(block)] -= 1
        if not self._users[id(block)]:
            del self._users[id(block)]
            self.pool.give_back(block)

    def keep_with(self, value: Value, view: View) -> View:
        """Has memory live as long as a value."""
        self.values[value.index].blocks.append(view)
        return view

    def overwritable(self, value: Value) -> bool:
        """Whether the op that is being lowered, as the last to read a value, may write its result there."""
        last_use = self._last_use
        if last_use[value.index] > self.position or sum(value in op.inputs for op in self.ops) > 1:
            return False
        view = self.values[value.index].view
        for index, each in self.values.items():
            other = each.view
            if (
                other.block is view.block
                and last_use[index] > self.position
                and other.low < view.high
                and view.low < other.high
            ):
                return False
        return True

    def result(self, value: Value, source: Value, partition: Partition | None, rows: bool = False) -> View:
        """Memory for a value that is computed from `source` element by element: that of the source where it may be overwritten.

        rows: the numbers of each row have to be contiguous."""
        view = self.view(source)
        if (rows and not view.is_row) or not self.overwritable(source):
            return self.new(value, view, partition)
        if len(value.shape) == 2 and view.axis == TOKENS and view.heads != value.shape[0]:
            view = view.reshaped(*value.shape)
        self.put(value, view, partition)
        return view
