"""What a job takes, said without doing it: disk space, memory, time on this machine."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from ...data_classes import dataclass
from .figures import duration, size_text
from .memory import PROGRAM
from .shown import shown

_COMPILED, _TIMED = 1.6e-3, 0.02  # seconds that compiling `json.decoder` takes on a Zen 4, and for which that is measured here
_KEPT = 128 << 20  # bytes that a process keeps of what a stage has freed, at the most: larger pieces go back
_ONCE = "start", "torch"  # parts of a program that stages share
_BYTECODE = 0.64  # of a start that compiles all modules, one that finds their bytecode (Zen 4: 0.92 s of 1.43)


@dataclass(frozen=True)
class Forecast:
    """What a job takes.

    disk_needed  bytes that are still to be written; disk_free: None if unknown
    seconds      for each part of the job, a type of tensors or a step, on a machine that does nothing else; None: not timed
    disk_peak    bytes of all files when most is there, with those that are there already; None: as disk_needed
    memory       bytes, at the most, that are no file's; None: not said
    threads      that share the work; idle: seconds of which they wait for others, added up
    """

    disk_needed: int
    disk_free: int | None
    seconds: dict[str, float] | None = None
    disk_peak: int | None = None
    memory: int | None = None
    threads: int = 1
    idle: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of all parts."""
        return sum((self.seconds or {}).values())

    def as_json(self) -> dict[str, Any]:
        """The keys `disk`, `memory` and, if the job was timed, `predicted`: seconds, those of the processor (of all threads
        together), and those of each part."""
        figures: dict[str, Any] = {"disk": {"needed": self.disk_needed, "free": self.disk_free}}
        if self.disk_peak is not None:
            figures["disk"]["peak"] = self.disk_peak
        if self.memory is not None:
            figures["memory"] = {"peak": self.memory}
        if self.seconds is not None:
            figures["predicted"] = predicted(self.seconds, self.threads, self.idle)
        return figures

    def with_stage(self, name: str, other: Forecast) -> Forecast:
        """With what another stage of the same program takes, which starts once. Of the memory of the lesser some stays."""
        ours, theirs = self.seconds or {}, other.seconds or {}
        once = {part: max(ours.get(part, 0.0), theirs.get(part, 0.0)) for part in _ONCE if part in ours or part in theirs}
        more = {name: sum(seconds for part, seconds in theirs.items() if part not in _ONCE)}
        less, most = sorted((self.memory or 0, other.memory or 0))
        memory = most + min(_KEPT, max(0, less - PROGRAM)) or None
        return replace(self, seconds={**ours, **once, **more}, memory=memory, idle=self.idle + other.idle)

    @classmethod
    def of_one_thread(cls, part: str, seconds: float, threads: int) -> Forecast:
        """Of what one thread does, for which the others wait."""
        return cls(0, None, {part: seconds}, threads=threads, idle=(threads - 1) * seconds)

    @property
    def text(self) -> str:
        """Disk space, memory, and the time of the slowest parts if that was predicted, for people."""
        free = f", {size_text(self.disk_free)} free" if self.disk_free is not None else ""
        peak, needed = self.disk_peak, self.disk_needed
        most = f", {size_text(peak)} at the peak with what is there" if peak is not None and peak != needed else ""
        lines = [f"disk: {size_text(needed)} needed{most}{free}"] if needed or most else []
        if self.memory is not None:
            lines.append(f"memory: {size_text(self.memory)} beside the files that are read and written")
        if self.seconds is not None:
            slowest = sorted(self.seconds.items(), key=lambda item: -item[1])[:4]
            parts = ", ".join(f"{name} {duration(seconds)}" for name, seconds in slowest)
            total = duration(sum(self.seconds.values()))
            lines.append(f"time: about {total} on this machine ({parts}), unless reading the source takes longer")
        return "\n".join(lines)


def predicted(seconds: Mapping[str, float], threads: int, idle: float = 0.0) -> dict[str, Any]:
    """seconds by part, on so many threads, as JSON. idle: seconds of which the threads wait, added up."""
    total = sum(seconds.values())
    return {"seconds": total, "processor_seconds": total * threads - idle, "seconds_by_part": dict(seconds)}


def free_space(folder: Path) -> int | None:
    """Bytes that are free where a folder is, or will be; None if unknown."""
    import shutil

    folder = folder.absolute()
    existing = next((path for path in (folder, *folder.parents) if path.exists()), None)
    return shutil.disk_usage(existing).free if existing is not None else None


def interpreting() -> float:
    """How many times as long as on a Zen 4 that compiles all modules the start of a program takes here, before it computes."""
    return _compiling_seconds() / _COMPILED * (1.0 if sys.dont_write_bytecode else _BYTECODE)


@cache
def _compiling_seconds() -> float:
    """Of the processor, for the source of `json.decoder`."""
    import inspect

    text, calls, begun = inspect.getsource(json.decoder), 0, time.thread_time()
    while calls == 0 or time.thread_time() - begun < _TIMED:
        compile(text, "", "exec")
        calls += 1
    return (time.thread_time() - begun) / calls


@shown
@dataclass(frozen=True)
class Planned:
    """What a call would do, and what it takes: the result of one with dry_run, which has no other.

    work      what there is to do, in numbers with names: windows, tensors, ...
    forecast  disk space, memory, time
    """

    work: dict[str, Any]
    forecast: Forecast

    @property
    def text(self) -> str:
        """What there is to do, and what it takes, for people."""
        named = ((name.replace("_", " "), f"{n:,}" if isinstance(n, int) else n) for name, n in self.work.items())
        return f"{', '.join(f'{name} {n}' for name, n in named)}\n{self.forecast.text}"

    def as_json(self) -> dict[str, Any]:
        """What --json prints: status ('planned'), what there is to do, and what it takes."""
        return {"status": "planned", **self.work, **self.forecast.as_json()}
