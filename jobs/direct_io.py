"""Writing past the page cache: bytes go from an aligned buffer of the process to the disk, without a copy in the kernel.

Copying a large model into the page cache can take longer than the disk does, above all on a virtual machine, whose memory is
only provided when it is touched; and what the copy pushes out of memory is often what is read next. So large tensors are
gathered in an aligned buffer and written with O_DIRECT, block by block. What lies before the first and after the last complete
block is written through the cache, and so is everything when the file system refuses O_DIRECT or the disk is so slow that
a program that reads the file next should find it in memory.
"""

from __future__ import annotations

import errno
import mmap
from time import perf_counter

import numpy as np

from ..operating_system import files

BLOCK = 4096  # bytes; a multiple of the alignment that devices and file systems ask for
BUFFER_BYTES = 8 << 20
MIN_TENSOR_BYTES = 4 << 20  # smaller tensors go through the cache: they are not worth a wait for the disk
TRIAL_BYTES = 128 << 20  # written before the disk's speed is judged
SLOW = 150e6  # bytes per second; spinning disks and network storage are below it


class DirectWriter:
    """Writes runs of bytes to open files, each from front to back: `start`, `write` as often as needed, `flush`.

    For one thread at a time. usable: False once it has turned out that the file system cannot do it or that the disk is slow;
    from then on everything is written through the page cache.
    """

    def __init__(self) -> None:
        self.usable = files.has_direct_io()
        self._buffer = memoryview(b"")
        self._fd, self._offset, self._filled = -1, 0, 0  # the buffer's bytes go to byte _offset of the file _fd
        self._bytes, self._seconds = 0, 0.0

    def start(self, fd: int, offset: int) -> None:
        """The next bytes go to this offset of this file; bytes written before and not flushed are dropped."""
        if not self._buffer:  # a shared mapping, so that a fork in the middle of a write is safe (open(2) on O_DIRECT)
            self._buffer = memoryview(mmap.mmap(-1, BUFFER_BYTES))
        self._fd, self._offset, self._filled = fd, offset, 0

    def write(self, data: memoryview) -> None:
        """Takes the next bytes; they reach the file when the buffer is full, at the latest with `flush`. Raises OSError."""
        if not self._filled:
            unaligned = min(-self._offset % BLOCK, len(data))
            self._write_cached(data[:unaligned])
            data = data[unaligned:]
        while data:
            count = min(len(data), BUFFER_BYTES - self._filled)
            _copy(self._buffer[self._filled : self._filled + count], data[:count])
            self._filled, data = self._filled + count, data[count:]
            if self._filled == BUFFER_BYTES:
                self.flush()

    def flush(self) -> None:
        """Writes what is in the buffer. Raises OSError."""
        filled, self._filled = self._buffer[: self._filled], 0
        if self.usable:
            filled = filled[self._write_direct(filled[: len(filled) // BLOCK * BLOCK]) :]
        self._write_cached(filled)

    def _write_cached(self, data: memoryview) -> None:
        while data:
            count = files.write_at(self._fd, data, self._offset)
            self._offset, data = self._offset + count, data[count:]

    def _write_direct(self, blocks: memoryview) -> int:
        """Writes complete blocks with O_DIRECT; returns the bytes written, fewer than given if the file system refuses."""
        started, first_offset = perf_counter(), self._offset
        try:
            files.set_direct_io(self._fd, True)
            while blocks and self._offset % BLOCK == 0:
                count = files.write_at(self._fd, blocks, self._offset)
                self._offset, blocks = self._offset + count, blocks[count:]
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.usable = False
        finally:
            files.set_direct_io(self._fd, False)
        self._bytes += self._offset - first_offset
        self._seconds += perf_counter() - started
        if self._bytes >= TRIAL_BYTES and self._bytes < SLOW * self._seconds:
            self.usable = False
        return self._offset - first_offset


def _copy(destination: memoryview, source: memoryview) -> None:
    np.copyto(np.frombuffer(destination, np.uint8), np.frombuffer(source, np.uint8))  # releases the GIL
