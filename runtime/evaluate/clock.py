"""A clock for speeds: it stands still while kernels are compiled or loaded, which happens once in a process."""

from __future__ import annotations

import threading
import time

from numba.core import event


class _Working(event.Listener):
    """Takes the time in which any thread holds numba's compiler, or waits for it, out of the time that passes."""

    def __init__(self) -> None:
        self._lock, self._depth, self._since, self._compiling = threading.Lock(), 0, 0.0, 0.0

    def on_start(self, event: event.Event) -> None:
        with self._lock:
            if not self._depth:
                self._since = time.perf_counter()
            self._depth += 1

    def on_end(self, event: event.Event) -> None:
        with self._lock:
            self._depth -= 1
            if not self._depth:
                self._compiling += time.perf_counter() - self._since

    def now(self) -> float:
        with self._lock:
            return (self._since if self._depth else time.perf_counter()) - self._compiling


_working = _Working()
event.register("numba:compiler_lock", _working)


def working_seconds() -> float:
    """As time.perf_counter(), of which only differences mean something, without what compiling and loading kernels takes."""
    return _working.now()
