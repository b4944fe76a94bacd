"""A clock for speeds: time in which numba compiles or loads kernels, which happens once per process, does not count."""

from __future__ import annotations

import threading
import time

from numba.core import event


class _CompilationTimer(event.Listener):
    """Adds up the time in which any thread holds numba's compiler lock or waits for it."""

    def __init__(self) -> None:
        self._lock, self._depth, self._start, self._total = threading.Lock(), 0, 0.0, 0.0

    def on_start(self, event: event.Event) -> None:
        with self._lock:
            if not self._depth:
                self._start = time.perf_counter()
            self._depth += 1

    def on_end(self, event: event.Event) -> None:
        with self._lock:
            self._depth -= 1
            if not self._depth:
                self._total += time.perf_counter() - self._start

    def seconds_without_compilation(self) -> float:
        with self._lock:
            return (self._start if self._depth else time.perf_counter()) - self._total


_timer = _CompilationTimer()
event.register("numba:compiler_lock", _timer)


def seconds_without_compilation() -> float:
    """time.perf_counter() minus the time for compiling and loading kernels so far; only differences have a meaning."""
    return _timer.seconds_without_compilation()
