"""What differs between operating systems, in one place: processors, memory, positioned reads and writes, locks, syncing.

Everything here works on Linux as documented. Where another system lacks a call, the function takes a slower way or does
nothing; which of the two, its docstring says. Nothing else in `formats` and `jobs` imports fcntl, resource or ctypes.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)  # for os.open: fail on a symbolic link; no effect where it is missing
BINARY = getattr(os, "O_BINARY", 0)  # for os.open: Windows would translate line ends without it

_O_DIRECT = getattr(os, "O_DIRECT", 0)
_SYNC_FILE_RANGE_WRITE = 2  # start writing the dirty pages of a range, do not wait (linux/fs.h)
_seek_lock = threading.Lock()

# malloc.h of glibc: parameter -> value in bytes. Larger blocks still come from the system and go back to it at once.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MALLOC_PARAMETERS = {_M_TRIM_THRESHOLD: 256 << 20, _M_MMAP_THRESHOLD: 32 << 20}


def available_cpus() -> int:
    """Processors that this process may run on; all of the machine's where the system does not say."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def retain_free_memory() -> None:
    """From now on memory that is freed stays with the process for the next allocation. Only with glibc; else nothing.

    By default glibc returns arrays of some MiB to the system and asks for new memory, which the kernel clears each time (on a
    virtual machine it also has to map it): for jobs that allocate them by the thousand that takes as long as the work on them.
    """
    mallopt = c_function("mallopt")
    if mallopt is not None:
        for parameter, value in _MALLOC_PARAMETERS.items():
            mallopt(parameter, value)


def trim_free_memory() -> None:
    """Returns the memory that is free now to the system. Only with glibc; else nothing."""
    malloc_trim = c_function("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(ctypes.c_size_t(0))


def low_priority(command: list[str]) -> list[str]:
    """A command that runs as the given one but leaves the processors to others; the same command where there is no `nice`."""
    nice = shutil.which("nice")
    return [nice, "-n", "10", *command] if nice else command


def read_at(fd: int, buffer: memoryview, offset: int) -> int:
    """Reads bytes from `offset` of an open file into the buffer; returns how many came, 0 at the end of the file.

    Several threads may read one file at once. Raises OSError.
    """
    if hasattr(os, "preadv"):
        return os.preadv(fd, [buffer], offset)
    if hasattr(os, "pread"):
        data = os.pread(fd, len(buffer), offset)
    else:
        with _seek_lock:
            os.lseek(fd, offset, os.SEEK_SET)
            data = os.read(fd, len(buffer))
    buffer[: len(data)] = data
    return len(data)


def write_at(fd: int, data: memoryview, offset: int) -> int:
    """Writes bytes at `offset` of an open file; returns how many were taken, perhaps not all. Raises OSError."""
    if hasattr(os, "pwrite"):
        return os.pwrite(fd, data, offset)
    with _seek_lock:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.write(fd, data)


def allocate(fd: int, nbytes: int) -> None:
    """Reserves disk space for the first nbytes of a file and makes it that long, so that a full disk shows before the work.

    Where the system or the file system cannot reserve, only the length is set. Raises OSError (ENOSPC) if there is no room.
    """
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
    os.ftruncate(fd, nbytes)


def allocated_bytes(path: Path) -> int:
    """Disk space that a file takes, which is less than its length when it has holes; the length where the system is silent."""
    stat = path.stat()
    return stat.st_blocks * 512 if hasattr(stat, "st_blocks") else stat.st_size


def lock_file(file: IO[Any] | int, *, shared: bool = False) -> bool:
    """Takes an advisory lock on an open file or folder until it is closed; False if another process holds it.

    Always True where there are no such locks (Windows, some network file systems): two jobs for one output then go unnoticed.
    """
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def sync_folder(folder: Path) -> None:
    """Brings the names in a folder to disk, after a rename. Nothing on Windows, where a folder cannot be opened."""
    if os.name == "nt":
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def has_direct_io() -> bool:
    """Whether `set_direct_io` can do anything on this system; a file system may still refuse it."""
    return bool(_O_DIRECT) and fcntl is not None


def set_direct_io(fd: int, enabled: bool) -> None:
    """Sets or clears O_DIRECT of an open file: writes then pass the page cache by. Raises OSError (EINVAL) if refused."""
    assert fcntl is not None
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | _O_DIRECT if enabled else flags & ~_O_DIRECT)


def start_writeback(fd: int, offset: int, nbytes: int) -> None:
    """Asks the system to start writing a range of a file to disk, without waiting (sync_file_range of Linux). Advice only:
    nothing happens on other systems, and errors do not matter."""
    sync_file_range = c_function("sync_file_range")
    if sync_file_range is not None:
        sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(nbytes), _SYNC_FILE_RANGE_WRITE)


@cache
def c_function(name: str) -> Callable[..., Any] | None:
    """A function of the C library that this process is linked with; None if it has none of that name."""
    try:
        return getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):  # TypeError: Windows has no handle of the process itself
        return None
