"""What is said when mapped weights cannot be read: the system sends SIGBUS, which by itself would end the process silently."""

from __future__ import annotations

import ctypes
import signal
from functools import cache
from typing import Any

import numpy as np
from numba import types

from .compile import native_entry

_WORDS = np.frombuffer(
    b"\nggufmill: a model file was cut short or could not be read from disk (SIGBUS): check the disk, and restore the file\n",
    np.uint8,
)
_STDERR = 2
_write = types.ExternalFunction("write", types.int64(types.int32, types.uintp, types.uintp))
_exit = types.ExternalFunction("_exit", types.void(types.int32))


def _speak(number):
    """Calls nothing but what a signal handler may call: no Python, no locks."""
    _write(_STDERR, _WORDS.ctypes.data, _WORDS.size)
    _exit(1)


@cache
def install_sigbus_handler() -> Any:
    """From now on SIGBUS ends the process with exit code 1 and one line; a handler that somebody else has set stays.

    Returns the compiled handler, which lives as long as the process.
    """
    handler = native_entry(types.void(types.int32), _speak)
    libc = ctypes.CDLL(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    before = libc.signal(signal.SIGBUS, handler.address)
    if before:
        libc.signal(signal.SIGBUS, before)
    return handler
