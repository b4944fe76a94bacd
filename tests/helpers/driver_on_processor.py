"""CUDA's driver that is not there: memory is the processor's, and kernels are functions of Python."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from ggufmill.operating_system.nvidia import Gpu

_NUMBER = ctypes.c_uint64


class Pointers:
    """The numbers that a kernel is given: their addresses lie one after the other from an address on."""

    def __init__(self, address: int):
        self._address = address

    def number(self, place: int, kind: Any = _NUMBER) -> int:
        return kind.from_address(_NUMBER.from_address(self._address + 8 * place).value).value


def gpu_with(launched: Callable[[int, Pointers, int], object]) -> Gpu:
    """A GPU whose kernels are launched as launched(kernel, its numbers, stream)."""

    def copied(to: int, start: int, size: int, stream: int) -> int:
        ctypes.memmove(to, start, size)
        return 0

    def launch(kernel: int, *rest: int) -> int:
        launched(kernel, Pointers(rest[8]), rest[7])
        return 0

    functions = {"cuLaunchKernel": (launch, 11), "cuStreamSynchronize": (lambda _: 0, 1)}
    functions |= {f"cuMemcpy{way}Async_v2": (copied, 4) for way in ("HtoD", "DtoH", "DtoD")}
    library = {name: ctypes.CFUNCTYPE(ctypes.c_int, *[_NUMBER] * n)(f) for name, (f, n) in functions.items()}
    library["cuCtxSetCurrent"] = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda context: 0)
    gpu = object.__new__(Gpu)
    gpu._cuda, gpu._context, gpu.number, gpu.kind = SimpleNamespace(**library), ctypes.c_void_p(), 0, (9, 0, 0)
    return gpu
