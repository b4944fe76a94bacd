"""Launches of work items, with a GPU that is not there: what it is given."""

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
from ggufmill.simd.cuda.launch import Program
from ggufmill.simd.cuda.work_items import WorkItems

BLOCK = 8


@kernel(items=WorkItems(("x",), ("out",), shared_rows=("weights",), row_numbers=("offsets",)))
def weighted_sums(x, weights, offsets, out):
    """x float32 [rows, n], weights [1, n], [rows, n] or none, offsets [rows] -> out float32 [blocks of 8, 1]."""


def expected(x, weights, offsets) -> np.ndarray:
    weighted = x * weights if weights.size else x
    return (weighted.reshape(-1, BLOCK).sum(axis=1) + np.repeat(offsets, x.shape[1] // BLOCK))[:, None]


class GpuInHost:
    """Computes weighted_sums by the addresses and steps that a kernel is given: addresses are numbers of arrays."""

    def __init__(self):
        self.arrays, self.launched = [], []

    def use(self):
        pass

    def launch(self, entry, count, arguments, stream):
        self.launched.append((count, stream))
        number, per_row, *arrays = [int(a) for a in arguments]
        assert number == count
        arrays = [(self.arrays[arrays[i]].reshape(-1), *arrays[i + 1 : i + 3]) for i in range(0, len(arrays), 3)]
        for item in range(count):
            row, column = divmod(item, per_row)
            at = [(values, (row * row_step + column * step) // 4) for values, row_step, step in arrays]
            (x, i), *weights, (offsets, r), (out, o) = at
            factors = weights[0][0][weights[0][1] :][:BLOCK] if weights else 1
            out[o] = (x[i : i + BLOCK] * factors).sum() + offsets[r]


@pytest.fixture
def gpu(monkeypatch):
    made = GpuInHost()
    monkeypatch.setattr(launches, "device", lambda number: made)
    monkeypatch.setattr(launches, "_entry", lambda *arguments: None)
    return made


def computed(gpu, x, weights, offsets, items=None) -> np.ndarray:
    out = np.zeros((x.size // BLOCK, 1), np.float32)
    program = Program(0, weighted_sums, weighted_sums.items, (x, weights, offsets, out))
    gpu.arrays = [array.values for array in program.work.arrays]
    program.launch(range(len(gpu.arrays)), 7, items)
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
    assert gpu.launched == [(30, 7)]


def test_the_first_items_alone(gpu):
    out = computed(gpu, *given(), items=10)
    assert np.array_equal(out[:10], expected(*given())[:10])
    assert not out[10:].any()


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
