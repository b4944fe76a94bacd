"""Time in which kernels are compiled: it does not count for speeds, and is printed in a line of its own.

numba reports every compilation by events. They are listened to from the first kernel that is needed on: importing numba takes
long.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ...operating_system.files import cache_home

_PACKAGE = __name__.rpartition(".simd")[0]
_LEAST_SECONDS = 0.5  # of a line: less is not worth one

_lock = threading.Lock()
_compiled: list[str] = []  # names of the kernels that this process has compiled
_unreported: dict[str, float] = {}  # subject -> seconds that no line has reported yet


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


_write: Callable[[str], None] = _print
_listeners: list[Callable[[str], None]] = []  # who hears what is compiled for
_HEARD_EVERY = 1.0  # seconds


class _Thread(threading.local):
    """What a thread is doing.

    subject   what it compiles for (see `compiling_for`), or ''
    locks     how often it holds numba's compiler lock
    compiles  since when, and for what, it has been compiling a kernel of ours, while it does
    said      when listeners heard of it last
    """

    subject = ""
    locks = 0
    compiles: tuple[float, str] | None = None
    said = 0.0


_thread = _Thread()
_now: tuple[float, str] | None = None  # `compiles` of the thread that compiles


class _Clock:
    """Adds up the time in which at least one thread compiles or loads kernels, or waits for that."""

    def __init__(self) -> None:
        self._lock, self._depth, self._start, self._total = threading.Lock(), 0, 0.0, 0.0

    def stop(self) -> None:
        with self._lock:
            if not self._depth:
                self._start = time.perf_counter()
            self._depth += 1

    def resume(self) -> None:
        with self._lock:
            self._depth -= 1
            if not self._depth:
                self._total += time.perf_counter() - self._start

    def seconds(self) -> tuple[float, float]:
        """time.perf_counter(), and of that how long kernels were compiled."""
        with self._lock:
            now = time.perf_counter()
            return now, self._total + (now - self._start if self._depth else 0.0)


_clock = _Clock()


def compilation_seconds() -> float:
    """How long this process has been compiling and loading kernels."""
    return _clock.seconds()[1]


def seconds_without_compilation() -> float:
    """time.perf_counter() minus the time for compiling and loading kernels so far; only differences have a meaning."""
    now, compiling = _clock.seconds()
    return now - compiling


class compiling_for:  # a class, which takes a third of the time of a generator: `encode` and `decode` of short rows notice
    """Kernels that this thread compiles within are for this: a tensor type, an architecture. A line at the end says how long
    that took, if it took long. Within another of these, it changes nothing."""

    __slots__ = ("_is_outermost", "_subject")

    def __init__(self, subject: str):
        self._subject = subject

    def __enter__(self) -> None:
        self._is_outermost = not _thread.subject
        if self._is_outermost:
            _thread.subject = self._subject

    def __exit__(self, *_: object) -> None:
        if self._is_outermost:
            _thread.subject = ""
            if self._subject in _unreported:  # without the lock, since this is asked at each call of `encode` and `decode`
                _tell(self._subject)


@contextmanager
def waiting_for_compilation() -> Iterator[None]:
    """Within this, the thread waits for another process that compiles: that counts as compiling."""
    _clock.stop()
    _begin(_thread.subject or "this job")
    try:
        yield
    finally:
        _end()
        _clock.resume()


def compiling_now() -> tuple[str, float] | None:
    """What is compiled for at this moment, and for how many seconds so far; None if nothing is."""
    with _lock:
        if _now is None:
            return None
        began, subject = _now
        return subject, _unreported.get(subject, 0.0) + time.perf_counter() - began


def compiled_kernels() -> int:
    """How many kernels this process has compiled; those that were on disk do not count."""
    return len(_compiled)


def line_about(subject: str, seconds: float) -> str:
    """What people read of it."""
    return f"compiling kernels for {subject}: {seconds:.0f} s"


@contextmanager
def compilation_lines(write: Callable[[str], None]) -> Iterator[None]:
    """Within this, lines about compiling go to `write`, instead of to stderr."""
    global _write
    before, _write = _write, write
    try:
        yield
    finally:
        _write = before


@contextmanager
def compilation_heard(report: Callable[[str], None]) -> Iterator[None]:
    """Within this, `report` is called with what is compiled for when a kernel begins to be compiled, and each second while it
    is, by the thread that compiles it."""
    _listeners.append(report)
    try:
        yield
    finally:
        _listeners.remove(report)


def _begin(subject: str) -> None:
    global _now
    with _lock:
        _thread.compiles = _now = time.perf_counter(), subject
    _say(subject)


def _say(subject: str) -> None:
    _thread.said = time.perf_counter()
    for report in tuple(_listeners):
        report(subject)


def _end() -> None:
    global _now
    if _thread.compiles is None:
        return
    began, subject = _thread.compiles
    with _lock:
        _unreported[subject] = _unreported.get(subject, 0.0) + time.perf_counter() - began
        _thread.compiles = _now = None
    if not _thread.subject:
        _tell(subject)


def _tell(subject: str) -> None:
    with _lock:
        seconds = _unreported.get(subject)
        if seconds is None or seconds < _LEAST_SECONDS:
            return
        del _unreported[subject]
    _write(line_about(subject, seconds))


@functools.cache
def listen() -> None:
    """From now on, compilations of numba are noticed. Called before the first kernel is compiled or loaded."""
    from numba.core import event

    class CompilerLock(event.Listener):
        def on_start(self, event: event.Event) -> None:
            _clock.stop()
            _thread.locks += 1

        def on_end(self, event: event.Event) -> None:
            _thread.locks -= 1
            if not _thread.locks:
                _end()
            _clock.resume()

    class Passes(event.Listener):
        """Passes of the compiler: kernels that are loaded have none."""

        def on_start(self, event: event.Event) -> None:
            module = (event.data or {}).get("module") or ""
            if _thread.compiles is not None:
                if time.perf_counter() - _thread.said >= _HEARD_EVERY:
                    _say(_thread.compiles[1])
            elif _thread.locks and module.startswith(_PACKAGE + "."):
                _announce()
                _begin(_thread.subject or module.split(".")[1])

        def on_end(self, event: event.Event) -> None:
            pass

    class Kernels(event.Listener):
        def on_start(self, event: event.Event) -> None:
            function: Any = getattr((event.data or {}).get("dispatcher"), "py_func", None)
            if (getattr(function, "__module__", "") or "").startswith(_PACKAGE + "."):
                _compiled.append(function.__qualname__)

        def on_end(self, event: event.Event) -> None:
            pass

    event.register("numba:compiler_lock", CompilerLock())
    event.register("numba:run_pass", Passes())
    event.register("numba:compile", Kernels())


@functools.cache
def _announce() -> None:
    from .kernel_cache import delete_unused

    _write(f"compiling kernels (once for this version; cached in {cache_home()})")
    delete_unused(cache_home())
