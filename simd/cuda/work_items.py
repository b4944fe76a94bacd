"""How the work of a kernel is divided among the threads of a GPU, and what the code of one thread is given.

A work item is what a kernel does for one row of its arrays: a superblock for most encoders. Items do not depend on each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any, NamedTuple

import numpy as np

LARGEST_TABLE = 8192  # bytes of an array that becomes part of the code


class WorkItems(NamedTuple):
    """The parameters of a kernel as work items see them, by name; those that are not named are the same for all items.

    inputs, outputs  arrays of which each item has an equal run. The first output has a row per item
    shared_rows      arrays [1, n] for all rows of the first input's matrix, of whose columns each item has its run; as inputs
                     where there is one for each row; without rows: none
    row_numbers      arrays with a number for each row of the first input
    scratch          arrays of bytes, 0 before and after: an item has its own
    lanes            how many lanes (simd.lanes) one thread computes: 1 where lanes are blocks, which items are instead
    names            of all parameters, for a kernel that takes them as *arguments
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    shared_rows: tuple[str, ...] = ()
    row_numbers: tuple[str, ...] = ()
    scratch: tuple[str, ...] = ()
    lanes: int = 16
    names: tuple[str, ...] = ()


def parameters_of(kernel: Any) -> tuple[str, ...]:
    """The names of a kernel's parameters."""
    return tuple(signature(kernel.__wrapped__).parameters)


class ItemArray(NamedTuple):
    """An array of an item: its shape and dtype, as numpy spells it. place: index among the arrays that lie on the device."""

    shape: tuple[int, ...]
    dtype: str
    place: int


class ItemScratch(NamedTuple):
    """Bytes of an item, 0 before."""

    size: int


class DeviceArray(NamedTuple):
    """An array on the device, for all items.

    values              the array of the call
    row_step, item_step bytes from the part of an item to that of the one in the next row, and of the next within a row
    written             whether it is an output
    """

    values: np.ndarray
    row_step: int
    item_step: int
    written: bool


class ItemWork(NamedTuple):
    """A kernel's call, divided.

    items, per_row  how many there are, and in a row of the first input's matrix
    parameters      for the code of an item: ItemArray, ItemScratch, numbers, small arrays, tuples of these
    arrays          what lies on the device
    """

    items: int
    per_row: int
    parameters: tuple[Any, ...]
    arrays: list[DeviceArray]


def divided(items: WorkItems, names: Sequence[str], arguments: Sequence[Any]) -> ItemWork:
    """A call of a kernel with these parameters, divided into work items."""
    given = dict(zip(names, arguments, strict=True))
    count, first = len(given[items.outputs[0]]), given[items.inputs[0]]
    arrays: list[DeviceArray] = []

    def on_device(values: np.ndarray, shape: tuple[int, ...], row_step: int, item_step: int, written: bool) -> ItemArray:
        arrays.append(DeviceArray(values, row_step, item_step, written))
        return ItemArray(shape, values.dtype.str, len(arrays) - 1)

    def run(values: np.ndarray, written: bool) -> ItemArray:
        size = values.size // count
        return on_device(
            values, (1,) * (values.ndim - 1) + (size,), per_row * size * values.itemsize, size * values.itemsize, written
        )

    def parameter(name: str, value: Any) -> Any:
        if name in items.inputs or name in items.outputs:
            return run(value, name in items.outputs)
        if name in items.shared_rows and value.size:
            if value.size == first.size:
                return run(value, False)
            size = first.size // count
            return on_device(value, (1, size), 0, size * value.itemsize, False)
        if name in items.row_numbers:
            return on_device(value, (1,), value.itemsize, 0, False)
        if name in items.scratch:
            return ItemScratch(value.size // 16 * items.lanes)
        return same_for_all(value)

    def same_for_all(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(same_for_all, value))
        if isinstance(value, np.ndarray) and value.nbytes > LARGEST_TABLE:
            return on_device(value, value.shape, 0, 0, False)
        return value

    shared = next((given[name].size for name in items.shared_rows if 0 < given[name].size < first.size), first.size)
    rows = next((len(given[name]) for name in items.row_numbers if name in given), first.size // shared)
    per_row = count // rows
    return ItemWork(count, per_row, tuple(parameter(name, value) for name, value in given.items()), arrays)


Launch = Callable[[Any, WorkItems, Sequence[Any]], None]
"""Computes a kernel's call, by its work items: launch(kernel, items, arguments)."""


class _Thread(threading.local):
    launch: Launch | None = None  # computes the kernels that this thread calls


_thread = _Thread()


@contextmanager
def launching(launch: Launch | None) -> Iterator[None]:
    """Within this, kernels that this thread calls and that have work items are computed by `launch`; None: by the processor."""
    before, _thread.launch = _thread.launch, launch
    try:
        yield
    finally:
        _thread.launch = before


def launch_here() -> Launch | None:
    """What computes kernels that have work items for this thread; None: the processor."""
    return _thread.launch
