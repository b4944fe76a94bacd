"""Memory: what this process may still take, and what the C library's allocator does with what is freed."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from .process import c_function

# malloc.h of glibc: parameter -> value in bytes. Larger blocks still come from the system and go back to it at once.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LOWEST_BIT = bytes(range(2)) * 128
_PARAMETERS = {_M_TRIM_THRESHOLD: 256 << 20, _M_MMAP_THRESHOLD: 32 << 20}


def retain_free_memory() -> None:
    """From now on memory that is freed stays with the process for the next allocation. Only with glibc; else nothing.

    By default glibc returns blocks of a few MiB to the system and asks for them again, and the kernel clears them each time
    (on a virtual machine it also has to map them), which takes as long as a job's work on them.
    """
    mallopt = c_function("mallopt")
    if mallopt is not None:
        for parameter, value in _PARAMETERS.items():
            mallopt(parameter, value)


def trim_free_memory() -> None:
    """Returns the memory that is free now to the system. Only with glibc; else nothing."""
    malloc_trim = c_function("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(ctypes.c_size_t(0))


def release_pages(mapped: mmap.mmap, stop: int) -> None:
    """Takes the first `stop` bytes of a mapped file out of this process's memory; the system may keep them, and they are mapped
    again when they are read. Where the system has no such call nothing happens."""
    nbytes = stop // mmap.PAGESIZE * mmap.PAGESIZE
    if nbytes and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED, 0, nbytes)


def cached_pages(address: int, nbytes: int) -> bytes:
    """Of each page of so much memory that is a mapped file's, from the one with the first byte on: 1 if it need not be read
    from the disk; all 0 where the system does not say. Linux says 1 of all pages of a file that is not `may_be_asked_for`."""
    offset = address % mmap.PAGESIZE
    pages, mincore = ctypes.create_string_buffer(-(-(offset + nbytes) // mmap.PAGESIZE)), c_function("mincore")
    size = ctypes.c_size_t(offset + nbytes)
    if mincore is None or mincore(ctypes.c_void_p(address - offset), size, pages) != 0:
        return bytes(len(pages))
    return pages.raw.translate(_LOWEST_BIT)


def may_be_asked_for(file: Path) -> bool:
    """Whether Linux tells this process which pages of a file are in memory: of those that it owns or may write to."""
    try:
        return os.access(file, os.W_OK) or file.stat().st_uid == os.geteuid()
    except (OSError, AttributeError):  # Windows has no geteuid, and does not say
        return False


def free_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that this process may still take: of the machine, and of the control groups (containers, batch jobs) it runs in.

    None where the system does not say in Linux's way. root: of the file system, for tests.
    """
    return min(_free_by_limit(root), default=None)


def total_bytes(root: Path = Path("/")) -> int | None:
    """Bytes of memory of the machine, or of the smallest control group around this process if that is less; None as
    `free_bytes`. root: of the file system, for tests."""
    total = _fields(root / "proc/meminfo").get("MemTotal:")
    return min([*([total << 10] if total is not None else []), *(limit for limit, _ in _limits(root))], default=None)


def _free_by_limit(root: Path) -> Iterator[int]:
    available = _fields(root / "proc/meminfo").get("MemAvailable:")
    if available is not None:
        yield available << 10
    yield from (max(limit - used, 0) for limit, used in _limits(root))


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """(bytes, bytes taken without memory that is a file's) of each control group with a limit around this process."""
    groups = [line.split(":", 2) for line in _text(root / "proc/self/cgroup").splitlines() if line.count(":") >= 2]
    for _, controllers, path in groups:
        if controllers == "":
            yield from _limits_of_group(root / "sys/fs/cgroup", path, "memory.max", "anon")
        elif "memory" in controllers.split(","):
            yield from _limits_of_group(root / "sys/fs/cgroup/memory", path, "memory.limit_in_bytes", "total_rss")


def _limits_of_group(top: Path, path: str, limit: str, used: str) -> Iterator[tuple[int, int]]:
    """Those of a group and of the ones around it. Within a container only the top shows."""
    group = top / path.strip("/")
    while group != top.parent:
        words = _text(group / limit).split()
        if words and words[0].isdecimal():
            yield int(words[0]), _fields(group / "memory.stat").get(used, 0)
        group = group.parent


def _fields(path: Path) -> dict[str, int]:
    """The numbers of a file with a name and a number per line."""
    rows = (line.split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, ValueError):
        return ""
