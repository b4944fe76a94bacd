"""Task kernels (see simd.team) whose operands are records with named fields.

    @task_kernel(x=reads(ROWS), out=writes(ROWS), factor=REAL)
    def scale(task, number):
        first, stop, column, width = cell(task, number)
        for r in range(first, stop):
            x, out = row_of(task.x, r, column, width), row_of(task.out, r, column, width)

This is all that says how an operation is called: `Schedule.task` fills the record by these names, and what a task reads and
writes follows from them. Every record has the field `partition` too: how the matrix is divided into parts.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from .....simd.compile import kernel
from .....simd.memory import view
from .....simd.team import TaskKernel

PARTITION = np.dtype([(name, np.int64) for name in ("rows", "row_step", "columns", "column_step")])
# Rows of contiguous float32 numbers, row_bytes apart; rows of heads of contiguous numbers; an array without gaps.
ROWS = np.dtype([(name, np.int64) for name in ("address", "row_bytes")])
HEADS = np.dtype([(name, np.int64) for name in ("address", "row_bytes", "head_bytes", "heads", "width")])
ARRAY = np.dtype(np.int64)


_NUMBERS = int, float


class Operand(NamedTuple):
    """A field of a record. reads, writes: what the kernel does with the memory that the field describes."""

    dtype: np.dtype
    reads: bool = False
    writes: bool = False


# Numbers; the address of an array that does not change while the program runs (None: 0).
INT, REAL, CONSTANT = Operand(np.dtype(np.int64)), Operand(np.dtype(np.float64)), Operand(ARRAY)


def reads(dtype: np.dtype) -> Operand:
    return Operand(dtype, reads=True)


def writes(dtype: np.dtype) -> Operand:
    return Operand(dtype, writes=True)


def updates(dtype: np.dtype) -> Operand:
    return Operand(dtype, reads=True, writes=True)


class OperandKernel(TaskKernel):
    """A task kernel with these operands."""

    def __init__(self, function: Callable[[Any, int], None], operands: Mapping[str, Operand]):
        fields = [("partition", PARTITION), *((name, operand.dtype) for name, operand in operands.items())]
        dtype = np.dtype(fields, align=True)
        super().__init__(function, dtype)
        self.operands = dict(operands)
        self._fields = {
            name: (attrgetter(*names), (0,) * len(names)) if (names := operand.dtype.names) else (None, (0,))
            for name, operand in operands.items()
        }
        self._struct = struct.Struct("4q" + "".join(map(_format, operands.values())))
        assert self._struct.size == dtype.itemsize

    def pack(self, partition: tuple[int, ...], values: Mapping[str, Any]) -> bytes:
        """The record of these operands: numbers, arrays of numpy, or views (see ..memory), from which a field takes what it has
        names for; None: zeros. partition: the numbers of that field."""
        if values.keys() != self.operands.keys():
            raise TypeError(f"{self.function.__name__} takes {', '.join(self.operands)}, not {', '.join(values)}")
        numbers: list[int | float] = list(partition)
        for name, (fields, zeros) in self._fields.items():
            value = values[name]
            if value is None:
                numbers += zeros
            elif fields is not None:
                numbers += fields(value)
            elif isinstance(value, np.ndarray):
                numbers.append(value.ctypes.data)
            else:
                numbers.append(value if isinstance(value, _NUMBERS) else getattr(value, "address", value))
        return self._struct.pack(*numbers)


def _format(operand: Operand) -> str:
    return "d" if operand.dtype == np.float64 else f"{operand.dtype.itemsize // 8}q"


def task_kernel(**operands: Operand) -> Callable[[Callable[[Any, int], None]], OperandKernel]:
    """Makes a function (record, number) a task kernel whose record has these fields."""
    return lambda function: OperandKernel(function, operands)


@kernel
def cell(task, number):
    """(first row, row after the last, first column, number of columns) of part `number`; cells are counted along the columns
    first."""
    p = task.partition
    across = (p.columns + p.column_step - 1) // p.column_step
    row, column = number // across * p.row_step, number % across * p.column_step
    return row, min(p.rows, row + p.row_step), column, min(p.column_step, p.columns - column)


@kernel
def row_of(rows, row, column, width):
    """Numbers of a row from a column on, float32 [width]. rows: ROWS."""
    return view(rows.address + row * rows.row_bytes + 4 * column, width, np.float32)


@kernel
def head_of(heads, row, head, column, width):
    """As `row_of`, of a head of a row. heads: HEADS."""
    return view(heads.address + row * heads.row_bytes + head * heads.head_bytes + 4 * column, width, np.float32)
