"""How the C library's allocator treats the chunks of a job: arrays of a few MiB that come and go by the thousand.

Left to itself glibc gives such memory back to the system and asks for it again, and the system has to clear it each time (on
a virtual machine: to find it, too), which takes as long as the work on it.
"""

from __future__ import annotations

import ctypes

# malloc.h of glibc: parameter -> value in bytes. Larger blocks still come from the system and go back to it at once.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_PARAMETERS = {_M_TRIM_THRESHOLD: 256 << 20, _M_MMAP_THRESHOLD: 32 << 20}


def keep_freed() -> None:
    """From now on freed memory waits for its next use. Without effect where the C library is another."""
    mallopt = _function("mallopt")
    if mallopt is not None:
        for parameter, value in _PARAMETERS.items():
            mallopt(parameter, value)


def release_freed() -> None:
    """Gives freed memory back to the system, once."""
    trim = _function("malloc_trim")
    if trim is not None:
        trim(ctypes.c_size_t(0))


def _function(name: str) -> ctypes._NamedFuncPointer | None:
    try:
        return getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError):
        return None
