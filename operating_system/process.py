"""This process: functions of the C library, signals beyond Python's, limits of memory and time, forks."""

from __future__ import annotations

import ctypes
import math
import os
import platform
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import socket

resource: Any = None
with suppress(ImportError):  # Windows
    import resource


@cache
def c_function(name: str) -> Callable[..., Any] | None:
    """A function of the C library that this process is linked with, its errno kept for ctypes.get_errno; None if there is none
    of that name (on Windows always)."""
    try:
        return getattr(ctypes.CDLL(None, use_errno=True), name)
    except (AttributeError, OSError, TypeError):  # TypeError: Windows has no handle of the process itself
        return None


@cache
def c_address(name: str) -> int:
    """The address of a function of the C library, for compiled code; 0 if there is none of that name."""
    function = c_function(name)
    return ctypes.cast(function, ctypes.c_void_p).value or 0 if function is not None else 0  # type: ignore[arg-type]


def system_text() -> str:
    """'Linux x86_64': the operating system and what it calls the processor's architecture."""
    return f"{platform.system()} {platform.machine()}"


def signals_handled_as(number: int) -> list[int]:
    """The signals that have the same handler as this one, where that is a function of Python's; SIGINT is not among them."""
    handler = signal.getsignal(number)
    if not callable(handler):
        return []
    return [each for each in signal.valid_signals() if each != signal.SIGINT and signal.getsignal(each) is handler]


def has_signal(name: str) -> bool:
    """Whether the system has this signal, and a C library to set a compiled handler of it."""
    return hasattr(signal, name) and c_function("signal") is not None


def set_signal_handler(name: str, address: int) -> None:
    """Sets a compiled function void(int) as the handler of a signal that there is, unless there is a handler already."""
    c_signal: Any = c_function("signal")
    c_signal.restype, c_signal.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    number = getattr(signal, name)
    before = c_signal(number, address)
    if before:
        c_signal(number, before)


def after_fork(function: Callable[[], None]) -> None:
    """The function is called in the child of every fork of this process. Nothing where there are no forks (Windows)."""
    register = getattr(os, "register_at_fork", None)
    if register is not None:
        register(after_in_child=function)


def low_priority(command: list[str]) -> list[str]:
    """A command that runs as the given one but leaves the processors to others; the same command where there is no `nice`
    (Windows)."""
    import shutil

    nice = shutil.which("nice")
    return [nice, "-n", "10", *command] if nice else command


def limit_process(memory: int) -> None:
    """From here on this process can allocate `memory` bytes of address space at most, and neither open nor write files.

    Windows has no such limits, and macOS not all of them: what is missing there is left out. Raises OSError or ValueError on
    Linux if a limit cannot be set.
    """
    if resource is None:
        return
    for name, value in (("RLIMIT_AS", memory), ("RLIMIT_CORE", 0), ("RLIMIT_FSIZE", 0), ("RLIMIT_NOFILE", 0)):
        try:
            resource.setrlimit(getattr(resource, name), (value, value))
        except (AttributeError, OSError, ValueError):
            if sys.platform == "linux":
                raise


def limit_cpu_time(seconds: float) -> None:
    """Lets the system end this process once it has used `seconds` of processor time from now on, and one more. Nothing on
    Windows."""
    if resource is None:
        return
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    _, hard_limit = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used + seconds) + 1, hard_limit))


def open_file_limit() -> int | None:
    """How many files this process may open; None where there is no such limit (Windows)."""
    if resource is None:
        return None
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def raise_open_file_limit(wanted: int = 65536) -> None:
    """Lets this process open as many files as the system permits it, up to `wanted`: models are split into hundreds of files,
    and the usual limit is 1024, on macOS 256. Child processes that are limited themselves stay so."""
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        with suppress(OSError, ValueError):  # macOS has another, hidden limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


def reuse_address(listener: socket.socket) -> None:
    """Lets a socket be bound to the address of a server that has just ended. Not on Windows, where that is so by itself and the
    option would let two servers share a port."""
    if sys.platform != "win32":
        import socket  # whoever has a listener has imported it: most verbs do not

        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
