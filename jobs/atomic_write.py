"""Small files, written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from ..errors import MillError


@contextmanager
def whole_file(path: Path, part: Path | None = None) -> Iterator[BinaryIO]:
    """A file to write, that has its name when all is on disk; its folder is made where there is none.

    part: its name until then; one of this process without it, since others may write the same file just now. Raises MillError,
    and leaves nothing, when it cannot be written.
    """
    part = part or path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise MillError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            part.unlink()


def write_whole(path: Path, data: bytes) -> None:
    """As `whole_file` says."""
    with whole_file(path) as file:
        file.write(data)


def write_text(path: Path, text: str) -> None:
    """As `whole_file` says; names that are not UTF-8 keep their bytes."""
    write_whole(path, text.encode("utf-8", "surrogateescape"))
