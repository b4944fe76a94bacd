"""Running independent pieces of a pass on several cores.

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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

WORTH_SHARING = 4 << 20  # multiplications: some 50 microseconds of one core, which is what waking another one costs


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Workers:
    """`count` threads, the calling one among them."""

    def __init__(self, count: int):
        self.count = count
        self._pool = ThreadPoolExecutor(count - 1, "ggufmill") if count > 1 else None

    def map(
        self, function: Callable[[Item], Result], items: Iterable[Item], multiplications: int = WORTH_SHARING
    ) -> list[Result]:
        """[function(item) for item in items], the items taken by whichever thread is free; may be used within itself.

        multiplications: how many all of it takes; for few the calling thread does everything. The first exception is raised
        again here, after the other threads have finished what they had begun.
        """
        todo = list(items)
        if self._pool is None or len(todo) < 2 or multiplications < WORTH_SHARING:
            return [function(item) for item in todo]
        results: dict[int, Result] = {}
        numbers = itertools.count()  # next() on it is atomic

        def work() -> None:
            for i in numbers:
                if i >= len(todo):
                    return
                results[i] = function(todo[i])

        # Each in a copy of the caller's context, which holds numpy's error settings.
        helpers = [self._pool.submit(contextvars.copy_context().run, work) for _ in range(min(self.count, len(todo)) - 1)]
        try:
            work()
        finally:
            # What has not begun has nothing left to do; waiting for it from within a worker could wait forever.
            running = [helper for helper in helpers if not helper.cancel()]
            wait(running)
        for helper in running:
            helper.result()
        return [results[i] for i in range(len(todo))]


@cache
def _blas_control() -> tuple[Callable[[], int], Callable[[int], None]] | None:
    """OpenBLAS's get and set of its number of threads, from the library that numpy has loaded (Linux; elsewhere None)."""
    try:
        loaded = set(re.findall(r"(/\S*openblas\S*\.so\S*)", Path("/proc/self/maps").read_text()))
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
