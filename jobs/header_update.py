"""Replacing the header of a file in place: what a kill or a power cut interrupts is completed from a record next to it."""

from __future__ import annotations

import os
from pathlib import Path

import xxhash

from ..errors import MillError, PlanError
from ..formats.gguf import header_record
from ..operating_system.files import BINARY, sync_file, sync_folder, write_at
from .atomic_write import write_bytes

_DIGEST_BYTES = 16


def replace_header(path: Path, header: bytes) -> None:
    """Overwrites the first bytes of a file with a header of the same length.

    The header is first written to FILE.header.journal; while that is there, the file is not opened as a GGUF, and
    `finish_replacing` completes the change. Raises MillError if it cannot be written.
    """
    write_bytes(header_record(path), xxhash.xxh3_128(header).digest() + header)
    _write(path, header)


def finish_replacing(path: Path) -> bool:
    """Completes a `replace_header` that was interrupted; False if there is none.

    Raises PlanError for a damaged record, MillError if the file cannot be written.
    """
    record = header_record(path)
    try:
        stored = record.read_bytes()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise MillError(f"{record}: {error.strerror or error}") from None
    digest, header = stored[:_DIGEST_BYTES], stored[_DIGEST_BYTES:]
    if xxhash.xxh3_128(header).digest() != digest or not path.is_file() or path.stat().st_size < len(header):
        raise PlanError(f"{record} does not belong to {path}, or is damaged; if the file is sound, remove the record")
    _write(path, header)
    return True


def _write(path: Path, header: bytes) -> None:
    try:
        fd = os.open(path, os.O_RDWR | BINARY)
        try:
            done, data = 0, memoryview(header)
            while done < len(header):
                done += write_at(fd, data[done:], done)
            sync_file(fd)
        finally:
            os.close(fd)
        header_record(path).unlink()
        sync_folder(path.parent)
    except OSError as error:
        raise MillError(f"{path} cannot be written: {error.strerror or error}") from error
