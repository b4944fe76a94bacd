"""Arrays next to memory that must not be touched."""

import ctypes
import mmap
import sys

import numpy as np


def guarded(array: np.ndarray, at_start: bool = False) -> np.ndarray:
    """A copy whose end (its start, if at_start) is that of pages next to which there is one that may not be read. A copy alone
    elsewhere than on Linux."""
    if not sys.platform.startswith("linux"):
        return array.copy()
    page = mmap.PAGESIZE
    size = -(-array.nbytes // page) * page
    memory = np.frombuffer(mmap.mmap(-1, size + 2 * page), np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    for guard in (0, page + size):
        assert libc.mprotect(ctypes.c_void_p(memory.ctypes.data + guard), ctypes.c_size_t(page), 0) == 0
    start = page if at_start else page + size - array.nbytes
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[:] = array
    return copy
