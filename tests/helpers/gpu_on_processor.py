"""A GPU of NVIDIA that is not there: its memory is torch's on the processor, and work items are computed one after the other by
the processor's kernels, from the addresses and steps that a launch is given."""

from __future__ import annotations

import ctypes
import os
from contextlib import nullcontext
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ggufmill.quantize.torch_encoders import encode_on_gpu, gpu_arrays, gpu_sweeps
from ggufmill.simd.cuda.division import ItemArray, ItemScratch
from ggufmill.simd.cuda.launch import work_of
from ggufmill.simd.cuda.work_items import launching


class ProgramOnProcessor:
    def __init__(self, number, kernel, items, arguments):
        self.work, self._kernel, self._arguments = work_of(kernel, items, arguments), kernel, arguments

    def launch(self, addresses, stream, items=None):
        count = self.work.items if items is None else items
        with launching(None):
            for row, column in (divmod(number, self.work.per_row) for number in range(count)):
                starts = [a + row * w.row_step + column * w.item_step for a, w in zip(addresses, self.work.arrays, strict=True)]
                given = [_argument(p, a, starts) for p, a in zip(self.work.parameters, self._arguments, strict=True)]
                self._kernel(*given)


def _argument(parameter: Any, argument: Any, starts: list[int]) -> Any:
    if isinstance(parameter, ItemArray):
        dtype = np.dtype(parameter.dtype)
        size = int(np.prod(parameter.shape)) * dtype.itemsize
        memory = (ctypes.c_uint8 * size).from_address(starts[parameter.place])
        return np.frombuffer(memory, dtype).reshape(parameter.shape) if size else np.empty(parameter.shape, dtype)
    if isinstance(parameter, ItemScratch):
        return np.zeros_like(argument)
    return argument


DEVICE = os.environ.get("GGUFMILL_TORCH_DEVICE", "cpu")  # one that begins with cuda is a GPU that is there


def use_it(monkeypatch) -> None:
    """Makes DEVICE of torch that GPU, if it is none."""
    if DEVICE.startswith("cuda"):
        return
    for module in (gpu_arrays, gpu_sweeps):
        monkeypatch.setattr(module, "Program", ProgramOnProcessor)
    monkeypatch.setattr(encode_on_gpu, "_on_stream", lambda device: nullcontext())
    done = SimpleNamespace(synchronize=lambda: None)
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None, record_event=lambda: done)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    for module in ("plain_rows", "encode"):  # those that encoding asks
        monkeypatch.setattr(import_module(f"ggufmill.quantize.{module}"), "is_gpu", lambda device: device == DEVICE)
