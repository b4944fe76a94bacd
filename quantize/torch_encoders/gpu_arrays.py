"""Calls of kernels written down as launches on a GPU of NVIDIA, to be repeated with other numbers in the same memory."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ...simd.cuda.launch import CallList, Program
from ...simd.cuda.work_items import WorkItems

if TYPE_CHECKING:
    from ...simd.compile.kernels import Kernel

_tables: dict[tuple[int, int], tuple[np.ndarray, Tensor]] = {}
_sending = Lock()
_ALIGNMENT = 256  # bytes


class Recording:
    """Writes down the kernels that are called within `work_items.launching(this)`, and computes none of them.

    The memory of arrays is neither read nor written. Those that kernels are given lie one after the other in a piece of memory
    of the device, of `size` bytes, in the order in which `place` gets them; tables apart.
    """

    def __init__(self, device: torch.device):
        self.device, self.size = device, 0
        self._places: dict[int, tuple[np.ndarray, int]] = {}  # by address, with the array, whose address is no other's then
        self._programs: list[tuple[Program, list[int | Tensor]]] = []

    def place(self, array: np.ndarray) -> int:
        """Where an array begins in the memory."""
        address = address_of(array)
        for start, (known, place) in self._places.items():
            if start <= address < start + known.nbytes:
                return place + address - start
        self._places[address] = array, self.size
        self.size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        return self._places[address][1]

    def __call__(self, kernel: Kernel, items: WorkItems, arguments: Sequence[Any]) -> None:
        program = Program(self.device.index or 0, kernel, items, arguments)
        places = [
            self.place(array.values) if array.row_step or array.item_step else table_on(array.values, self.device)
            for array in program.work.arrays
        ]
        self._programs.append((program, places))

    def add_to(self, calls: CallList, memory: Tensor, share: float) -> None:
        """Adds the launches, for a share of the items from the first on, in some memory, uint8."""
        start = memory.data_ptr()
        for program, places in self._programs:
            addresses = [start + p if isinstance(p, int) else p.data_ptr() for p in places]
            calls.launch(program, addresses, round(program.work.items * share))


def address_of(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def table_on(array: np.ndarray, device: torch.device) -> Tensor:
    """An array that stays the same for all calls: it remains on the device."""
    key = device.index or 0, id(array)
    with _sending:
        if key not in _tables:
            _tables[key] = array, torch.from_numpy(array.copy()).to(device)
            torch.cuda.current_stream(device).synchronize()  # other streams use it, too
        return _tables[key][1]
