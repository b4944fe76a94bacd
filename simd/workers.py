"""Running independent pieces of a pass on several cores.

The same threads serve both ways of sharing: compiled programs (`kernels.team`), for which they wait in compiled code so that
handing one out takes a microsecond or two, and Python functions (`Workers.map`). Threads that have had nothing to do for half
a millisecond block in the operating system, and take some 50 microseconds to come back.

numpy's own threading of matrix products is switched off meanwhile: it pays per product, so that the small ones of experts and
heads gain nothing, and its waiting threads spin, which on a busy machine made everything several times slower (measured: 7 x).
"""

from __future__ import annotations

import contextvars
import ctypes
import itertools
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from . import team

Item = TypeVar("Item")
Result = TypeVar("Result")

PARALLEL_THRESHOLD = 4 << 20  # multiplications: some 50 microseconds of one core, which is what waking another one costs
_PATIENCE = 5e-4  # seconds that a helper waits in compiled code


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Call:
    """A Python function that some helper is to run once, in a copy of the maker's context (which holds numpy's settings)."""

    def __init__(self, function: Callable[[], None]):
        self._function, self._context = function, contextvars.copy_context()
        self._done = threading.Lock()
        self._done.acquire()
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._context.run(self._function)
        except BaseException as error:  # raised again where it is waited for
            self._error = error
        finally:
            self._done.release()

    def error(self) -> BaseException | None:
        """Waits for the end of it; what it raised."""
        self._done.acquire()
        return self._error


