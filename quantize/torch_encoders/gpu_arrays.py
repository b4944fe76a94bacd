"""Kernels on a GPU of NVIDIA, whose arrays are tensors of torch there."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ...simd.cuda.launch import Program
from ...simd.cuda.work_items import WorkItems

if TYPE_CHECKING:
    from ...simd.compile.kernels import Kernel

_tables: dict[tuple[int, int], tuple[np.ndarray, Tensor]] = {}
_sending = Lock()
_PARTS = 4  # of an array: one is sent while the next is copied


class GpuArrays:
    """Computes the kernels that are called within `work_items.launching(this)` on a GPU, one after the other.

    What `standing_for` makes stands for a tensor, and what a kernel writes for one that is made for it: the memory of these
    arrays is neither read nor written. All others are sent.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._tensors: dict[int, tuple[np.ndarray, Tensor]] = {}  # by address, with the array, whose address is no other's then

    def standing_for(self, tensor: Tensor) -> np.ndarray:
        array = np.empty(tuple(tensor.shape), torch.empty(0, dtype=tensor.dtype).numpy().dtype)
        self._tensors[_address(array)] = array, tensor
        return array

    def tensor(self, array: np.ndarray) -> Tensor:
        """What an array that a kernel wrote stands for: uint8, flat."""
        return self._tensors[_address(array)][1]

    def __call__(self, kernel: Kernel, items: WorkItems, arguments: Sequence[Any]) -> None:
        program = Program(self.device.index or 0, kernel, items, arguments)
        addresses = [self._on_device(array.values, array.written, not (array.row_step or array.item_step)).data_ptr()
                     for array in program.work.arrays]  # fmt: skip
        program.launch(addresses, torch.cuda.current_stream(self.device).cuda_stream)

    def _on_device(self, array: np.ndarray, is_written: bool, is_table: bool) -> Tensor:
        if (known := self._tensors.get(_address(array))) is not None:
            return known[1]
        if is_table:
            return table_on(array, self.device)
        if is_written:
            tensor = torch.empty(array.nbytes, dtype=torch.uint8, device=self.device)
        else:
            tensor = sent(array, self.device)
        self._tensors[_address(array)] = array, tensor
        return tensor


def sent(array: np.ndarray, device: torch.device) -> Tensor:
    """An array on a device, by way of memory that this reads by itself, and that torch keeps: complete for what the stream does
    next."""
    pinned = torch.empty(array.shape, dtype=getattr(torch, array.dtype.name), pin_memory=device.type == "cuda")
    tensor = torch.empty_like(pinned, device=device)
    step = max(1, -(-len(array) // _PARTS))
    for part in (slice(first, first + step) for first in range(0, len(array), step)):
        pinned[part].numpy()[:] = array[part]
        tensor[part].copy_(pinned[part], non_blocking=True)
    return tensor


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def table_on(array: np.ndarray, device: torch.device) -> Tensor:
    """An array that stays the same for all calls: it remains on the device."""
    key = device.index or 0, id(array)
    with _sending:
        if key not in _tables:
            _tables[key] = array, torch.from_numpy(array.copy()).to(device)
            torch.cuda.current_stream(device).synchronize()  # other streams use it, too
        return _tables[key][1]
