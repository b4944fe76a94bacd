"""Settings of the C library's allocator for jobs, which allocate and free arrays of a few MiB by the thousand.

By default glibc returns such memory to the system and asks for it again, and the kernel clears it each time (on a virtual
machine it also has to map it), which takes as long as the work on it.
"""

from __future__ import annotations

import ctypes

from ..formats.platform import c_function

# malloc.h of glibc: parameter -> value in bytes. Larger blocks still come from the system and go back to it at once.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_PARAMETERS = {_M_TRIM_THRESHOLD: 256 << 20, _M_MMAP_THRESHOLD: 32 << 20}


def retain_free_memory() -> None:
    """From now on memory that is freed stays with the process for the next allocation. Only with glibc; else nothing."""
    mallopt = c_function("mallopt")
    if mallopt is not None:
        for parameter, value in _PARAMETERS.items():
            mallopt(parameter, value)


def trim_free_memory() -> None:
    """Returns the memory that is free now to the system. Only with glibc; else nothing."""
    malloc_trim = c_function("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(ctypes.c_size_t(0))
