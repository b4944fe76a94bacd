"""Machines with several NUMA nodes: which processors lie at which memory, where a thread runs, and where new memory comes from.

A thread's memory policy says on which nodes pages are taken that it touches first, those of files that it reads included;
pages that are in memory already stay where they are (set_mempolicy(2)). The calls go to the kernel directly, as libnuma need
not be there.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..data_classes import dataclass
from .process import c_function
from .processors import allowed_cpus, architecture

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # numbers of the system call
_MPOL_DEFAULT, _MPOL_INTERLEAVE = 0, 3  # linux/mempolicy.h
_NODE = re.compile(r"node(\d+)")


@dataclass(frozen=True)
class Node:
    """A NUMA node and its logical processors, ascending."""

    number: int
    cpus: tuple[int, ...]


@dataclass(frozen=True)
class ThreadPlace:
    """Where a thread runs, and which nodes its new memory is spread over page by page (none: the node that it runs on)."""

    cpus: frozenset[int]
    interleave: tuple[int, ...] = ()

    def enter(self) -> None:
        """Moves the calling thread there, until it is moved again; threads that it starts from then on begin there too.

        Raises OSError where the system has no such calls or does not permit them.
        """
        _set_affinity(self.cpus)
        _set_policy(self.interleave)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within this the calling thread is there; what is not permitted is left out (`enter` says what)."""
        before = allowed_cpus()
        with suppress(OSError):
            self.enter()
        try:
            yield
        finally:
            with suppress(OSError):
                _set_affinity(before)
                _set_policy(())


def numa_nodes(root: Path = Path("/")) -> list[Node]:
    """The nodes that have processors, ascending. One node, 0, with all processors of this process where the system does not say
    (macOS, Windows, kernels without NUMA). root: of the file system, for tests."""
    nodes = []
    folder = root / "sys/devices/system/node"
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _NODE.fullmatch(path.name)
        cpus = parse_cpus(_text(path / "cpulist")) if match else []
        if match and cpus:
            nodes.append(Node(int(match[1]), tuple(cpus)))
    return sorted(nodes, key=lambda node: node.number) or [Node(0, tuple(allowed_cpus()))]


def parse_cpus(text: str) -> list[int]:
    """'0-3,8' -> [0, 1, 2, 3, 8]; what is no number or range is left out."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        low, _, high = part.partition("-")
        if low.isdecimal() and (high or low).isdecimal():
            cpus.update(range(int(low), int(high or low) + 1))
    return sorted(cpus)


def thread_notes(threads: int, processors: int) -> list[str]:
    """A line for the user if there are more threads than processors that they may use."""
    if threads <= processors:
        return []
    return [
        f"{threads} threads on {processors} processor{'s' * (processors > 1)} wait for each other: -t {processors} is faster"
    ]


def current_cpu() -> int | None:
    """The processor that the calling thread runs on; None where the system does not say."""
    sched_getcpu = c_function("sched_getcpu")
    cpu = sched_getcpu() if sched_getcpu is not None else -1
    return cpu if cpu >= 0 else None


def _set_affinity(cpus: Collection[int]) -> None:
    set_affinity = getattr(os, "sched_setaffinity", None)
    if set_affinity is None:
        raise OSError("this system binds no threads to processors")
    set_affinity(0, cpus)


def _set_policy(nodes: Collection[int]) -> None:
    """Spreads the calling thread's new memory over these nodes; none: as the system does by default."""
    syscall, number = c_function("syscall"), _SET_MEMPOLICY.get(architecture())
    if sys.platform != "linux" or syscall is None or number is None:
        if nodes:
            raise OSError("this system spreads no memory over nodes")
        return
    bits = (ctypes.c_ulong * (max(nodes, default=0) // 64 + 1))()
    for node in nodes:
        bits[node // 64] |= 1 << node % 64
    mode = _MPOL_INTERLEAVE if nodes else _MPOL_DEFAULT
    arguments = (ctypes.c_long(mode), bits if nodes else None, ctypes.c_ulong(len(bits) * 64 + 1 if nodes else 0))
    if ctypes.c_int(syscall(ctypes.c_long(number), *arguments)).value != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"set_mempolicy: {os.strerror(code)}")


def _text(path: Path) -> str:
    try:
        return path.read_text("ascii")
    except (OSError, ValueError):
        return ""
