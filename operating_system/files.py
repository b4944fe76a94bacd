"""Files: positioned reads and writes, reserved space, locks, syncing, writes past the page cache.

On Linux everything works as documented. Where another system lacks a call, its function takes a slower way or does nothing;
which of the two, its docstring says. Calls are looked up when they are needed, so that a test can take them away.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from .process import c_function

fcntl: Any = None
msvcrt: Any = None
try:
    import fcntl
except ImportError:
    with suppress(ImportError):
        import msvcrt

NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)  # for os.open: fail on a symbolic link; no effect where it is missing
BINARY = getattr(os, "O_BINARY", 0)  # for os.open: Windows would translate line ends without it

_O_DIRECT = getattr(os, "O_DIRECT", 0)
_SYNC_FILE_RANGE_WRITE = 2  # start writing the dirty pages of a range, do not wait (linux/fs.h)
_LOCK_OFFSET = 0x7FFFFFFE  # of the byte that stands for the file where locks are mandatory: beyond what anybody reads
_seek_lock = threading.Lock()


def read_next(fd: int, count: int) -> bytes:
    """Up to `count` of the next bytes of a file or pipe; none at its end. Raises BlockingIOError as `os.read`."""
    return os.read(fd, count)


def cache_home() -> Path:
    """~/.cache/ggufmill; GGUFMILL_CACHE and XDG_CACHE_HOME are honoured."""
    home = os.environ.get("GGUFMILL_CACHE")
    return Path(home) if home else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ggufmill"


def read_at(fd: int, buffer: memoryview, offset: int) -> int:
    """Reads bytes from `offset` of an open file into the buffer; returns how many came, 0 at the end of the file.

    Several threads may read one file at once; without positioned reads (Windows) they take turns. Raises OSError.
    """
    preadv, pread = getattr(os, "preadv", None), getattr(os, "pread", None)
    if preadv is not None:
        return preadv(fd, [buffer], offset)
    if pread is not None:
        data = pread(fd, len(buffer), offset)
    else:
        with _seek_lock:
            os.lseek(fd, offset, os.SEEK_SET)
            data = os.read(fd, len(buffer))
    buffer[: len(data)] = data
    return len(data)


def write_at(fd: int, data: memoryview, offset: int) -> int:
    """Writes bytes at `offset` of an open file; returns how many were taken, perhaps not all. Threads as in `read_at`.

    Raises OSError.
    """
    pwrite = getattr(os, "pwrite", None)
    if pwrite is not None:
        return pwrite(fd, data, offset)
    with _seek_lock:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.write(fd, data)


def reserve_space(fd: int, nbytes: int) -> None:
    """Reserves disk space for the first nbytes of a file and makes it that long, so that a full disk shows before the work.

    Where the system (macOS, Windows) or the file system cannot reserve, only the length is set. Raises OSError (ENOSPC) if
    there is too little space.
    """
    posix_fallocate = getattr(os, "posix_fallocate", None)
    if posix_fallocate is not None:
        try:
            posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
    os.ftruncate(fd, nbytes)


def allocated_bytes(path: Path) -> int:
    """Disk space that a file takes, which is less than its length when it has holes; the length where the system does not
    say."""
    stat = path.stat()
    blocks = getattr(stat, "st_blocks", None)
    return stat.st_size if blocks is None else blocks * 512


def lock_file(file: IO[Any] | int, *, shared: bool = False) -> bool:
    """Takes an advisory lock on an open file until it is closed; False if another process has it. Does not wait.

    On Windows the lock is on one byte after all others, so that it hinders nobody who reads the file, and a shared one only
    looks whether it is free. Always True where a file system has no locks: two jobs for one output then go unnoticed.
    """
    try:
        if fcntl is not None:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        elif msvcrt is not None:
            _lock_last_byte(file if isinstance(file, int) else file.fileno(), shared)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK)
    return True


def _lock_last_byte(fd: int, release: bool) -> None:
    """Locks the byte at _LOCK_OFFSET, and with `release` gives it up again. Raises OSError (EACCES) if another process has
    it."""
    position = os.lseek(fd, 0, os.SEEK_CUR)
    try:
        os.lseek(fd, _LOCK_OFFSET, os.SEEK_SET)
        msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        if release:
            os.lseek(fd, _LOCK_OFFSET, os.SEEK_SET)
            msvcrt.locking(fd, msvcrt.LK_UNLCK, 1)
    finally:
        os.lseek(fd, position, os.SEEK_SET)


@contextmanager
def locked_folder(folder: Path) -> Iterator[bool]:
    """Within this the folder is locked as by `lock_file`; gives False if another process has the lock.

    Where folders cannot be opened (Windows), a file .lock in the folder is locked, and removed at the end.
    """
    try:
        file, path = os.open(folder, os.O_RDONLY), None
    except PermissionError:
        path = folder / ".lock"
        file = os.open(path, os.O_RDWR | os.O_CREAT | BINARY, 0o644)
    try:
        locked = lock_file(file)
        yield locked
    finally:
        os.close(file)
        if path is not None:
            with suppress(OSError):  # another process has it open
                path.unlink()


def sync_file(fd: int) -> None:
    """Brings the bytes of an open file to disk; on macOS out of the disk's own cache too, which fsync leaves alone there.

    Raises OSError.
    """
    full_sync = getattr(fcntl, "F_FULLFSYNC", None)
    if full_sync is not None:
        with suppress(OSError):  # file systems that do not know it
            fcntl.fcntl(fd, full_sync)
            return
    os.fsync(fd)


def sync_folder(folder: Path) -> None:
    """Brings the names in a folder to disk, after a rename. Nothing where folders cannot be opened (Windows)."""
    try:
        fd = os.open(folder, os.O_RDONLY)
    except PermissionError:
        return
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def has_direct_io() -> bool:
    """Whether `set_direct_io` can do anything on this system (only on Linux); a file system may still refuse it."""
    return bool(_O_DIRECT) and fcntl is not None


def set_direct_io(fd: int, enabled: bool) -> None:
    """Sets or clears O_DIRECT of an open file: writes then pass the page cache by. Raises OSError (EINVAL) if refused."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | _O_DIRECT if enabled else flags & ~_O_DIRECT)


def start_writeback(fd: int, offset: int, nbytes: int) -> None:
    """Asks the system to start writing a range of a file to disk, without waiting (sync_file_range of Linux). Advice only:
    nothing happens on other systems, and errors do not matter."""
    sync_file_range = c_function("sync_file_range")
    if sync_file_range is not None:
        sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(nbytes), _SYNC_FILE_RANGE_WRITE)
