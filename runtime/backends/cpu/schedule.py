"""A pass as programs for the team of threads: tasks are put into stages by what they read and write.

A task may run beside all others that it does not depend on: its stage is the first one behind those of all tasks that wrote
what it reads, or that read or wrote what it writes. Where these have the same partition (see memory.Partition), it is not put
into a stage of its own but chained to them: its part p follows their parts p on the same thread. So a token's small operations,
such as an addition, a norm and the quantisation of the result, take one stage, and operations on many tokens go through memory
once.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ....simd import team
from ....simd.workers import Workers
from .kernels import row_kernels
from .kernels.task_kernel import OperandKernel
from .memory import Partition, View

_RECORD_BYTES = 1 << 15  # of memory for records that is taken at a time
_NO_PARTITION = 0, 0, 0, 0


class Group:
    """Tasks that are chained: one row of a program.

    program, row   where it stands once the program is finished
    """

    __slots__ = ("epoch", "into", "key", "level", "parts", "program", "row", "tasks")

    def __init__(self, level: int, key: tuple | None, parts: int, epoch: object):
        self.level, self.key, self.parts, self.epoch = level, key, parts, epoch
        self.tasks: list[tuple[int, int]] = []  # function, argument
        self.into: Group | None = None
        self.program: np.ndarray | None = None
        self.row = 0


class Schedule:
    """Collects tasks and Python functions, in an order in which they could run one after the other."""

    def __init__(self) -> None:
        self._steps: list[np.ndarray | Callable[[], None]] = []
        self._groups: list[Group] = []
        self._epoch = object()  # of the program that tasks are added to
        self._records: list[np.ndarray] = []
        self._bytes = memoryview(b"")  # of the last of them
        self._used = self._base = 0
        self._kept: list[object] = []

    def keep(self, *objects: object) -> None:
        """Has objects live as long as the programs."""
        self._kept += objects

    def record(self, packed: bytes) -> int:
        """The address of a copy of a record, of a multiple of 8 bytes."""
        at, end = self._used, self._used + len(packed)
        if end > len(self._bytes):
            self._records.append(np.empty(max(_RECORD_BYTES, len(packed)), np.uint8))
            self._bytes, self._base = self._records[-1].data, self._records[-1].ctypes.data
            at, end = 0, len(packed)
        self._bytes[at:end] = packed
        self._used = end
        return self._base + at

    def numbers(self, numbers: Iterable[int]) -> int:
        """The address of these int64."""
        words = tuple(numbers)
        return self.record(struct.pack(f"{len(words)}q", *words))

    def task(
        self,
        kernel: OperandKernel,
        parts: Partition | int,
        *,
        reads: Iterable[View] = (),
        writes: Iterable[View] = (),
        **operands: Any,
    ) -> Group:
        """Adds a task with these operands (see `OperandKernel.pack`). Tasks with a Partition can be chained.

        reads, writes: memory beside that of the operands.
        """
        words = parts.words if isinstance(parts, Partition) else _NO_PARTITION
        record = self.record(kernel.pack(words, operands))
        read, written = list(reads), list(writes)
        for name, operand in kernel.operands.items():
            value = operands[name]
            if isinstance(value, View):
                if operand.reads:
                    read.append(value)
                if operand.writes:
                    written.append(value)
            elif isinstance(value, np.ndarray):
                self._kept.append(value)
        return self.place(kernel.address, record, parts, read, written)

    def place(
        self, function: int, argument: int, parts: Partition | int, reads: Iterable[View], writes: Iterable[View]
    ) -> Group:
        """Adds a task by the addresses of its function and its argument."""
        key, count = (parts.key, parts.parts) if isinstance(parts, Partition) else (None, parts)
        group = self._find_group(key, count, reads := tuple(reads), writes := tuple(writes))
        group.tasks.append((function, argument))
        for view in reads:
            block = view.block
            block.records.append((group, False, view.low, view.high, block.generation))
        for view in writes:
            block, low, high = view.block, view.low, view.high
            generation = block.generation
            if low == 0 and high >= view.row_bytes:
                block.records.clear()
            else:  # what lies within the same bytes of rows need not be asked any longer
                block.records = [r for r in block.records if r[4] != generation or r[2] < low or r[3] > high]
            block.records.append((group, True, low, high, generation))
        return group

    def call(self, function: Callable[[], None]) -> None:
        """Adds a Python function: it runs after all tasks before it, and before all that follow."""
        self._finish_program()
        self._steps.append(function)

    def finish(self) -> list[np.ndarray | Callable[[], None]]:
        """Programs and functions, to be run one after the other for as long as this lives."""
        self._finish_program()
        return self._steps

    def _find_group(self, key: tuple | None, parts: int, reads: tuple[View, ...], writes: tuple[View, ...]) -> Group:
        """The group that a task is chained to, or a new one."""
        level, last = -1, list[Group]()
        chains = key is not None
        for views, writing in ((reads, False), (writes, True)):
            for view in views:
                low, high, block = view.low, view.high, view.block
                generation = block.generation
                for group, writes_too, first, end, at_generation in block.records:
                    if not (writing or writes_too):
                        continue
                    same = at_generation == generation
                    if same and (first >= high or end <= low):
                        continue
                    while group.into is not None:
                        group = group.into
                    if group.epoch is not self._epoch or group.level < level:
                        continue
                    if group.level > level:
                        level, last, chains = group.level, [group], key is not None
                    elif group not in last:
                        last.append(group)
                    # What is a block of other rows by now may be read by another part than the one that writes it.
                    chains = chains and group.key == key and (same or parts == 1)
        if last and chains:
            first = last[0]
            for other in last[1:]:
                first.tasks += other.tasks
                other.into, other.tasks = first, []
            return first
        group = Group(level + 1, key, parts, self._epoch)
        self._groups.append(group)
        return group

    def _finish_program(self) -> None:
        self._epoch = object()
        groups = sorted((group for group in self._groups if group.into is None), key=lambda group: group.level)
        self._groups = []
        if not groups:
            return
        program = np.empty((len(groups), 4), np.int64)
        for row, group in enumerate(groups):
            if len(group.tasks) == 1:
                function, argument = group.tasks[0]
            else:
                rows = [word for function, argument in group.tasks for word in (0, function, argument, 0)]
                function, argument = row_kernels.chain.address, self.numbers([len(group.tasks), *rows])
            program[row] = group.level, function, argument, group.parts
            group.program, group.row = program, row
        self._steps.append(program)


def run(steps: Iterable[np.ndarray | Callable[[], None]], workers: Workers) -> None:
    """Runs programs and Python functions in order. The threads are woken for each program: during a function they may have gone
    to sleep, and a program that has begun wakes nobody."""
    for step in steps:
        if isinstance(step, np.ndarray):
            team.run(workers.ready(), step)
        else:
            step()
