"""Locks on outputs: a file next to the output that a job holds open and locked."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import PlanError
from ..operating_system.files import BINARY, NO_FOLLOW, lock_file


def open_locked(path: Path) -> int | None:
    """The descriptor of a file, created if it is missing, open for reading and appending and locked until it is closed; None if
    another process has the lock. Raises OSError.

    A file that its owner removed while this process waited to open it is not taken for the one of that name now: a lock on it
    would protect nothing.
    """
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | NO_FOLLOW | BINARY, 0o644)
        if not lock_file(fd):
            os.close(fd)
            return None
        try:
            if os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd)):
                return fd
        except FileNotFoundError:
            pass
        os.close(fd)


def _lock_path(out: Path) -> Path:
    return out.with_name(out.name + ".lock")


def remove_abandoned_lock(out: Path) -> None:
    """Removes the OUT.lock that a kill or a power cut has left, for a job that finds nothing to do any more."""
    if _lock_path(out).exists():
        with suppress(PlanError), output_lock(out):  # PlanError: another job runs, or the folder cannot be written to
            pass


@contextmanager
def output_lock(out: Path) -> Iterator[None]:
    """Within this no other job that asks for the lock of this output runs; OUT.lock exists meanwhile. Raises PlanError if there
    is one, or the folder cannot be written to."""
    path = _lock_path(out)
    try:
        fd = open_locked(path)
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror or error}") from None
    if fd is None:
        raise PlanError(f"another job is writing {out} at the moment (it holds {path})")
    try:
        yield
    finally:
        try:
            path.unlink(missing_ok=True)
            os.close(fd)
        except PermissionError:  # Windows: not while it is open
            os.close(fd)
            path.unlink(missing_ok=True)
