"""A kernel's work items on a GPU: translated once for each kind of call, kept on disk, launched on arrays that lie there."""

from __future__ import annotations

import hashlib
import io
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import MillError
from ...operating_system.nvidia import Gpu, GpuError, LaunchArguments, copy_call, device
from ..compile.kernel_cache import kept
from .calls import make_calls
from .compile_items import ENTRY, ItemRequest, environment
from .division import ItemWork, divided
from .work_items import WorkItems, parameters_of

if TYPE_CHECKING:
    from ..compile.kernels import Kernel

_COMPILER = f"{__package__}.compile_items"


class Program:
    """A call of a kernel, ready to be launched on a GPU (`CallList`).

    work: its arrays are what is wanted the addresses of; entry: the kernel, as the driver knows it

    Raises MillError if the GPU is not there or the kernel cannot be compiled.
    """

    def __init__(self, number: int, kernel: Kernel, items: WorkItems, arguments: Sequence[Any]):
        self.work = work_of(kernel, items, arguments)
        request, gpu = request_of(kernel, arguments, self.work), gpu_of(number)
        try:
            gpu.use()
            self.entry = _entry(gpu, request, items.lanes)
        except GpuError as error:
            raise MillError(f"{error}; --device none does without") from None


class CallList:
    """Calls of the driver for a stream of torch's, made one after the other without Python: no thread waits for others between
    them. All addresses are numbers; memory has to be kept by others.

    table  int64 [calls, 13], once `made`: address, arguments and whether an answer that is not 0 is an error. Arguments may be
           changed
    """

    table: np.ndarray

    def __init__(self, number: int, stream: int):
        """number: of the GPU."""
        self._gpu, self._stream, self._rows = gpu_of(number), stream, list[tuple[int, ...]]()
        self._kept: list[Any] = []
        self._add(*self._gpu.context_call())

    def _add(self, *call: int, is_checked: bool = True) -> int:
        self._rows.append((*call, *[0] * (12 - len(call)), is_checked))
        return len(self._rows) - 1

    def launch(self, program: Program, addresses: Sequence[int], items: int | None = None) -> None:
        """Starts a program, with an address on the device for each of the work's arrays; items: how many of the first."""
        count = program.work.items if items is None else items
        given: list[Any] = [np.int32(count), np.int32(program.work.per_row)]
        for address, array in zip(addresses, program.work.arrays, strict=True):
            given += [np.uint64(address), np.int64(array.row_step), np.int64(array.item_step)]
        arguments = LaunchArguments(given)
        self.keep(arguments)
        self._add(*self._gpu.launch_call(program.entry, count, arguments, self._stream))

    def keep(self, *values: object) -> None:
        """Whose memory is used."""
        self._kept += values

    def send(self, to: int, start: int, size: int) -> None:
        """Bytes to the device, from memory that it reads by itself."""
        self._add(*self._gpu.call("cuMemcpyHtoDAsync_v2", to, start, size, self._stream))

    def fetch(self, to: int, start: int, size: int) -> None:
        self._add(*self._gpu.call("cuMemcpyDtoHAsync_v2", to, start, size, self._stream))

    def move(self, to: int, start: int, size: int) -> None:
        """Bytes on the device."""
        self._add(*self._gpu.call("cuMemcpyDtoDAsync_v2", to, start, size, self._stream))

    def copy(self, to: int, start: int, size: int) -> int:
        """Bytes here -> the row of `table`; its columns 1 and 2 are the addresses."""
        return self._add(*copy_call(to, start, size), is_checked=False)

    def wait(self) -> None:
        """For all that the stream was given."""
        self._add(*self._gpu.call("cuStreamSynchronize", self._stream))

    def made(self) -> CallList:
        """Sets `table`."""
        self.table = np.array(self._rows, np.int64)
        return self

    def run(self) -> None:
        """Makes the calls. Raises MillError for one that fails."""
        answer = make_calls(self.table)
        if answer:
            try:
                self._gpu.check(int(answer), "compute on GPU")
            except GpuError as error:
                raise MillError(f"{error}; --device none does without") from None


def gpu_of(number: int) -> Gpu:
    """Raises MillError if it is not there."""
    try:
        return device(number)
    except GpuError as error:
        raise MillError(f"{error}; --device none does without") from None


def work_of(kernel: Kernel, items: WorkItems, arguments: Sequence[Any]) -> ItemWork:
    """A kernel's call, divided into work items."""
    return divided(items, items.names or _names(kernel), arguments)


def request_of(kernel: Kernel, arguments: Sequence[Any], work: ItemWork) -> ItemRequest:
    """What has to be compiled for a call."""
    from numba import typeof

    types = tuple(typeof(argument) for argument in arguments)
    return ItemRequest(kernel._function.__module__, kernel._function.__name__, types, work.parameters)


def ptx(request: ItemRequest, lanes: int) -> str:
    """The PTX of a request, which a process compiles where it is not stored with the module's kernels."""
    return _kept(request, "ptx", (lanes, _digest(request)), lambda: _compiled(request, lanes))


_names = cache(parameters_of)
_entries: dict[tuple[Any, ...], Any] = {}
_compiling = Lock()


def _entry(gpu: Gpu, request: ItemRequest, lanes: int) -> Any:
    key = *gpu.kind, lanes, _digest(request)
    with _compiling:
        if (gpu.number, key) not in _entries:
            code = _kept(request, "code", key, lambda: gpu.machine_code(ptx(request, lanes)))
            _entries[gpu.number, key] = gpu.entry(code, ENTRY)
        return _entries[gpu.number, key]


def _digest(request: ItemRequest) -> str:
    """The same for requests of the same code, in every process: numba's types, pickled, have numbers that are not."""
    out = io.BytesIO(_own_sources())
    out.seek(0, io.SEEK_END)
    pickler = pickle.Pickler(out)
    pickler.fast = True  # the same bytes whether or not equal parts are the same objects
    pickler.dump(request._replace(signature=tuple(map(str, request.signature))))
    return hashlib.sha256(out.getvalue()).hexdigest()


def _kept(request: ItemRequest, what: str, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    source = sys.modules[request.module].__file__
    assert source is not None
    return kept(Path(source), f"{request.name}-{what}", key, make)


def _compiled(request: ItemRequest, lanes: int) -> str:
    with tempfile.TemporaryDirectory() as own:
        given, result = Path(own) / "request", Path(own) / "ptx"
        given.write_bytes(pickle.dumps(request))
        command = [sys.executable, "-m", _COMPILER, str(given), str(result)]
        done = subprocess.run(command, env=environment(lanes), capture_output=True, text=True, check=False)
        if done.returncode:
            raise MillError(f"{request.name} cannot be compiled for a GPU: {done.stderr.strip().splitlines()[-1]}")
        return result.read_text()


@cache
def _own_sources() -> bytes:
    """What the translation itself depends on."""
    return b"".join((Path(__file__).parent / f"{name}.py").read_bytes() for name in ("lowering", "compile_items", "division"))
