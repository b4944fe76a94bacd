"""Aligned memory."""

import numpy as np

from ggufmill.simd.memory import aligned_empty, scratch


def test_memory_begins_at_cache_lines():
    for shape in ((3,), (5, 7), (1000,)):
        assert aligned_empty(shape, np.float32).ctypes.data % 64 == 0
    first = scratch("test", (100,), np.float32)
    assert first.ctypes.data % 64 == 0
    assert scratch("test", (50,), np.float32).ctypes.data == first.ctypes.data
    assert scratch("test", (100, 100), np.uint8).shape == (100, 100)
