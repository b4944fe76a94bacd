"""Runs of bytes of a file: read into memory of our own, or hashed.

Jobs that walk through a whole model read so rather than through the mapping: mapped pages count as memory of the process
until the system takes them back, and a job's peak would grow with the model.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash

from ..errors import FormatError

HASH_BYTES = 1 << 24


def read_span(path: Path, offset: int, nbytes: int) -> np.ndarray:
    """uint8 [nbytes] from that byte on. Raises FormatError when the file ends before, or cannot be read."""
    out = np.empty(nbytes, np.uint8)
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            done = 0
            while done < nbytes:
                count = os.preadv(handle, [out[done:].data], offset + done)
                if count == 0:
                    raise FormatError(f"{path}: the file has become shorter: it ends at byte {offset + done}")
                done += count
        finally:
            os.close(handle)
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None
    return out


def check_reaches(path: Path, end: int) -> None:
    """Raises FormatError when the file, though it was mapped in that length once, now ends before the byte `end`."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None
    if size < end:
        raise FormatError(f"{path}: the file has become shorter: it ends at byte {size}")


def span_checksum(path: Path, offset: int, nbytes: int, progress: Callable[[int, str], None] | None = None) -> str:
    """xxh3-64 in hex of nbytes from that byte on, read block by block. progress(bytes, '') is called after each block.

    Raises FormatError as `read_span` does.
    """
    digest = xxhash.xxh3_64()
    for start in range(offset, offset + nbytes, HASH_BYTES):
        block = read_span(path, start, min(HASH_BYTES, offset + nbytes - start))
        digest.update(block.data)
        if progress is not None:
            progress(len(block), "")
    return digest.hexdigest()
