"""What a GPU's memory is asked for, by a driver that only counts."""

import pytest

from ggufmill.operating_system import nvidia
from ggufmill.operating_system.nvidia import Gpu, GpuError, OutOfMemory


class CountingDriver:
    """Every function succeeds; memory is given as long as there is some."""

    def __init__(self, size):
        self.left, self.calls, self.sizes = size, [], {}

    def cuMemAlloc_v2(self, address, size):
        self.calls.append("take")
        if size.value > self.left:
            return 2
        address._obj.value = 4096 * (1 + len(self.calls))
        self.left -= size.value
        self.sizes[address._obj.value] = size.value
        return 0

    def cuMemFree_v2(self, address):
        self.calls.append("free")
        self.left += self.sizes.pop(address.value)
        return 0

    def cuGetErrorString(self, result, text):
        text._obj.value = b"out of memory"
        return 0

    def __getattr__(self, name):
        return lambda *arguments: 0


@pytest.fixture
def cuda(monkeypatch):
    library = CountingDriver(1 << 20)
    monkeypatch.setattr(nvidia, "_library", lambda: library)
    return library


def test_memory_is_used_again(cuda):
    gpu = Gpu(0)
    first = gpu.memory(100_000)
    gpu.give_back(first)
    assert gpu.memory(100_001) is first
    assert cuda.calls == ["take"]
    assert gpu.memory(50_000) is not first


def test_what_is_kept_is_released_where_memory_is_short(cuda):
    gpu = Gpu(0)
    for memory in [gpu.memory(300_000), gpu.memory(400_000)]:
        gpu.give_back(memory)
    gpu.memory(900_000)
    assert cuda.calls == ["take", "take", "take", "free", "free", "take"]
    with pytest.raises(OutOfMemory, match=r"^cannot take 917504 bytes of GPU 0: out of memory$"):
        gpu.memory(900_000)


def test_no_more_is_kept_than_is_of_use(cuda, monkeypatch):
    monkeypatch.setattr(nvidia, "_MOST_KEPT", 150_000)
    gpu = Gpu(0)
    for memory in [gpu.memory(100_000), gpu.memory(100_000)]:
        gpu.give_back(memory)
    assert cuda.calls == ["take", "take", "free"]


def test_a_function_that_fails(cuda, monkeypatch):
    monkeypatch.setattr(cuda, "cuCtxSetCurrent", lambda context: 201, raising=False)
    with pytest.raises(GpuError, match=r"^cannot use GPU 0: out of memory$"):
        Gpu(0).use()
