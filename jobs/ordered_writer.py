"""Writing chunks that come in any order in the order of their numbers, each tensor hashed on the way.

Whoever brings the chunk that is due writes it and all that follow it and are there; others only leave theirs. So files are
written from front to back by one thread at a time, which is what disks like best, and a checksum costs no second reading.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from threading import Lock, Semaphore
from typing import Any

import numpy as np
import xxhash

from .direct_io import LEAST_BYTES, DirectWriter

FLUSH_BYTES = 32 << 20  # so much is written before the system is told to begin bringing it to disk
_WRITE = 2  # SYNC_FILE_RANGE_WRITE: begin writing the dirty pages of a range, do not wait (linux/fs.h)


@dataclass
class Sink:
    """A tensor under way: where its next byte goes, how many are left, the checksum of what was written."""

    name: str
    handle: int
    at: int
    left: int
    failed: bool = False
    digest: Any = field(default_factory=xxhash.xxh3_64)


class OrderedWriter:
    """done(sink) is called when a tensor's last byte is written; wrote(bytes, name) after each chunk. Neither is ever called by
    two threads at once.

    slots bounds the chunks that are under way: to be acquired before one is begun; released here when it is written.
    direct: large tensors are written past the page cache (see `direct`).
    failures: what went wrong in writing or was given to `fail`; once there is one, chunks are still taken, for tensors that
    can yet be finished.
    """

    def __init__(self, slots: int, done: Callable[[Sink], None], wrote: Callable[[int, str], None], *, direct: bool = False):
        self.slots = Semaphore(slots)
        self.failures: list[BaseException] = []
        self._done, self._wrote = done, wrote
        self._lock = Lock()
        self._ready: dict[int, tuple[Sink, np.ndarray | None]] = {}
        self._next, self._busy = 0, False
        self._flushed: dict[int, int] = {}
        self._direct = DirectWriter() if direct else None
        self._into: Sink | None = None  # the tensor whose bytes the direct writer takes

    def put(self, number: int, sink: Sink, data: np.ndarray | None) -> None:
        """data: uint8, C-contiguous, the tensor's next bytes after those of the chunk before; None for one that failed."""
        with self._lock:
            self._ready[number] = sink, data
            if self._busy:
                return
            self._busy = True
        while True:
            with self._lock:
                item = self._ready.pop(self._next, None)
                if item is None:
                    self._busy = False
                    return
                self._next += 1
            try:
                self._take(*item)
            except BaseException as error:
                item[0].failed = True
                self.failures.append(error)
            finally:
                self.slots.release()

    def fail(self, number: int, sink: Sink, error: BaseException) -> None:
        self.failures.append(error)
        self.put(number, sink, None)

    def _take(self, sink: Sink, data: np.ndarray | None) -> None:
        if data is None or sink.failed:
            sink.failed = True
            return
        view = memoryview(data.reshape(-1).data)
        sink.digest.update(view)
        if not self._put_direct(sink, view):
            while view:
                written = os.pwrite(sink.handle, view, sink.at)
                sink.at, view = sink.at + written, view[written:]
            self._flush(sink)
        sink.left -= data.size
        self._wrote(data.size, sink.name)
        if sink.left == 0:
            self._done(sink)

    def _put_direct(self, sink: Sink, view: memoryview) -> bool:
        if self._direct is None:
            return False
        if sink is not self._into:
            if sink.left < LEAST_BYTES or not self._direct.usable:
                return False
            self._into = sink
            self._direct.begin(sink.handle, sink.at)
        self._direct.put(view)
        sink.at += len(view)
        if sink.left == len(view):
            self._direct.end()
        return True

    def _flush(self, sink: Sink) -> None:
        """Begins bringing to disk what was written some while ago: else all of it waits for the end, or for the system's limit
        of unwritten pages, at which everybody is held up."""
        since = self._flushed.setdefault(sink.handle, sink.at)
        if sink.at < since:
            self._flushed[sink.handle] = sink.at
        elif sink.at - since >= FLUSH_BYTES:
            begin = _sync_file_range()
            if begin is not None:
                begin(sink.handle, ctypes.c_int64(since), ctypes.c_int64(sink.at - since), _WRITE)
            self._flushed[sink.handle] = sink.at


@cache
def _sync_file_range() -> Callable[..., int] | None:
    """The system call, where there is one (Linux); it is only advice, and its answer does not matter."""
    try:
        return ctypes.CDLL(None).sync_file_range
    except (AttributeError, OSError):
        return None