class _Helpers:
    """The threads, and what they share with those who give them work. They hold no reference to `Workers`."""

    def __init__(self, count: int):
        self.count = count
        self._clear()
        _alive.add(self)

    def _clear(self) -> None:
        self._state = team.new_state(_give_way())
        self.address = team.aligned(self._state)
        # A garbage collection may call `stop` at any place, also where this thread holds the lock.
        self._lock, self._wake_up = threading.RLock(), threading.Semaphore(0)
        self._calls: list[_Call] = []
        self._threads: list[threading.Thread] = []
        self.asleep, self._stopped = 0, False

    def forget(self) -> None:
        """In the child of a fork, which has none of the threads: they are started again when needed."""
        self._clear()

    def start(self) -> None:
        with self._lock:
            if self._threads or self._stopped:
                return
            patience = max(1, int(_PATIENCE / _round_seconds()))
            for i in range(self.count):
                thread = threading.Thread(target=self._serve, args=(patience,), name=f"ggufmill_{i}", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the system allows no more: fewer do it as well
                    return
                self._threads.append(thread)

    @property
    def started(self) -> bool:
        return bool(self._threads)

    def wake(self) -> None:
        with self._lock:
            if self.asleep:
                self._wake_up.release(self.asleep)
                self.asleep = 0

    def stop(self) -> None:
        """Ends the threads; what programs and calls are still to come run without them."""
        with self._lock:
            self._stopped = True
            self._set_orders()
        self.wake()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(1)

    def put(self, calls: list[_Call]) -> None:
        with self._lock:
            self._calls += calls
            self._set_orders()
        self.wake()

    def take_back(self, call: _Call) -> bool:
        """Whether nobody had begun it, and now nobody will."""
        with self._lock:
            if call not in self._calls:
                return False
            self._calls.remove(call)
            self._set_orders()
            return True

    def _set_orders(self) -> None:
        orders = team.ORDERS_STOP if self._stopped else len(self._calls)
        self._state[(self.address - self._state.ctypes.data + team.ORDERS) // 8] = orders

    def _serve(self, patience: int) -> None:
        while True:
            orders = team.help_out(self.address, patience)
            with self._lock:
                if self._stopped:
                    return
                call = self._calls.pop(0) if self._calls else None
                self._set_orders()
                if call is None and orders == team.ORDERS_NONE:
                    self.asleep += 1
            if call is not None:
                call.run()
                del call  # what it refers to may be large, and this thread may sleep for long
            elif orders == team.ORDERS_NONE:
                self._wake_up.acquire()


_alive: weakref.WeakSet[_Helpers] = weakref.WeakSet()


def _after_fork() -> None:
    for helpers in list(_alive):
        helpers.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@cache
def _give_way() -> int:
    """Address of sched_yield (0 where there is none): what keeps waiting threads from holding up others on a busy machine."""
    function = getattr(ctypes.CDLL(None), "sched_yield", None) if os.name == "posix" else None
    return ctypes.cast(function, ctypes.c_void_p).value or 0 if function is not None else 0


@cache
def _round_seconds() -> float:
    """How long a waiting thread's round takes; processors differ by a factor of ten."""
    rounds = 2000
    team.pauses(1)
    times = []
    for _ in range(3):
        began = time.perf_counter()
        team.pauses(rounds)
        times.append(time.perf_counter() - began)
    return max(min(times) / rounds, 1e-9)


class Workers:
    """`count` threads, the calling one among them."""

    def __init__(self, count: int):
        self.count = count
        self._helpers = _Helpers(count - 1) if count > 1 else None
        if self._helpers is not None:
            weakref.finalize(self, self._helpers.stop)  # also called when the interpreter ends

    def ready(self) -> int:
        """The `team` argument of kernels that run programs, its threads awake (or waking)."""
        helpers = self._helpers
        if helpers is None:
            return 0
        if not helpers.started:
            helpers.start()
        elif helpers.asleep:
            helpers.wake()
        return helpers.address

    def map(
        self, function: Callable[[Item], Result], items: Iterable[Item], multiplications: int = PARALLEL_THRESHOLD
    ) -> list[Result]:
        """[function(item) for item in items], the items taken by whichever thread is free; may be used within itself.

        multiplications: how many all of it takes; for few the calling thread does everything. The first exception is raised
        again here, after the other threads have finished what they had begun.
        """
        todo, helpers = list(items), self._helpers
        if helpers is None or len(todo) < 2 or multiplications < PARALLEL_THRESHOLD:
            return [function(item) for item in todo]
        results: dict[int, Any] = {}
        numbers = itertools.count()  # next() on it is atomic

        def work() -> None:
            for i in numbers:
                if i >= len(todo):
                    return
                results[i] = function(todo[i])

        calls = [_Call(work) for _ in range(min(self.count, len(todo)) - 1)]
        helpers.start()
        helpers.put(calls)
        try:
            work()
        finally:
            # What has not begun has nothing left to do; waiting for it from within a helper could wait forever.
            begun = [call for call in calls if not helpers.take_back(call)]
            errors = [error for call in begun if (error := call.error()) is not None]
        if errors:
            raise errors[0]
        return [results[i] for i in range(len(todo))]


@cache
def _blas_control() -> tuple[Callable[[], int], Callable[[int], None]] | None:
    """OpenBLAS's get and set of its number of threads, from the library that numpy has loaded (Linux; elsewhere None)."""
    try:
        loaded = set(re.findall(r"(/\S*openblas\S*\.so\S*)", Path("/proc/self/maps").read_text(errors="replace")))
    except OSError:
        return None
    for path in sorted(loaded, key=lambda path: "numpy" not in path):
        library = ctypes.CDLL(path)
        for pattern in ("scipy_openblas_{}64_", "scipy_openblas_{}", "openblas_{}64_", "openblas_{}"):
            get, put = (getattr(library, pattern.format(f"{verb}_num_threads"), None) for verb in ("get", "set"))
            if get is not None and put is not None:
                return get, put
    return None


_users, _before, _lock = 0, 0, threading.Lock()


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Within this, numpy computes a matrix product on the thread that asked for it. May be nested and used by many threads."""
    global _users, _before
    control = _blas_control()
    if control is None:
        yield
        return
    get, put = control
    with _lock:
        if _users == 0:
            _before = get()
            put(1)
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                put(_before)
