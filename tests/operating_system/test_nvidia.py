"""What is asked of NVIDIA's driver, by one that only listens."""

import ctypes

import pytest

from ggufmill.operating_system import nvidia
from ggufmill.operating_system.nvidia import Gpu, GpuError


class Listening:
    """Every function succeeds; machine code is the PTX."""

    def __init__(self):
        self.calls, self.text = [], b""

    def cuGetErrorString(self, result, text):
        text._obj.value = b"out of memory"
        return 0

    def cuDeviceGetAttribute(self, value, attribute, handle):
        value._obj.value = {75: 9, 76: 0}[attribute]
        return 0

    def cuDriverGetVersion(self, value):
        value._obj.value = 13000
        return 0

    def cuLinkAddData_v2(self, state, kind, text, size, *options):
        self.text = ctypes.string_at(text, size.value)
        return 0

    def cuLinkComplete(self, state, code, size):
        code._obj.value, size._obj.value = ctypes.cast(self.text, ctypes.c_void_p).value, len(self.text)
        return 0

    def __getattr__(self, name):
        return lambda *arguments: self.calls.append(name) or 0


@pytest.fixture
def cuda(monkeypatch):
    library = Listening()
    monkeypatch.setattr(nvidia, "_library", lambda: library)
    return library


def test_machine_code_is_copied_before_the_driver_drops_it(cuda):
    gpu = Gpu(0)
    assert gpu.kind == (9, 0, 13000)
    assert gpu.machine_code("some text") == b"some text\0"
    assert cuda.calls[-1] == "cuLinkDestroy"


def test_a_function_that_fails(cuda, monkeypatch):
    monkeypatch.setattr(cuda, "cuCtxSetCurrent", lambda context: 201, raising=False)
    with pytest.raises(GpuError, match=r"^cannot use GPU 0: out of memory$"):
        Gpu(0).use()
