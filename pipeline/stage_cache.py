"""What the stages of a run have done: kept in a file, so that a stage whose inputs are unchanged is not done again."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click

from ..formats.file_range import range_checksum
from ..jobs.atomic_write import write_text
from .console import byte_progress


@dataclass(frozen=True)
class Made:
    """A file as a stage left it; xxh3 is of all its bytes, in hex. A file of this size and time is not hashed again."""

    name: str
    nbytes: int
    mtime_ns: int
    xxh3: str


@dataclass(frozen=True)
class Done:
    """A stage that has been begun; it is over when it has a result."""

    key: str
    seconds: float = 0.0
    result: dict[str, Any] | None = None
    files: list[Made] = field(default_factory=list)


class Memory:
    """The file at `path`: stage -> `Done`. fresh: nothing of it counts. seconds: stage -> how long it took when it was done."""

    def __init__(self, path: Path, fresh: bool):
        self.path = path
        self.seconds: dict[str, float] = {}
        # --force makes the folder ours, also for a run that goes on where this one was interrupted.
        self._state: dict[str, Done] = {"quantize": Done("")} if fresh else _read(path)

    def knows(self, name: str) -> bool:
        """Whether the stage was ever begun here."""
        return name in self._state

    def forget(self, name: str) -> None:
        """The stage is to be done again: what it looked at was made anew."""
        self._state.pop(name, None)

    def stage(self, name: str, key: str, files: Sequence[Path], work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The stage's result: remembered if its key is the same and its files are as it left them, else worked out now."""
        known = self._state.get(name)
        if known is not None and known.result is not None and known.key == key and self._intact(name, known, files):
            click.echo(f"{name}: done before, nothing has changed", err=True)
            self.seconds[name] = known.seconds
            return known.result
        self._remember(name, Done(key))
        began = time.perf_counter()
        result = work()
        self.seconds[name] = time.perf_counter() - began
        self._remember(name, Done(key, self.seconds[name], result, [_made(f) for f in files]))
        return result

    def holds(self, name: str, key: str, files: Sequence[Path]) -> bool:
        """Whether the stage is done with this key, and its files are as it left them. Says and changes nothing."""
        known = self._state.get(name)
        return known is not None and known.result is not None and known.key == key and self._problem(known, files) is None

    def _intact(self, name: str, known: Done, files: Sequence[Path]) -> bool:
        """Whether the files are those that the stage left; says what is wrong with them."""
        problem = self._problem(known, files)
        if problem:
            click.echo(f"{name}: {problem}; it is made again", err=True)
        elif problem is None:
            self._remember(name, known)
        return problem is None

    @staticmethod
    def _problem(known: Done, files: Sequence[Path]) -> str | None:
        """What is wrong with a stage's files: '' if they are others by name. Reads only what has a new time, and notes that."""
        if [made.name for made in known.files] != [f.name for f in files]:
            return ""
        for i, (made, file) in enumerate(zip(known.files, files, strict=True)):
            if not file.is_file():
                return f"{file} is gone"
            if (size := file.stat().st_size) != made.nbytes:
                return f"{file} has {size:,} bytes, not the {made.nbytes:,} that were written"
            if file.stat().st_mtime_ns != made.mtime_ns:
                known.files[i] = _made(file)
                if known.files[i].xxh3 != made.xxh3:
                    return f"{file} has changed since it was written"
        return None

    def _remember(self, name: str, done: Done) -> None:
        self._state[name] = done
        write_text(self.path, json.dumps({stage: asdict(d) for stage, d in self._state.items()}))


def key_of(*parts: object) -> str:
    """A digest of all that decides what a stage does."""
    return hashlib.sha256(json.dumps([str(p) for p in parts]).encode()).hexdigest()


def _made(path: Path) -> Made:
    """The file as it is now, with its checksum. Large files are read with a bar."""
    before = path.stat()
    with byte_progress(before.st_size, "checksum", quiet=before.st_size < 1 << 30) as progress:
        xxh3 = range_checksum(path, 0, before.st_size, progress)
    return Made(path.name, before.st_size, before.st_mtime_ns, xxh3)


def _read(path: Path) -> dict[str, Done]:
    """What earlier runs left; nothing, with a warning, if the file is not one that `run` wrote."""
    if not path.exists():
        return {}
    try:
        return {stage: _done(entry) for stage, entry in json.loads(path.read_bytes()).items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        click.echo(f"warning: {path} is damaged and counts as absent: every stage is done again", err=True)
        return {}


def _done(entry: dict[str, Any]) -> Done:
    """Raises TypeError or KeyError for what is not a `Done` as JSON."""
    files = [Made(**made) for made in entry["files"]]
    fits = isinstance(entry["key"], str) and isinstance(entry["seconds"], int | float)
    if not fits or not isinstance(entry["result"], dict | None) or not all(_is_made(m) for m in files):
        raise TypeError
    return Done(entry["key"], entry["seconds"], entry["result"], files)


def _is_made(made: Made) -> bool:
    return all(isinstance(text, str) for text in (made.name, made.xxh3)) and type(made.nbytes) is type(made.mtime_ns) is int
