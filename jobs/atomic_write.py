"""Small files written atomically: a reader sees the old content or the new one, never a part of it, after a power cut too."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from ..errors import MillError
from ..operating_system.files import lock_file, sync_file, sync_folder


@contextmanager
def atomic_file(path: Path, part: Path | None = None) -> Iterator[BinaryIO]:
    """A file to write that gets its name when its content is on disk; the name is on disk too when the context ends. Missing
    parent folders are created, and what dead processes have left of the same file is removed.

    part: the name until then, by default one with this process's id, since other processes may be writing the same file.
    Raises MillError, and leaves no file, when it cannot be written.
    """
    part = part or path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(path)
        with part.open("wb") as file:
            lock_file(file)  # shows other processes that this one lives
            yield file
            file.flush()
            sync_file(file.fileno())
        part.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise MillError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            part.unlink()


def _remove_abandoned(path: Path) -> None:
    """Removes the NAME.PID.part that no process has locked any more."""
    pattern = re.compile(re.escape(path.name) + r"\.(\d+)\.part")
    for entry in os.scandir(path.parent):
        match = pattern.fullmatch(entry.name)
        if match is None or int(match[1]) == os.getpid():
            continue
        with suppress(OSError), open(entry.path, "rb") as file:
            if lock_file(file, shared=True):
                os.unlink(entry.path)


def write_bytes(path: Path, data: bytes) -> None:
    """Writes a file atomically, as `atomic_file` does. Raises MillError."""
    with atomic_file(path) as file:
        file.write(data)


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """As `write_text`, line by line, each with a line break at its end."""
    with atomic_file(path) as file:
        file.writelines(f"{line}\n".encode("utf-8", "surrogateescape") for line in lines)


def write_text(path: Path, text: str) -> None:
    """Writes a UTF-8 file atomically; surrogate escapes in the text (file names that are not UTF-8) become their bytes again.

    Raises MillError.
    """
    write_bytes(path, text.encode("utf-8", "surrogateescape"))
