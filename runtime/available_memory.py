"""How much memory a process may still take: of the machine, and of the control groups (containers, batch jobs) it runs in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_USUAL, _SHARE = 4 << 30, 4


def decoded_bytes(root: Path = Path("/")) -> int:
    """What decoded weights may take unless told otherwise: 4 GiB, but no more than a quarter of what is free. The rest is for
    activations, and for the model's file, which the system keeps in memory as far as there is room."""
    return min([_USUAL, *(free // _SHARE for free in _free(root))])


def free_bytes(root: Path = Path("/")) -> int | None:
    """What the process may still take, by the tightest of the limits that there are; None where the system does not say."""
    return min(_free(root), default=None)


def _free(root: Path) -> Iterator[int]:
    """Free bytes by each limit that there is (Linux; elsewhere none)."""
    available = _fields(root / "proc/meminfo").get("MemAvailable:")
    if available is not None:
        yield available << 10
    groups = [line.split(":", 2) for line in _text(root / "proc/self/cgroup").splitlines() if line.count(":") >= 2]
    for _, controllers, path in groups:
        if controllers == "":
            yield from _left(root / "sys/fs/cgroup", path, "memory.max", "anon")
        elif "memory" in controllers.split(","):
            yield from _left(root / "sys/fs/cgroup/memory", path, "memory.limit_in_bytes", "total_rss")


def _left(top: Path, path: str, limit: str, used: str) -> Iterator[int]:
    """What a group and those around it leave beside memory that is no file's. Within a container only the top is to be seen."""
    group = top / path.strip("/")
    while group != top.parent:
        words = _text(group / limit).split()
        if words and words[0].isdecimal():
            yield max(int(words[0]) - _fields(group / "memory.stat").get(used, 0), 0)
        group = group.parent


def _fields(path: Path) -> dict[str, int]:
    """The numbers of a file with a name and a number per line."""
    rows = (line.split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
