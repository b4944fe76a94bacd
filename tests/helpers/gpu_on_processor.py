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
from driver_on_processor import Pointers, gpu_with

from ggufmill.quantize.torch_encoders import encode_on_gpu, gpu_arrays, gpu_refinement, gpu_sweeps
from ggufmill.simd.cuda import launch
from ggufmill.simd.cuda.division import ItemArray, ItemScratch
from ggufmill.simd.cuda.launch import work_of
from ggufmill.simd.cuda.work_items import launching


class ProgramOnProcessor:
    def __init__(self, number, kernel, items, arguments):
        self.work, self._kernel, self._arguments = work_of(kernel, items, arguments), kernel, arguments
        _programs.append(self)
        self.entry = ctypes.c_void_p(len(_programs))

    def launch(self, addresses, count):
        with launching(None):
            for row, column in (divmod(number, self.work.per_row) for number in range(count)):
                starts = [a + row * w.row_step + column * w.item_step for a, w in zip(addresses, self.work.arrays, strict=True)]
                given = [_argument(p, a, starts) for p, a in zip(self.work.parameters, self._arguments, strict=True)]
                self._kernel(*given)


_programs: list[ProgramOnProcessor] = []


def _launched(kernel: int, numbers: Pointers, stream: int) -> None:
    program = _programs[kernel - 1]
    addresses = [numbers.number(2 + 3 * i) for i in range(len(program.work.arrays))]
    program.launch(addresses, numbers.number(0, ctypes.c_int32))


_GPU = gpu_with(_launched)


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
    monkeypatch.setattr(launch, "device", lambda number: _GPU)
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    for module in (encode_on_gpu, gpu_refinement):
        monkeypatch.setattr(module, "stream_of", lambda device: stream)
        monkeypatch.setattr(module, "on_stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    for module in ("plain_rows", "encode"):  # those that encoding asks
        monkeypatch.setattr(import_module(f"ggufmill.quantize.{module}"), "is_gpu", lambda device: device == DEVICE)
