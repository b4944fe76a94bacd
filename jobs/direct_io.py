"""Writing past the page cache: bytes go from an aligned buffer of the process to the disk, without a copy in the kernel.

Copying a large model into the page cache can take longer than the disk does, above all on a virtual machine, whose memory is
only provided when it is touched; and what the copy pushes out of memory is often what is read next. So large tensors are
gathered in aligned buffers and written with O_DIRECT, block by block: one buffer by a thread of its own while the next is
filled, so that the disk does not wait. What lies before the first and after the last complete block is written through the
cache, and so is everything when the file system refuses O_DIRECT or the disk is so slow that a program that reads the file
next should find it in memory.
"""

from __future__ import annotations

import errno
import mmap
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter

import numpy as np

from ..operating_system import files

BLOCK = 4096  # bytes; a multiple of the alignment that devices and file systems ask for
BUFFER_BYTES = 8 << 20
MEMORY = 2 * BUFFER_BYTES  # of a writer: one buffer is written while the other is filled
MIN_TENSOR_BYTES = 4 << 20  # smaller tensors go through the cache: they are not worth a wait for the disk
TRIAL_BYTES = 128 << 20  # written before the disk's speed is judged
SLOW = 150e6  # bytes per second; spinning disks and network storage are below it


class DirectWriter:
    """Writes runs of bytes to open files, each from front to back: `start`, `write` as often as needed, `flush`.

    For one thread at a time; nothing else may write to the file between `start` and the end of `flush`, `wait` or `close`.

    usable  False once it has turned out that the file system cannot do it or that the disk is slow; from then on everything is
            written through the page cache
    """

    def __init__(self) -> None:
        self.usable = files.has_direct_io()
        self._buffer, self._other = memoryview(b""), memoryview(b"")  # the one that is filled, the one that may be written
        self._fd, self._offset, self._filled = -1, 0, 0  # the buffer's bytes go to byte _offset of the file _fd
        self._bytes, self._seconds = 0, 0.0
        self._thread = ThreadPoolExecutor(1, "direct writing")
        self._writing: Future[None] | None = None  # what it was last given

    def start(self, fd: int, offset: int) -> None:
        """The next bytes go to this offset of this file; bytes written before and not flushed are dropped."""
        self.wait()
        self._writing = None
        if not self._buffer:  # shared mappings, so that a fork in the middle of a write is safe (open(2) on O_DIRECT)
            self._buffer, self._other = (memoryview(mmap.mmap(-1, BUFFER_BYTES)) for _ in range(2))
        self._fd, self._offset, self._filled = fd, offset, 0

    def write(self, data: memoryview) -> None:
        """Takes the next bytes; they reach the file when the buffer is full, at the latest with `flush`. Raises OSError of
        these or of earlier ones."""
        if not self._filled:
            unaligned = min(-self._offset % BLOCK, len(data))
            self._write(self._fd, self._offset, data[:unaligned])
            self._offset, data = self._offset + unaligned, data[unaligned:]
        while data:
            count = min(len(data), BUFFER_BYTES - self._filled)
            _copy(self._buffer[self._filled : self._filled + count], data[:count])
            self._filled, data = self._filled + count, data[count:]
            if self._filled == BUFFER_BYTES:
                self._finish()
                self._writing = self._thread.submit(self._write, self._fd, self._offset, self._buffer)
                self._buffer, self._other = self._other, self._buffer
                self._offset, self._filled = self._offset + BUFFER_BYTES, 0

    def flush(self) -> None:
        """Writes what is in the buffer, and returns when all is written. Raises OSError."""
        self._finish()
        self._write(self._fd, self._offset, self._buffer[: self._filled])
        self._offset, self._filled = self._offset + self._filled, 0

    def wait(self) -> None:
        """Returns when nothing is being written any more, whether that succeeded or not."""
        if self._writing is not None:
            self._writing.exception()

    def close(self) -> None:
        """As `wait`, also for what an interrupt left to the thread, which then ends."""
        self._thread.shutdown()

    def _finish(self) -> None:
        """Waits for what the thread writes. Raises OSError."""
        if self._writing is not None:
            self._writing.result()

    def _write(self, fd: int, offset: int, data: memoryview) -> None:
        if self.usable and offset % BLOCK == 0 and len(data) >= BLOCK:
            count = self._write_direct(fd, offset, data[: len(data) // BLOCK * BLOCK])
            offset, data = offset + count, data[count:]
        while data:
            count = files.write_at(fd, data, offset)
            offset, data = offset + count, data[count:]

    def _write_direct(self, fd: int, offset: int, blocks: memoryview) -> int:
        """Writes complete blocks with O_DIRECT; returns the bytes written, fewer than given if the file system refuses."""
        started, first_offset = perf_counter(), offset
        try:
            files.set_direct_io(fd, True)
            while blocks and offset % BLOCK == 0:
                count = files.write_at(fd, blocks, offset)
                offset, blocks = offset + count, blocks[count:]
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.usable = False
        finally:
            files.set_direct_io(fd, False)
        self._bytes += offset - first_offset
        self._seconds += perf_counter() - started
        if self._bytes >= TRIAL_BYTES and self._bytes < SLOW * self._seconds:
            self.usable = False
        return offset - first_offset


def _copy(destination: memoryview, source: memoryview) -> None:
    np.copyto(np.frombuffer(destination, np.uint8), np.frombuffer(source, np.uint8))  # releases the GIL
