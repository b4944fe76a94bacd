"""CUDA's driver, by the few functions that are needed here: devices, PTX made into machine code, launches.

Each device has one context, the one that torch uses, too; memory and streams are torch's.
Source: NVIDIA's CUDA Driver API, https://docs.nvidia.com/cuda/cuda-driver-api/
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from functools import cache
from typing import Any

import numpy as np

_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_PTX = 1  # CU_JIT_INPUT_PTX
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
_THREADS = 64  # of a block: kernels use up to 255 registers, and their speed hardly depends on it


class GpuError(Exception):
    """What the driver says, in a line."""


@cache
def _library() -> Any:
    """The driver. Raises GpuError where there is none."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise GpuError(f"no driver of NVIDIA's GPUs here: {error}") from None
    _check(library, library.cuInit(0), "start CUDA's driver")
    return library


def is_here() -> bool:
    """Whether there is a driver of NVIDIA's GPUs. (Where torch calls an AMD GPU cuda, there is none.)"""
    try:
        return bool(_library())
    except GpuError:
        return False


def _check(library: Any, result: int, what: str) -> None:
    if result:
        text = c_char_p()
        library.cuGetErrorString(result, byref(text))
        raise GpuError(f"cannot {what}: {(text.value or b'').decode() or f'error {result}'}")


@cache
def device(number: int) -> Gpu:
    """A GPU, by its number. Raises GpuError if it is not there."""
    return Gpu(number)


class Gpu:
    """kind: what machine code depends on: compute capability and version of the driver."""

    def __init__(self, number: int):
        self._cuda, self._context, self.number = _library(), c_void_p(), number
        handle, numbers = c_int(), (c_int(), c_int(), c_int())
        self._do("find GPU", "cuDeviceGet", byref(handle), number)
        self._do("use GPU", "cuDevicePrimaryCtxRetain", byref(self._context), handle)
        for value, attribute in zip(numbers, (_MAJOR, _MINOR), strict=False):
            self._do("ask GPU", "cuDeviceGetAttribute", byref(value), attribute, handle)
        self._do("ask the driver of GPU", "cuDriverGetVersion", byref(numbers[2]))
        self.kind = tuple(n.value for n in numbers)

    def _do(self, what: str, function: str, *arguments: Any) -> None:
        _check(self._cuda, getattr(self._cuda, function)(*arguments), f"{what} {self.number}")

    def use(self) -> None:
        """Makes this the device of the thread that calls."""
        self._do("use GPU", "cuCtxSetCurrent", self._context)

    def machine_code(self, ptx: str) -> bytes:
        """What the driver makes of PTX, for devices of this `kind`; of large kernels it takes seconds."""
        state, code, size, text = c_void_p(), c_void_p(), c_size_t(), ptx.encode() + b"\0"
        what = "compile a kernel for GPU"
        self._do(what, "cuLinkCreate_v2", c_uint(0), None, None, byref(state))
        try:
            self._do(
                what, "cuLinkAddData_v2", state, c_int(_PTX), c_char_p(text), c_size_t(len(text)), None, c_uint(0), None, None
            )
            self._do(what, "cuLinkComplete", state, byref(code), byref(size))
            return ctypes.string_at(code.value or 0, size.value)
        finally:
            self._do(what, "cuLinkDestroy", state)

    def entry(self, code: bytes, name: str) -> c_void_p:
        """A kernel of machine code."""
        module, function = c_void_p(), c_void_p()
        self._do("load a kernel on GPU", "cuModuleLoadData", byref(module), c_char_p(code))
        self._do("find a kernel on GPU", "cuModuleGetFunction", byref(function), module, c_char_p(name.encode()))
        return function

    def call(self, function: str, *arguments: int) -> tuple[int, ...]:
        """What calls a function of the driver without Python: its address, and its arguments, numbers or addresses."""
        address = ctypes.cast(getattr(self._cuda, function), c_void_p).value
        assert address is not None
        return address, *arguments

    def context_call(self) -> tuple[int, ...]:
        """As `call`: what makes this the device of the thread."""
        return self.call("cuCtxSetCurrent", self._context.value or 0)

    def launch_call(self, function: c_void_p, count: int, arguments: LaunchArguments, stream: int) -> tuple[int, ...]:
        """As `call`: what starts count threads on a stream (a number of torch's)."""
        blocks, pointers = -(-count // _THREADS), ctypes.addressof(arguments.pointers)
        return self.call("cuLaunchKernel", function.value or 0, blocks, 1, 1, _THREADS, 1, 1, 0, stream, pointers, 0)

    def check(self, result: int, what: str) -> None:
        """Raises GpuError for what a function answered, if it failed."""
        _check(self._cuda, result, f"{what} {self.number}")


def copy_call(to: int, start: int, size: int) -> tuple[int, ...]:
    """As `Gpu.call`: what copies bytes from one address of this process to another. Its answer is not an error."""
    return ctypes.cast(ctypes.memmove, c_void_p).value or 0, to, start, size


class LaunchArguments:
    """What a kernel is given: numbers of numpy, of the types that it takes. To be kept until it is started."""

    def __init__(self, arguments: Sequence[Any]):
        self.values = [np.array(argument) for argument in arguments]
        self.pointers = (c_void_p * len(self.values))(*(value.ctypes.data for value in self.values))
