"""Byte ranges of files: read into memory, or hashed.

Jobs that go through a whole model read it this way rather than through a memory mapping: mapped pages count as memory of the
process until the system takes them back, so the peak of a job would grow with the model.
"""

from __future__ import annotations

import io
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import xxhash

from ..errors import FormatError
from ..operating_system.files import BINARY, read_at, read_next
from .deleted_shards import deleted_error, record_path

HASH_BLOCK_BYTES = 1 << 24  # read and hashed at a time
_READ_BYTES = 1 << 20  # read at a time: more is allocated even for a small file
PIPED_TEXTS = ("standard input", "pipe")  # names of the files that texts from standard input, and from a pipe, are copied into
PIPE_SECONDS = 10.0  # that a pipe has until something opens it for writing
MAX_FILE = 1 << 30  # bytes of a file that is read as a whole


def read_range(path: Path, offset: int, nbytes: int) -> np.ndarray:
    """nbytes of a file from `offset` on -> uint8 [nbytes]. Raises FormatError if the file ends before, or cannot be read."""
    out = np.empty(nbytes, np.uint8)
    try:
        fd = os.open(path, os.O_RDONLY | BINARY)
        try:
            done = 0
            while done < nbytes:
                count = read_at(fd, out[done:].data, offset + done)
                if count == 0:
                    raise FormatError(f"{path}: the file has become shorter: it ends at byte {offset + done}")
                done += count
        finally:
            os.close(fd)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and record_path(path).exists():
            raise deleted_error(path) from None
        raise FormatError(f"{path}: {error.strerror or error}") from None
    return out


def check_regular(path: Path, limit: int | None = None) -> None:
    """Raises FormatError for what is no regular file, as pipes block and devices never end; limit: the most bytes it may have.

    A file that is absent is an error for the caller that opens it.
    """
    try:
        status = path.stat()
    except OSError:
        return
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        raise FormatError(f"{path}: not a regular file (a pipe, a socket or a device); copy it into a file first")
    if limit is not None and status.st_size > limit:
        raise FormatError(f"{path}: {status.st_size} bytes are too many for such a file; {limit} are the most that are read")


def read_file(path: Path, *, pipes: bool = False) -> bytes:
    """All bytes of a file that is read as a whole, such as a vocabulary, a recipe or a text.

    pipes: one is read to its end, too. Raises FormatError for what is no regular file or has more than MAX_FILE bytes, and for
    a pipe into which nothing writes, OSError for what cannot be read.
    """
    data = bytearray()
    for block in pipe_blocks(path) if pipes and path.is_fifo() else _file_blocks(path):
        data += block
        if len(data) > MAX_FILE:
            raise FormatError(f"{path}: more than {MAX_FILE} bytes are too many for such a file")
    return bytes(data)


def pipe_blocks(path: Path) -> Iterator[bytes]:
    """The bytes that are written into a pipe, up to its end. Raises FormatError if nothing has opened it for writing after
    PIPE_SECONDS: a pipe that is opened as a file is would be waited for for ever."""
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        end = time.monotonic() + PIPE_SECONDS
        with suppress(BlockingIOError):  # there is a writer, which has not written yet
            while not (block := read_next(fd, _READ_BYTES)):
                if time.monotonic() > end:
                    raise FormatError(f"{path}: nothing writes into this pipe")
                time.sleep(0.01)
            yield block
        os.set_blocking(fd, True)
        while block := read_next(fd, _READ_BYTES):
            yield block
    finally:
        os.close(fd)


def _file_blocks(path: Path) -> Iterator[bytes]:
    check_regular(path, MAX_FILE)
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            yield block


def read_text(path: Path, encoding: str = "utf-8", errors: str = "strict", *, pipes: bool = False) -> str:
    """As `read_file`, decoded, with line ends as \\n. Raises UnicodeDecodeError besides."""
    return io.TextIOWrapper(io.BytesIO(read_file(path, pipes=pipes)), encoding, errors).read()


def check_file_size(path: Path, end: int) -> None:
    """Raises FormatError if the file now ends before byte `end`, although it reached that far when it was mapped."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None
    if size < end:
        raise FormatError(f"{path}: the file has become shorter: it ends at byte {size}")


def range_checksum(path: Path, offset: int, nbytes: int, progress: Callable[[int, str], None] | None = None) -> str:
    """xxh3-64 of nbytes of a file from `offset` on, in hex. progress(bytes, '') is called after each block.

    Raises FormatError as `read_range` does.
    """
    digest = xxhash.xxh3_64()
    for start in range(offset, offset + nbytes, HASH_BLOCK_BYTES):
        block = read_range(path, start, min(HASH_BLOCK_BYTES, offset + nbytes - start))
        digest.update(block.data)
        if progress is not None:
            progress(len(block), "")
    return digest.hexdigest()
