"""Threads that share out the work of a forward pass: compiled programs (see team.py) and Python functions (`Workers.map`).

The same threads serve both. They wait for compiled programs in compiled code, so that handing one out takes a microsecond or
two; after half a millisecond without work they block in the operating system, and take some 50 microseconds to come back.
"""

from __future__ import annotations

import contextvars
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from typing import Any, TypeVar

from ..operating_system.numa import ThreadPlace
from ..operating_system.process import after_fork, c_address
from . import team

Item = TypeVar("Item")
Result = TypeVar("Result")

PARALLEL_THRESHOLD = 4 << 20  # multiplications: some 50 microseconds of one core, which is what waking another one costs
_SPIN_SECONDS = 5e-4  # that a helper waits in compiled code before it blocks


class _Call:
    """A Python function that a helper is to run once, in a copy of the caller's context (which has numpy's error settings)."""

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
        """Waits until it has run; returns what it raised."""
        self._done.acquire()
        return self._error


class _Helpers:
    """The helper threads and the state they share with the threads that give them work. They hold no reference to `Workers`,
    so that this can be collected while they wait."""

    def __init__(self, count: int, places: Sequence[ThreadPlace]):
        self.count, self._places = count, places
        self._clear()
        _alive.add(self)

    def _clear(self) -> None:
        self._state = team.new_state(c_address("sched_yield"))  # waiting threads let others run on a busy machine
        self.address = team.state_address(self._state)
        # Reentrant, because garbage collection may call `stop` anywhere, also where this thread holds the lock.
        self._lock, self._wake_up = threading.RLock(), threading.Semaphore(0)
        self._calls: list[_Call] = []
        self._threads: list[threading.Thread] = []
        self.asleep, self._stopped = 0, False

    def after_fork(self) -> None:
        """In the child process, which has none of the threads: they are started again when needed."""
        self._clear()

    def start(self) -> None:
        with self._lock:
            if self._threads or self._stopped:
                return
            patience = max(1, int(_SPIN_SECONDS / _pause_seconds()))
            for i in range(self.count):
                thread = threading.Thread(target=self._serve, args=(patience, i), name=f"ggufmill_{i}", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the system allows no more threads: it works with fewer
                    return
                self._threads.append(thread)

    @property
    def started(self) -> bool:
        return bool(self._threads)

    def processor_seconds(self) -> float:
        """What the threads that run have taken of processors."""
        running = (thread.ident for thread in self._threads if thread.is_alive())
        return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in running if ident is not None)

    def wake(self) -> None:
        with self._lock:
            if self.asleep:
                self._wake_up.release(self.asleep)
                self.asleep = 0

    def stop(self) -> None:
        """Ends the threads. Programs and calls that come later run on the calling thread."""
        with self._lock:
            self._stopped = True
            self._set_command()
        self.wake()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(1)

    def submit(self, calls: list[_Call]) -> None:
        with self._lock:
            self._calls += calls
            self._set_command()
        self.wake()

    def cancel(self, call: _Call) -> bool:
        """Takes back a call that no thread has begun. Returns whether that was so."""
        with self._lock:
            if call not in self._calls:
                return False
            self._calls.remove(call)
            self._set_command()
            return True

    def _word(self, offset: int) -> int:
        """The place in `_state` of the word at an offset in bytes (see team)."""
        return (self.address - self._state.ctypes.data + offset) // 8

    def _set_command(self) -> None:
        command = team.STOP if self._stopped else len(self._calls)
        self._state[self._word(team.COMMAND)] = command

    def _is_running(self) -> bool:
        """Whether the team has a program that has not ended."""
        return bool(self._state[self._word(team.RUNNING)])

    def _serve(self, patience: int, number: int) -> None:
        if self._places:
            with suppress(OSError):  # whether it is permitted was tried before
                self._places[number].enter()
        while True:
            command = team.help_out(self.address, patience)
            with self._lock:
                if self._stopped:
                    return
                call = self._calls.pop(0) if self._calls else None
                self._set_command()
                # A program that began just now may have found no thread asleep, and would run without this one.
                idle = call is None and command == team.NO_COMMAND and not self._is_running()
                self.asleep += idle
            if call is not None:
                call.run()
                del call  # it may refer to large arrays, and this thread may block for long
            elif idle:
                self._wake_up.acquire()


_alive: weakref.WeakSet[_Helpers] = weakref.WeakSet()


def _after_fork() -> None:
    for helpers in list(_alive):
        helpers.after_fork()


after_fork(_after_fork)


@cache
def _pause_seconds() -> float:
    """How long one pause of a waiting thread takes; processors differ by a factor of ten."""
    rounds = 2000
    team.pauses(1)
    times = []
    for _ in range(3):
        began = time.perf_counter()
        team.pauses(rounds)
        times.append(time.perf_counter() - began)
    return max(min(times) / rounds, 1e-9)


class Workers:
    """A team of `count` threads, the calling one included. The others end when it is collected, or with the interpreter.

    places: where each thread runs, the calling one first (within `placed`); empty if the system may run them anywhere.
    """

    def __init__(self, count: int, places: Sequence[ThreadPlace] = ()):
        self.count, self.places = count, places
        self._helpers = _Helpers(count - 1, places[1:]) if count > 1 else None
        if self._helpers is not None:
            weakref.finalize(self, self._helpers.stop)  # also called when the interpreter ends

    def placed(self) -> AbstractContextManager[None]:
        """Within this the calling thread is at its place."""
        return self.places[0].entered() if self.places else nullcontext()

    def ready(self) -> int:
        """The `team` argument of kernels that run programs: starts or wakes the threads. 0 where there is only one."""
        helpers = self._helpers
        if helpers is None:
            return 0
        if not helpers.started:
            helpers.start()
        elif helpers.asleep:
            helpers.wake()
        return helpers.address

    def processor_seconds(self) -> float:
        """What the calling thread and the helpers have taken of processors since they began; where the system does not say that
        of each thread (macOS, Windows), what the process has. Of a thread that runs elsewhere, Linux counts for the process
        only what it had taken at the last tick, up to some milliseconds ago."""
        if self._helpers is None:
            return time.thread_time()
        if not hasattr(time, "pthread_getcpuclockid"):
            return time.process_time()
        return time.thread_time() + self._helpers.processor_seconds()

    def map(
        self, function: Callable[[Item], Result], items: Iterable[Item], multiplications: int = PARALLEL_THRESHOLD
    ) -> list[Result]:
        """[function(item) for item in items]; each item goes to the next thread that is free. Calls may be nested.

        multiplications: an estimate of all the work; below PARALLEL_THRESHOLD the calling thread does everything. The first
        exception is raised again here, after the other threads have finished the items they had begun.
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
        helpers.submit(calls)
        try:
            work()
        finally:
            # Calls that no thread has begun have nothing left to do; a helper that waited for them could wait forever.
            begun = [call for call in calls if not helpers.cancel(call)]
            errors = [error for call in begun if (error := call.error()) is not None]
        if errors:
            raise errors[0]
        return [results[i] for i in range(len(todo))]


ALONE = Workers(1)  # the calling thread
