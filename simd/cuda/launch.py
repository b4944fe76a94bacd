"""A kernel's work items on a GPU: translated once for each kind of call, kept on disk, launched in pieces that fit."""

from __future__ import annotations

import hashlib
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import MillError
from ...operating_system.nvidia import Gpu, GpuError, Memory, OutOfMemory, device
from ..compile.kernel_cache import kept
from .compile_items import ENTRY, ItemRequest, environment
from .division import ItemWork, divided
from .work_items import Launch, WorkItems, parameters_of

if TYPE_CHECKING:
    from ..compile.kernels import Kernel

_COMPILER = f"{__package__}.compile_items"
_MOST_ITEMS = 1 << 20  # launched at a time
_compiling, _sending = Lock(), Lock()


def launch_on(number: int) -> Launch:
    """What computes kernels on a GPU, by its number, for `work_items.launching`."""
    return partial(_launch, number)


def _launch(number: int, kernel: Kernel, items: WorkItems, arguments: Sequence[Any]) -> None:
    """Raises MillError if the GPU is not there, fails, or has too little memory for one row."""
    try:
        _launch_pieces(number, kernel, items, arguments)
    except GpuError as error:
        raise MillError(f"{error}; --device none does without") from None


def _launch_pieces(number: int, kernel: Kernel, items: WorkItems, arguments: Sequence[Any]) -> None:
    work = work_of(kernel, items, arguments)
    gpu = device(number)
    gpu.use()
    request = request_of(kernel, arguments, work)
    with _compiling:
        entry = _entry(gpu, request, items.lanes)
    first, at_once = 0, min(work.items, _MOST_ITEMS)
    while first < work.items:
        count = min(at_once, work.items - first)
        try:
            _run(gpu, entry, work, first, count)
            first += count
        except OutOfMemory as error:
            if count <= work.per_row:
                raise MillError(
                    f"{error}, even for {count} blocks: end other programs that use it, or start over with --device none"
                ) from None
            at_once = max(1, count // 2 // work.per_row) * work.per_row


def work_of(kernel: Kernel, items: WorkItems, arguments: Sequence[Any]) -> ItemWork:
    """A kernel's call, divided into work items."""
    return divided(items, items.names or _names(kernel), arguments)


def request_of(kernel: Kernel, arguments: Sequence[Any], work: ItemWork) -> bytes:
    """What has to be compiled for a call: a pickled ItemRequest."""
    from numba import typeof

    types = tuple(typeof(argument) for argument in arguments)
    return pickle.dumps(ItemRequest(kernel._function.__module__, kernel._function.__name__, types, work.parameters))


def _run(gpu: Gpu, entry: Any, work: ItemWork, first: int, count: int) -> None:
    """Items first to first + count - 1, first at the beginning of a row."""
    with ExitStack() as done:  # in the reverse order: first waits for what was started, then gives memory back
        arguments: list[Any] = [np.int32(count), np.int32(work.per_row)]
        results = []
        for array in work.arrays:
            values = array.values
            if not (array.row_step or array.item_step):
                arguments += [_table(gpu, values).address, np.int64(0), np.int64(0)]
                continue
            if array.row_step:  # a run for each item, or a number for each row
                size = array.row_step // values.itemsize
                values = values.reshape(-1)[first // work.per_row * size : -(-(first + count) // work.per_row) * size]
            memory = gpu.memory(values.nbytes)
            done.callback(gpu.give_back, memory)
            done.callback(gpu.wait)
            if array.written:
                results.append((memory, values))
            else:
                memory.write(values)
            arguments += [memory.address, np.int64(array.row_step), np.int64(array.item_step)]
        gpu.launch(entry, count, arguments)
        for memory, values in results:
            memory.read(values)


_tables: dict[tuple[int, int], tuple[np.ndarray, Memory]] = {}


def _table(gpu: Gpu, values: np.ndarray) -> Memory:
    """An array that stays the same for all calls: it remains on the device."""
    key = gpu.number, id(values)
    with _sending:
        if key not in _tables:
            memory = gpu.memory(values.nbytes)
            memory.write(values)
            gpu.wait()  # other threads use it, too
            _tables[key] = values, memory  # with the array, whose id is no other's then
        return _tables[key][1]


_names = cache(parameters_of)


@cache
def _entry(gpu: Gpu, request: bytes, lanes: int) -> Any:
    return gpu.entry(ptx(request, lanes), ENTRY)


def ptx(request: bytes, lanes: int) -> str:
    """The PTX of a pickled ItemRequest, which a process compiles where it is not stored with the module's kernels."""
    asked: ItemRequest = pickle.loads(request)
    source = sys.modules[asked.module].__file__
    assert source is not None
    key = lanes, hashlib.sha256(_own_sources() + request).hexdigest()
    return kept(Path(source), f"{asked.name}-ptx", key, lambda: _compiled(asked.name, request, lanes))


def _compiled(name: str, request: bytes, lanes: int) -> str:
    with tempfile.TemporaryDirectory() as own:
        given, result = Path(own) / "request", Path(own) / "ptx"
        given.write_bytes(request)
        command = [sys.executable, "-m", _COMPILER, str(given), str(result)]
        done = subprocess.run(command, env=environment(lanes), capture_output=True, text=True, check=False)
        if done.returncode:
            raise MillError(f"{name} cannot be compiled for a GPU: {done.stderr.strip().splitlines()[-1]}")
        return result.read_text()


@cache
def _own_sources() -> bytes:
    """What the translation itself depends on."""
    return b"".join((Path(__file__).parent / f"{name}.py").read_bytes() for name in ("lowering", "compile_items", "division"))
