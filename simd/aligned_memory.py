"""Memory for inner loops: arrays that begin at a cache line, and what a thread keeps of it from call to call.

A vector load across two lines takes twice as long as one within a line, and with 64-byte vectors either all do or none.
"""

from __future__ import annotations

import threading
from math import prod

import numpy as np
from numpy.typing import DTypeLike

LINE = 64  # bytes
_kept = threading.local()


def empty(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """An array of any contents, its first element at the beginning of a cache line."""
    size = prod(shape) * np.dtype(dtype).itemsize
    whole = np.empty(size + LINE, np.uint8)
    start = -whole.ctypes.data % LINE
    return whole[start : start + size].view(dtype).reshape(shape)


def scratch(name: str, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """As `empty`, of memory that this thread keeps under a name: valid until it asks for the same name again."""
    size = prod(shape) * np.dtype(dtype).itemsize
    whole = getattr(_kept, name, None)
    if whole is None or whole.size < size:
        whole = empty((size,), np.uint8)
        setattr(_kept, name, whole)
    return whole[:size].view(dtype).reshape(shape)
