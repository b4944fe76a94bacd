"""A kernel's call divided into work items, and what the code of one item is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..llvm import LANES
from .work_items import WorkItems

LARGEST_TABLE = 8192  # bytes of an array that becomes part of the code


class ItemArray(NamedTuple):
    """An array of an item: its shape and dtype, as numpy spells it.

    place       index among the arrays that lie on the device
    is_aligned  whether it begins at a multiple of 16 bytes, as arrays on the device do
    """

    shape: tuple[int, ...]
    dtype: str
    place: int
    is_aligned: bool


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
        return ItemArray(shape, values.dtype.str, len(arrays) - 1, row_step % 16 == 0 and item_step % 16 == 0)

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
            shape = (1, *value.shape[1:])
            return on_device(value, shape, value[:1].nbytes, 0, False)
        if name in items.whole:
            return on_device(value, value.shape, 0, 0, False)
        if name in items.scratch:
            return ItemScratch(value.size // LANES * items.lanes)
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
