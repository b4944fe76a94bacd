"""Writing past the page cache: bytes go from a buffer of ours to the disk, without a copy of them in the system's memory.

To copy a large model into the page cache can take longer than the disk does, the more so on a virtual machine, whose memory
is only provided when it is touched; and what is pushed out of memory by it is often what is read next. So large tensors are
gathered in an aligned buffer and written with O_DIRECT, block by block; what lies before the first and after the last whole
block goes the usual way, as does everything where the file system cannot do this, or the disk is so slow that those who read
the file next had better find it in memory.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from time import perf_counter

import numpy as np

BLOCK = 4096  # bytes; a multiple of what devices and file systems ask for
BUFFER_BYTES = 8 << 20
LEAST_BYTES = 4 << 20  # of a tensor: a smaller one is not worth a wait for the disk
TRIAL_BYTES = 128 << 20  # written before the disk is judged
SLOW = 150e6  # bytes per second: spinning disks, and what is behind a network

_O_DIRECT = getattr(os, "O_DIRECT", 0)


class DirectWriter:
    """Writes runs of bytes, each from front to back: `begin`, `put` as often as needed, `end`. For one thread at a time.

    usable: False once it has turned out that nothing is won or that the file system cannot do it; from then on all is written
    the usual way.
    """

    def __init__(self) -> None:
        self.usable = bool(_O_DIRECT)
        self._buffer = memoryview(b"")
        self._handle, self._at, self._filled = -1, 0, 0  # the buffer's bytes go to byte _at of the file _handle
        self._bytes, self._seconds = 0, 0.0

    def begin(self, handle: int, at: int) -> None:
        """What comes goes to this byte of this file, and on; what was put and not ended is forgotten."""
        if not self._buffer:  # shared, so that a fork meanwhile does no harm (open(2) on O_DIRECT)
            self._buffer = memoryview(mmap.mmap(-1, BUFFER_BYTES))
        self._handle, self._at, self._filled = handle, at, 0

    def put(self, data: memoryview) -> None:
        """It is written now or later, at the latest by `end`. Raises OSError."""
        if not self._filled:
            lead = min(-self._at % BLOCK, len(data))
            self._write(data[:lead])
            data = data[lead:]
        while data:
            count = min(len(data), BUFFER_BYTES - self._filled)
            _copy(self._buffer[self._filled : self._filled + count], data[:count])
            self._filled, data = self._filled + count, data[count:]
            if self._filled == BUFFER_BYTES:
                self.end()

    def end(self) -> None:
        """Brings out what is in the buffer."""
        filled, self._filled = self._buffer[: self._filled], 0
        if self.usable:
            filled = filled[self._write_direct(filled[: len(filled) // BLOCK * BLOCK]) :]
        self._write(filled)

    def _write(self, data: memoryview) -> None:
        while data:
            written = os.pwrite(self._handle, data, self._at)
            self._at, data = self._at + written, data[written:]

    def _write_direct(self, blocks: memoryview) -> int:
        """Bytes written, fewer than there are if this file system cannot go on."""
        began, start, flags = perf_counter(), self._at, fcntl.fcntl(self._handle, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._handle, fcntl.F_SETFL, flags | _O_DIRECT)
            while blocks and self._at % BLOCK == 0:
                written = os.pwrite(self._handle, blocks, self._at)
                self._at, blocks = self._at + written, blocks[written:]
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.usable = False
        finally:
            fcntl.fcntl(self._handle, fcntl.F_SETFL, flags)
        self._bytes, self._seconds = self._bytes + self._at - start, self._seconds + perf_counter() - began
        if self._bytes >= TRIAL_BYTES and self._bytes < SLOW * self._seconds:
            self.usable = False
        return self._at - start


def _copy(to: memoryview, data: memoryview) -> None:
    np.copyto(np.frombuffer(to, np.uint8), np.frombuffer(data, np.uint8))  # without the GIL
