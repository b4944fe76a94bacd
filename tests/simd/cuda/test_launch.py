"""Launches of work items, with a GPU that is not there: what it is given."""

import ctypes
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from ggufmill.errors import MillError
from ggufmill.operating_system.nvidia import GpuError
from ggufmill.simd.compile import kernel
from ggufmill.simd.cuda import launch as launches
from ggufmill.simd.cuda.launch import CallList, Program
from ggufmill.simd.cuda.work_items import WorkItems

BLOCK = 8


@kernel(items=WorkItems(("x",), ("out",), shared_rows=("weights",), row_numbers=("offsets",)))
def weighted_sums(x, weights, offsets, out):
    """x float32 [rows, n], weights [1, n], [rows, n] or none, offsets [rows] -> out float32 [blocks of 8, 1]."""


def expected(x, weights, offsets) -> np.ndarray:
    weighted = x * weights if weights.size else x
    return (weighted.reshape(-1, BLOCK).sum(axis=1) + np.repeat(offsets, x.shape[1] // BLOCK))[:, None]


def floats(address: int, count: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_float * count).from_address(address), np.float32)


class Gpu:
    """Computes weighted_sums by the addresses and steps that it is given."""

    def __init__(self):
        from driver_on_processor import gpu_with

        self.driver, self.launched = gpu_with(self.launch), []

    def launch(self, kernel, numbers, stream):
        count, per_row = (numbers.number(n, ctypes.c_int32) for n in (0, 1))
        self.launched.append((kernel, count, stream))
        for item in range(count):
            row, column = divmod(item, per_row)
            x, *weights, offset, out = (
                numbers.number(2 + 3 * n) + row * numbers.number(3 + 3 * n) + column * numbers.number(4 + 3 * n)
                for n in range(self.arrays)
            )
            factors = floats(weights[0], BLOCK) if weights else 1
            floats(out, 1)[0] = (floats(x, BLOCK) * factors).sum() + floats(offset, 1)[0]


@pytest.fixture
def gpu(monkeypatch):
    made = Gpu()
    monkeypatch.setattr(launches, "device", lambda number: made.driver)
    monkeypatch.setattr(launches, "_entry", lambda *arguments: ctypes.c_void_p(9))
    return made


def computed(gpu, x, weights, offsets, items=None) -> np.ndarray:
    out = np.zeros((x.size // BLOCK, 1), np.float32)
    program, calls = Program(0, weighted_sums, weighted_sums.items, (x, weights, offsets, out)), CallList(0, 7)
    gpu.arrays = len(program.work.arrays)
    calls.launch(program, [array.values.ctypes.data for array in program.work.arrays], items)
    calls.made().run()
    return out


def given(rows: int = 6, n: int = 40):
    rng = np.random.default_rng(3)
    x = rng.integers(-9, 9, (rows, n)).astype(np.float32)
    return x, rng.integers(1, 5, (1, n)).astype(np.float32), rng.integers(0, 99, rows).astype(np.float32)


@pytest.mark.parametrize("weights", ["none", "shared", "own"])
def test_parts_of_items(gpu, weights):
    x, shared, offsets = given()
    w = {"none": np.empty((0, 0), np.float32), "shared": shared, "own": np.repeat(shared, len(x), axis=0) + x}[weights]
    assert np.array_equal(computed(gpu, x, w, offsets), expected(x, w, offsets))
    assert gpu.launched == [(9, 30, 7)]


def test_the_first_items_alone(gpu):
    out = computed(gpu, *given(), items=10)
    assert np.array_equal(out[:10], expected(*given())[:10])
    assert not out[10:].any()


def test_copies_between_here_and_there(gpu):
    there, here, back = np.zeros(8), np.arange(8.0), np.zeros(8)
    calls, (x, y, z) = CallList(0, 7), (array.ctypes.data for array in (here, there, back))
    row = calls.copy(y, 0, 16)  # from an address that is given later
    calls.send(y + 16, x + 16, 16)
    calls.move(y + 32, y + 16, 16)
    calls.fetch(z, y, 48)
    calls.wait()
    calls.made().table[row, 2] = x + 48
    calls.run()
    assert back.tolist() == [6, 7, 2, 3, 2, 3, 0, 0]


def test_a_call_that_fails_is_the_last(gpu, monkeypatch):
    failing = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64)(lambda stream: 700)
    monkeypatch.setattr(gpu.driver._cuda, "cuStreamSynchronize", failing)
    monkeypatch.setattr(gpu.driver._cuda, "cuGetErrorString", lambda number, text: 0, raising=False)
    there, calls = np.zeros(2), CallList(0, 7)
    calls.wait()
    calls.copy(there.ctypes.data, np.ones(2).ctypes.data, 16)
    with pytest.raises(MillError, match="^cannot compute on GPU 0: error 700; --device none"):
        calls.made().run()
    assert not there.any()


def test_a_request_is_the_same_in_every_process():
    """numba's types are not: they count those that were made before."""
    code = "from test_launch import digest; import numba; [numba.typeof((i,) * i) for i in range({})]; print(digest())"
    run = partial(subprocess.run, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    digests = {run([sys.executable, "-c", code.format(count)]).stdout for count in (0, 9)}
    assert len(digests) == 1


def digest() -> str:
    arguments = (*given(), np.zeros((30, 1), np.float32))
    work = launches.work_of(weighted_sums, weighted_sums.items, arguments)
    return launches._digest(launches.request_of(weighted_sums, arguments, work))


def test_a_gpu_that_is_not_there(monkeypatch):
    def missing(number):
        raise GpuError("no GPU 3")

    monkeypatch.setattr(launches, "device", missing)
    with pytest.raises(MillError, match=r"^no GPU 3; --device none does without$"):
        Program(3, weighted_sums, weighted_sums.items, (*given(), np.zeros((30, 1), np.float32)))
