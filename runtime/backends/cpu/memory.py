"""Memory of a pass: blocks, used again when nothing reads them any longer, and views of them as rows of activations."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from ....simd.memory import aligned_empty

TOKENS = "tokens"  # the axis of rows that are the tokens of a pass
_LARGE = 1 << 20  # bytes of a block
_NOTHING = np.empty(0, np.uint8)


class Block:
    """Bytes from the start of a cache line on. records: the tasks that have read and written
    them: their group (see `schedule`), whether it has written, the bytes of rows from and to, the generation."""

    __slots__ = ("address", "array", "generation", "nbytes", "records")

    def __init__(self, nbytes: int, array: np.ndarray | None = None):
        self.nbytes, self.generation = nbytes, 0
        self.array = aligned_empty((nbytes,), np.uint8) if array is None else array
        self.address = self.array.ctypes.data
        self.records: list[tuple[Any, bool, int, int, int]] = []


class Pool:
    """Blocks of a pass. Free blocks are used again, the one that was freed first before the others, so that fewer tasks have to
    wait for each other; of large ones the smallest that suffices, so that a pass takes less memory.

    is_transient: what used a free block has run, so that one that is too small can go when a larger one is made
    """

    def __init__(self, is_transient: bool = False) -> None:
        self._free: list[Block] = []
        self._made: list[Block] = []
        self._is_transient, self.nbytes = is_transient, 0

    def take(self, nbytes: int) -> Block:
        nbytes = -(-nbytes // 8) * 8  # so that numbers of any size fill it
        if nbytes >= _LARGE:
            found = min((b for b in self._free if nbytes <= b.nbytes <= 8 * nbytes), key=lambda b: b.nbytes, default=None)
        else:
            most = 2 * nbytes + 256
            for found in self._free:
                if nbytes <= found.nbytes <= most:
                    break
            else:
                found = None
        if found is not None:
            self._free.remove(found)
            found.generation += 1
            return found
        if self._is_transient:
            self._drop_largest()
            if nbytes >= _LARGE:  # so that a little more fits too; what is not written to takes no memory
                nbytes = 1 << (nbytes - 1).bit_length()
        self.nbytes += nbytes
        self._made.append(Block(nbytes))
        return self._made[-1]

    def release(self) -> None:
        """Lets go of all memory, but for what others have: the tasks of a pass refer to each other, so that Python finds out
        late that nobody needs it."""
        for block in self._made:
            block.array = _NOTHING
        self._made, self._free, self.nbytes = [], [], 0

    def _drop_largest(self) -> None:
        """Frees the largest of the blocks that were all too small."""
        block = max(self._free, key=lambda b: b.nbytes, default=None)
        if block is not None and block.nbytes >= _LARGE:
            self._free.remove(block)
            self._made.remove(block)
            self.nbytes -= block.nbytes

    def give_back(self, block: Block) -> None:
        self._free.append(block)


@dataclass(eq=False, slots=True)  # not frozen: a pass makes a thousand, and a frozen one takes four times as long
class View:
    """Rows of a block, one per token (or per token and expert), each of heads of numbers. Never changed once made.

    offset     bytes from the block's start to row 0
    rows       number of rows, row_bytes apart
    heads      of a row, head_bytes apart
    width      numbers of a head, contiguous
    dtype      float32 nearly always
    axis       what the rows are
    address    of row 0
    size       numbers of a row
    low, high  the bytes of a row that may be read or written, counted from the block's first row
    """

    block: Block
    offset: int
    rows: int
    row_bytes: int
    heads: int
    head_bytes: int
    width: int
    dtype: type = np.float32
    axis: str = TOKENS
    address: int = field(init=False)
    size: int = field(init=False)
    low: int = field(init=False)
    high: int = field(init=False)

    def __post_init__(self) -> None:
        offset, row_bytes = self.offset, self.row_bytes
        self.address, self.size = self.block.address + offset, self.heads * self.width
        self.low = offset % row_bytes if offset and row_bytes else 0
        item = 4 if self.dtype is np.float32 else np.dtype(self.dtype).itemsize
        self.high = self.low + (self.heads - 1) * self.head_bytes + item * self.width

    @property
    def is_row(self) -> bool:
        """Whether the numbers of each row are contiguous."""
        return self.heads == 1 or self.head_bytes == 4 * self.width

    @property
    def is_dense(self) -> bool:
        """Whether all numbers are contiguous."""
        return self.is_row and (self.rows == 1 or self.row_bytes == 4 * self.size)

    @property
    def array(self) -> np.ndarray:
        """[rows, heads, width]."""
        item = np.dtype(self.dtype).itemsize
        flat = self.block.array[self.offset :].view(self.dtype) if self.offset % item == 0 else None
        assert flat is not None
        return np.lib.stride_tricks.as_strided(
            flat, (self.rows, self.heads, self.width), (self.row_bytes, self.head_bytes, item)
        )

    @property
    def matrix(self) -> np.ndarray:
        """[rows, numbers of a row]; needs `is_row`."""
        assert self.is_row
        return replace(self, heads=1, head_bytes=0, width=self.size).array[:, 0]

    def reshaped(self, heads: int, width: int) -> View:
        """The same numbers as other heads; needs `is_row`."""
        assert self.is_row
        assert heads * width == self.size
        return View(self.block, self.offset, self.rows, self.row_bytes, heads, 4 * width, width, self.dtype, self.axis)

    def columns(self, first: int, width: int) -> View:
        """Numbers first ... first + width - 1 of every head."""
        at, sizes = self.offset + 4 * first, (self.rows, self.row_bytes, self.heads, self.head_bytes)
        return View(self.block, at, *sizes, width, self.dtype, self.axis)

    def row_range(self, first: int, count: int) -> View:
        """Rows first ... first + count - 1."""
        at, sizes = self.offset + first * self.row_bytes, (self.row_bytes, self.heads, self.head_bytes, self.width)
        return View(self.block, at, count, *sizes, self.dtype, self.axis)


def with_heads(view: View, heads: int, width: int) -> View:
    """The view with rows of `heads` times `width` numbers."""
    return view if view.heads == heads and view.width == width else view.reshaped(heads, width)


def dense(block: Block, rows: int, heads: int, width: int, axis: str = TOKENS) -> View:
    """Rows that follow each other from the block's start on."""
    return View(block, 0, rows, 4 * heads * width, heads, 4 * width, width, axis=axis)


def view_of(array: np.ndarray) -> View:
    """The numbers of an array as one row."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return View(Block(flat.nbytes, flat.view(np.uint8)), 0, 1, flat.nbytes, 1, flat.nbytes, flat.size, flat.dtype.type)


@dataclass(frozen=True)
class Partition:
    """How the rows and columns of a matrix are divided into the parts of a task.

    axis   what the rows are: tasks with rows of the same axis and the same partition may be chained
    """

    axis: str
    rows: int
    row_step: int
    columns: int
    column_step: int

    @cached_property
    def parts(self) -> int:
        return -(-self.rows // self.row_step) * self.across

    @property
    def across(self) -> int:
        return -(-self.columns // self.column_step)

    @cached_property
    def key(self) -> tuple:
        """Equal for tasks whose parts with the same number take the same rows, and the same columns if these are divided."""
        if self.across == 1:
            return self.axis, self.rows, self.row_step
        return self.axis, self.rows, self.row_step, self.columns, self.column_step

    @cached_property
    def words(self) -> tuple[int, int, int, int]:
        """The numbers of the field `partition` of records (see kernels.task_kernel)."""
        return self.rows, self.row_step, self.columns, self.column_step
