"""Writing chunks that arrive in any order in the order of their numbers, with a checksum of each tensor on the way.

The thread that brings the chunk that is due writes it and all consecutive ones that have arrived; the other threads only leave
theirs. So files are written from front to back by one thread at a time, which suits disks best, and the checksums need no
second reading.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from threading import Condition, Semaphore
from typing import Any

import numpy as np
import xxhash

from ..data_classes import dataclass
from ..operating_system import files
from .direct_io import MIN_TENSOR_BYTES, DirectWriter

WRITEBACK_BYTES = 32 << 20  # written to a file between two requests to start bringing it to disk


@dataclass
class Sink:
    """A tensor that is being written.

    fd         the open file that it goes to
    offset     of its next byte in that file
    remaining  bytes that are still to come
    failed     a chunk of it could not be made or written; later chunks are dropped
    digest     xxh3-64 of the bytes written so far
    """

    name: str
    fd: int
    offset: int
    remaining: int
    failed: bool = False
    digest: Any = field(default_factory=xxhash.xxh3_64)


class OrderedWriter:
    """Takes numbered chunks from many threads and writes them in the order of their numbers.

    slots     bounds the chunks in flight: acquire one before making a chunk; it is released when the chunk is written
    failures  exceptions of writing and those given to `fail`. After one, chunks are still taken, so that tensors that can
              be finished are.
    """

    def __init__(
        self,
        slots: int,
        on_finished: Callable[[Sink], None],
        on_written: Callable[[int, str], None],
        *,
        direct: bool = False,
        on_bytes: Callable[[str, memoryview], None] | None = None,
    ):
        """on_finished(sink) is called when a tensor's last byte is written, on_written(bytes, tensor name) after each chunk,
        on_bytes(tensor name, its bytes) before; none by two threads at once. direct: large tensors bypass the page cache (see
        `direct_io`)."""
        self.slots = Semaphore(slots)
        self.failures: list[BaseException] = []
        self._on_finished, self._on_written, self._on_bytes = on_finished, on_written, on_bytes
        self._lock = Condition()
        self._arrived: dict[int, tuple[Sink, np.ndarray | None]] = {}
        self._next, self._is_writing, self._is_closed = 0, False, False
        self._writeback_from: dict[int, int] = {}  # fd -> offset up to which writing to disk was requested
        self._direct = DirectWriter() if direct else None
        self._direct_sink: Sink | None = None  # the tensor whose bytes the direct writer takes

    def put(self, number: int, sink: Sink, data: np.ndarray | None) -> None:
        """Chunk `number`: the tensor's next bytes after those of its chunk before, uint8, C-contiguous; None if it failed."""
        with self._lock:
            self._arrived[number] = sink, data
            if self._is_writing:
                return
            self._is_writing = True
        try:
            while (item := self._take()) is not None:
                try:
                    self._write(*item)
                except BaseException as error:
                    item[0].failed = True
                    self.failures.append(error)
                finally:
                    self.slots.release()
        except BaseException:  # an interrupt beside `_write`
            self._stop_writing()
            raise

    def _take(self) -> tuple[Sink, np.ndarray | None] | None:
        """The chunk that is due; None: it has not arrived, and this thread does not write any more."""
        with self._lock:
            item = None if self._is_closed else self._arrived.pop(self._next, None)
            if item is None:
                self._stop_writing()
            else:
                self._next += 1
            return item

    def _stop_writing(self) -> None:
        with self._lock:
            self._is_writing = False
            self._lock.notify_all()

    def fail(self, number: int, sink: Sink, error: BaseException) -> None:
        """Chunk `number` could not be made: its tensor will not be finished."""
        self.failures.append(error)
        self.put(number, sink, None)

    def close(self) -> None:
        """Returns when nothing is written any more, whatever other threads bring: before files are closed."""
        with self._lock:
            self._is_closed = True
            self._lock.wait_for(lambda: not self._is_writing)
        if self._direct is not None:
            self._direct.close()

    def _write(self, sink: Sink, data: np.ndarray | None) -> None:
        if data is None or sink.failed:
            sink.failed = True
            return
        view = memoryview(data.reshape(-1).data)
        sink.digest.update(view)
        if self._on_bytes is not None:
            self._on_bytes(sink.name, view)
        if not self._write_direct(sink, view):
            while view:
                count = files.write_at(sink.fd, view, sink.offset)
                sink.offset, view = sink.offset + count, view[count:]
            self._request_writeback(sink)
        sink.remaining -= data.size
        self._on_written(data.size, sink.name)
        if sink.remaining == 0:
            self._on_finished(sink)

    def _write_direct(self, sink: Sink, view: memoryview) -> bool:
        """Whether the direct writer took the bytes: all of a large tensor, from its first chunk on."""
        if self._direct is None:
            return False
        if sink is not self._direct_sink:
            self._direct.wait()  # for bytes of one that failed
            if sink.remaining < MIN_TENSOR_BYTES or not self._direct.usable:
                return False
            self._direct_sink = sink
            self._direct.start(sink.fd, sink.offset)
        self._direct.write(view)
        sink.offset += len(view)
        if sink.remaining == len(view):
            self._direct.flush()
        return True

    def _request_writeback(self, sink: Sink) -> None:
        """Starts bringing earlier bytes to disk: else all of them wait for the final fsync, or for the kernel's limit of dirty
        pages, at which every writer is stopped."""
        start = self._writeback_from.setdefault(sink.fd, sink.offset)
        if sink.offset < start:
            self._writeback_from[sink.fd] = sink.offset
        elif sink.offset - start >= WRITEBACK_BYTES:
            files.start_writeback(sink.fd, start, sink.offset - start)
            self._writeback_from[sink.fd] = sink.offset
