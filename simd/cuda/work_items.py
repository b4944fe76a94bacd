"""Which kernels can be divided among the threads of a GPU, and what computes them for a thread of this program.

A work item is what a kernel does for one row of its arrays: a superblock for most encoders. Items do not depend on each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any, NamedTuple


class WorkItems(NamedTuple):
    """The parameters of a kernel as work items see them, by name; those that are not named are the same for all items.

    inputs, outputs  arrays of which each item has an equal run. The first output has a row per item
    shared_rows      arrays [1, n] for all rows of the first input's matrix, of whose columns each item has its run; as inputs
                     where there is one for each row; without rows: none
    row_numbers      arrays with a number for each row of the first input, or [rows, m] with m of them
    whole            arrays that all items read as they are; small ones that are not named become part of the code
    scratch          arrays of bytes, 0 before and after: an item has its own
    lanes            how many lanes (simd.lanes) one thread computes: 1 where lanes are blocks, which items are instead
    names            of all parameters, for a kernel that takes them as *arguments
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    shared_rows: tuple[str, ...] = ()
    row_numbers: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    scratch: tuple[str, ...] = ()
    lanes: int = 16
    names: tuple[str, ...] = ()


def parameters_of(kernel: Any) -> tuple[str, ...]:
    """The names of a kernel's parameters."""
    return tuple(signature(kernel.__wrapped__).parameters)


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
