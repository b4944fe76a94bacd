"""Files that weights are read from through a memory map: what is said when one of them is cut short or cannot be read."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numba import types

from ...formats import MillError
from ...operating_system.process import has_signal, set_signal_handler
from ...simd.compile import native_entry

_MESSAGE = np.frombuffer(
    b"\nggufmill: a model file was cut short or could not be read from disk (SIGBUS): check the disk, and restore the file\n",
    np.uint8,
)
_STDERR = 2
_write = types.ExternalFunction("write", types.int64(types.int32, types.uintp, types.uintp))
_exit = types.ExternalFunction("_exit", types.void(types.int32))


class MappedFiles:
    """Notices files that have become shorter: reading what is gone from a mapped one ends the whole process, with one line.

    A file that has another one in its place, or no longer a name, is no problem: what is mapped stays readable.
    wait: seconds between two checks (a model may have hundreds of files, and each takes a few microseconds).
    """

    def __init__(self, paths: Iterable[Path], wait: float = 0.2):
        self.wait, self._checked_at = wait, time.monotonic()
        self._known = [(path, *status) for path in paths if (status := _identity_and_size(path)) is not None]

    def check(self) -> None:
        """Raises MillError, naming the first file that is shorter than it was. To be called before the weights are read."""
        install_sigbus_handler()
        now = time.monotonic()
        if now - self._checked_at < self.wait:
            return
        self._checked_at = now
        for path, identity, size in self._known:
            status = _identity_and_size(path)
            if status is not None and status[0] == identity and status[1] < size:
                raise MillError(
                    f"{path}: the file is shorter than it was ({status[1]} bytes, not {size}): load the model again"
                )


def _identity_and_size(path: Path) -> tuple[tuple[int, int], int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return (status.st_dev, status.st_ino), status.st_size


def _write_message_and_exit(number):
    """The signal handler. It calls only what a signal handler may call: no Python, no locks."""
    _write(_STDERR, _MESSAGE.ctypes.data, _MESSAGE.size)
    _exit(1)


@cache
def install_sigbus_handler() -> Any:
    """Lets SIGBUS, which by itself would end the process silently, end it with exit code 1 and one line.

    A handler that somebody else has set stays. Returns the compiled handler, which lives as long as the process; None where
    there is no such signal.
    """
    if not has_signal("SIGBUS"):
        return None
    handler = native_entry(types.void(types.int32), _write_message_and_exit)
    set_signal_handler("SIGBUS", handler.address)
    return handler
