"""Signals that ask the program to end: one line and the exit code 128 + signal, whenever they come.

Only modules of Python's own are imported here, and few: the handlers are set before everything else is imported.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

# Those whose own action ends a process and that others send to have it end: a terminal or a connection that is lost, the limit
# of a batch system or of processor time. A name that a system does not know is left out.
ENDING = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGXCPU")
_PATIENCE = 1.0  # seconds in which a signal that follows another one is taken for the same wish

_received: int | None = None  # the first signal
_ending: int | None = None  # the exit code of the program
_since: float | None = None  # when it came; None: the KeyboardInterrupt that it raised was lost


def received() -> bool:
    """Whether a signal has asked this program to end."""
    return _received is not None


def exit_code() -> int:
    """128 + the signal that asked the program to end (SIGINT if none did: something raised KeyboardInterrupt)."""
    return 128 + (_received or signal.SIGINT)


def end_with(code: int) -> None:
    """Sets the exit code of the program, for which `raised_as_interrupt` has to be in use."""
    global _ending
    _ending = code


def _exit() -> None:
    """Ends the program as the last that it does, without Python's own end: in that a signal would end it as if it had no
    handlers, and `python -m` would end as by SIGINT, whichever signal came, if KeyboardInterrupt was raised within an exec() of
    a text, as dataclasses and namedtuple have it."""
    if _ending is not None:
        _leave(_ending)


def expect_again() -> None:
    """Prepares for the signal that raises a lost KeyboardInterrupt a second time; called before it is sent."""
    global _since
    _since = None


@contextmanager
def raised_as_interrupt(is_program: bool) -> Iterator[None]:
    """Within this, the signals raise KeyboardInterrupt, so that work ends in good order, and a further one that comes a second
    later ends the process at once, with what was finished so far kept as after a power cut. Handlers other than Python's own
    stay as they are, and what is ignored stays ignored (nohup).

    is_program: the process ends afterwards; a signal until then ends it with its line too. Otherwise the handlers before are
    restored.
    """
    global _received, _since, _ending
    _received = _since = _ending = None
    before = {}
    if is_program:
        atexit.register(_exit)
    if threading.current_thread() is threading.main_thread():
        for number in (getattr(signal, name) for name in ENDING if hasattr(signal, name)):
            if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL):
                before[number] = signal.signal(number, _raise)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, _end if is_program else handler)


def _raise(number: int, frame: FrameType | None) -> None:
    global _received, _since
    now = time.monotonic()
    if _since is not None:
        if now - _since >= _PATIENCE:
            _end(number, frame)
        return
    _received, _since = _received or number, now
    raise KeyboardInterrupt


def _end(number: int, frame: FrameType | None) -> None:
    _leave(128 + (_received or number), b"ggufmill: interrupted\n")


def _leave(code: int, line: bytes = b"") -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    with suppress(OSError), open(2, "wb", buffering=0, closefd=False) as stderr:  # whatever else is just being printed
        stderr.write(line)
    os._exit(code)
