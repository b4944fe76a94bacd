"""Launches of work items, with a GPU that is not there: what it is given, in which pieces, and what it gives back."""

import numpy as np
import pytest

from ggufmill.errors import MillError
from ggufmill.operating_system.nvidia import OutOfMemory
from ggufmill.simd.compile import kernel
from ggufmill.simd.cuda import launch as launches
from ggufmill.simd.cuda.work_items import WorkItems, launching

BLOCK = 8


@kernel(items=WorkItems(("x",), ("out",), shared_rows=("weights",), row_numbers=("offsets",)))
def weighted_sums(x, weights, offsets, out):
    """x float32 [rows, n], weights [1, n], [rows, n] or none, offsets [rows] -> out float32 [blocks of 8, 1]."""


def expected(x, weights, offsets) -> np.ndarray:
    weighted = x * weights if weights.size else x
    return (weighted.reshape(-1, BLOCK).sum(axis=1) + np.repeat(offsets, x.shape[1] // BLOCK))[:, None]


class MemoryInHost:
    def __init__(self, gpu, size):
        if size + gpu.taken > gpu.size:
            raise OutOfMemory(f"cannot take {size} bytes of GPU")
        self.gpu, self.values, self.address = gpu, np.full(size, 99, np.uint8), len(gpu.memories)
        gpu.taken += size
        gpu.memories.append(self)

    def write(self, values):
        self.values[:] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)

    def read(self, values):
        values.reshape(-1).view(np.uint8)[:] = self.values


class GpuInHost:
    """Computes weighted_sums by the addresses and steps that a kernel is given."""

    def __init__(self, size):
        self.size, self.taken, self.memories, self.launched, self.number = size, 0, [], [], 0

    def use(self):
        pass

    def wait(self):
        pass

    def memory(self, size):
        return MemoryInHost(self, size)

    def give_back(self, memory):
        self.taken -= len(memory.values)

    def launch(self, entry, count, arguments):
        self.launched.append(count)
        number, per_row, *arrays = [int(a) for a in arguments]
        assert number == count
        arrays = [(self.memories[arrays[i]].values.view(np.float32), *arrays[i + 1 : i + 3]) for i in range(0, len(arrays), 3)]
        for item in range(count):
            row, column = divmod(item, per_row)
            at = [(values, (row * row_step + column * step) // 4) for values, row_step, step in arrays]
            (x, i), *weights, (offsets, r), (out, o) = at
            factors = weights[0][0][weights[0][1] :][:BLOCK] if weights else 1
            out[o] = (x[i : i + BLOCK] * factors).sum() + offsets[r]


@pytest.fixture
def gpu(monkeypatch):
    made = GpuInHost(1 << 20)
    monkeypatch.setattr(launches, "device", lambda number: made)
    monkeypatch.setattr(launches, "_entry", lambda *arguments: None)
    return made


def computed(x, weights, offsets) -> np.ndarray:
    out = np.zeros((x.size // BLOCK, 1), np.float32)
    with launching(launches.launch_on(0)):
        weighted_sums(x, weights, offsets, out)
    return out


def given(rows: int = 6, n: int = 40):
    rng = np.random.default_rng(3)
    x = rng.integers(-9, 9, (rows, n)).astype(np.float32)
    return x, rng.integers(1, 5, (1, n)).astype(np.float32), rng.integers(0, 99, rows).astype(np.float32)


@pytest.mark.parametrize("weights", ["none", "shared", "own"])
def test_parts_of_items(gpu, weights):
    x, shared, offsets = given()
    w = {"none": np.empty((0, 0), np.float32), "shared": shared, "own": np.repeat(shared, len(x), axis=0) + x}[weights]
    assert np.array_equal(computed(x, w, offsets), expected(x, w, offsets))
    assert gpu.launched == [30]
    assert gpu.taken == 0


def test_fewer_rows_at_a_time_where_memory_is_short(gpu):
    x, w, offsets = given(rows=8)
    gpu.size = 3 * (40 * 4 + 5 * 4 + 4) + 40 * 4
    assert np.array_equal(computed(x, w, offsets), expected(x, w, offsets))
    assert gpu.launched == [10, 10, 10, 10]
    assert gpu.taken == 0


def test_one_row_is_too_much(gpu):
    gpu.size = 100
    with pytest.raises(MillError, match=r"^cannot take 160 bytes of GPU, even for 5 blocks: .*--device none$"):
        computed(*given(rows=1))
    assert gpu.taken == 0
