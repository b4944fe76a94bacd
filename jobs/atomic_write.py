"""Small files written atomically: a reader sees the old content or the new one, never a part of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from ..errors import MillError
from ..operating_system.files import sync_file


@contextmanager
def atomic_file(path: Path, part: Path | None = None) -> Iterator[BinaryIO]:
    """A file to write that gets its name when its content is on disk; missing parent folders are created.

    part: the name until then, by default one with this process's id, since other processes may be writing the same file.
    Raises MillError, and leaves nothing behind, when it cannot be written.
    """
    part = part or path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            yield file
            file.flush()
            sync_file(file.fileno())
        part.replace(path)
    except OSError as error:
        raise MillError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            part.unlink()


def write_bytes(path: Path, data: bytes) -> None:
    """Writes a file atomically, as `atomic_file` does. Raises MillError."""
    with atomic_file(path) as file:
        file.write(data)


def write_text(path: Path, text: str) -> None:
    """Writes a UTF-8 file atomically; surrogate escapes in the text (file names that are not UTF-8) become their bytes again.

    Raises MillError.
    """
    write_bytes(path, text.encode("utf-8", "surrogateescape"))
