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
from ...operating_system.nvidia import Gpu, GpuError, device
from ..compile.kernel_cache import kept
from .compile_items import ENTRY, ItemRequest, environment
from .division import ItemWork, divided
from .work_items import WorkItems, parameters_of

if TYPE_CHECKING:
    from ..compile.kernels import Kernel

_COMPILER = f"{__package__}.compile_items"


class Program:
    """A call of a kernel, ready to be launched on a GPU. work: its arrays are what is wanted the addresses of.

    Raises MillError if the GPU is not there or the kernel cannot be compiled.
    """

    def __init__(self, number: int, kernel: Kernel, items: WorkItems, arguments: Sequence[Any]):
        self.work = work_of(kernel, items, arguments)
        request = request_of(kernel, arguments, self.work)
        try:
            self._gpu = device(number)
            self._gpu.use()
            self._entry = _entry(self._gpu, request, items.lanes)
        except GpuError as error:
            raise MillError(f"{error}; --device none does without") from None

    def launch(self, addresses: Sequence[int], stream: int, items: int | None = None) -> None:
        """Starts it on a stream of torch's, with an address on the device for each of the work's arrays.

        items: how many of the first; None: all
        """
        count = self.work.items if items is None else items
        given: list[Any] = [np.int32(count), np.int32(self.work.per_row)]
        for address, array in zip(addresses, self.work.arrays, strict=True):
            given += [np.uint64(address), np.int64(array.row_step), np.int64(array.item_step)]
        try:
            self._gpu.use()
            self._gpu.launch(self._entry, count, given, stream)
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
