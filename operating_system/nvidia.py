"""CUDA's driver, by the few functions that are needed here: devices, memory, PTX, launches.

Each device has one context, the one that torch uses, too. Work of different threads goes into streams of their own.
Source: NVIDIA's CUDA Driver API, https://docs.nvidia.com/cuda/cuda-driver-api/
"""

from __future__ import annotations

import ctypes
import sys
from collections import defaultdict
from collections.abc import Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache
from threading import Lock
from typing import Any

import numpy as np

_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_OUT_OF_MEMORY = 2
_STREAM_OF_THREAD = c_void_p(2)
_MOST_KEPT = 1 << 30  # bytes that were given back and are not used: as much as threads need at a time
_THREADS = 64  # of a block: kernels use up to 255 registers, and their speed hardly depends on it


class GpuError(Exception):
    """What the driver says, in a line."""


class OutOfMemory(GpuError):
    """A device's memory does not suffice."""


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
        reason = (text.value or b"").decode() or f"error {result}"
        raise (OutOfMemory if result == _OUT_OF_MEMORY else GpuError)(f"cannot {what}: {reason}")


@cache
def device(number: int) -> Gpu:
    """A GPU, by its number. Raises GpuError if it is not there."""
    return Gpu(number)


class Gpu:
    def __init__(self, number: int):
        self._cuda, self._context, self.number = _library(), c_void_p(), number
        handle = c_int()
        self._do("find GPU", "cuDeviceGet", byref(handle), number)
        self._do("use GPU", "cuDevicePrimaryCtxRetain", byref(self._context), handle)
        self._lock, self._free, self._kept = Lock(), defaultdict[int, list[Memory]](list), 0

    def _do(self, what: str, function: str, *arguments: Any) -> None:
        _check(self._cuda, getattr(self._cuda, function)(*arguments), f"{what} {self.number}")

    def use(self) -> None:
        """Makes this the device of the thread that calls."""
        self._do("use GPU", "cuCtxSetCurrent", self._context)

    def entry(self, ptx: str, name: str) -> c_void_p:
        """A kernel of PTX, which the driver compiles."""
        module, function = c_void_p(), c_void_p()
        self._do("load a kernel on GPU", "cuModuleLoadData", byref(module), c_char_p(ptx.encode()))
        self._do("find a kernel on GPU", "cuModuleGetFunction", byref(function), module, c_char_p(name.encode()))
        return function

    def memory(self, size: int) -> Memory:
        """At least `size` bytes, some that were given back if there are: the driver takes milliseconds. Raises OutOfMemory."""
        step = 1 << max(12, size.bit_length() - 3)
        size = max(1, -(-size // step)) * step
        with self._lock:
            if self._free[size]:
                self._kept -= size
                return self._free[size].pop()
        try:
            return Memory(self, size)
        except OutOfMemory:
            self.release()
            return Memory(self, size)

    def give_back(self, memory: Memory) -> None:
        """Takes back memory that nothing uses any more."""
        with self._lock:
            if keep := self._kept + memory.size <= _MOST_KEPT:
                self._kept += memory.size
                self._free[memory.size].append(memory)
        if not keep:
            memory.free()

    def release(self) -> None:
        """Gives the driver what was given back here."""
        with self._lock:
            given, self._free, self._kept = self._free, defaultdict(list), 0
        for memory in (memory for each in given.values() for memory in each):
            memory.free()

    def launch(self, function: c_void_p, count: int, arguments: Sequence[Any]) -> None:
        """Starts count threads; arguments: numbers of numpy, of the types that the kernel takes."""
        values = [np.array(argument) for argument in arguments]
        pointers = (c_void_p * len(values))(*(value.ctypes.data for value in values))
        self._do(
            "launch a kernel on GPU", "cuLaunchKernel", function, c_uint(-(-count // _THREADS)), c_uint(1), c_uint(1),
            c_uint(_THREADS), c_uint(1), c_uint(1), c_uint(0), _STREAM_OF_THREAD, pointers, None,
        )  # fmt: skip

    def wait(self) -> None:
        """Until all that this thread started is done."""
        self._do("compute on GPU", "cuStreamSynchronize", _STREAM_OF_THREAD)


class Memory:
    """Bytes on a device."""

    def __init__(self, device: Gpu, size: int):
        self._device, self.size, self._address = device, size, c_uint64()
        device._do(f"take {size} bytes of GPU", "cuMemAlloc_v2", byref(self._address), c_size_t(size))

    @property
    def address(self) -> np.uint64:
        return np.uint64(self._address.value)

    def write(self, values: np.ndarray) -> None:
        """The bytes of a C-contiguous array."""
        given = self._address, c_void_p(values.ctypes.data), c_size_t(values.nbytes), _STREAM_OF_THREAD
        self._device._do("copy to GPU", "cuMemcpyHtoDAsync_v2", *given)

    def read(self, values: np.ndarray) -> None:
        """Fills a C-contiguous array."""
        given = c_void_p(values.ctypes.data), self._address, c_size_t(values.nbytes), _STREAM_OF_THREAD
        self._device._do("copy from GPU", "cuMemcpyDtoHAsync_v2", *given)

    def free(self) -> None:
        self._device._do("free memory of GPU", "cuMemFree_v2", self._address)
