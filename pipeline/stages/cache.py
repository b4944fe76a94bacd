"""Records of finished stages of a run, in a file, so that a stage whose inputs are unchanged is not done again."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, field
from pathlib import Path
from typing import Any

from ...data_classes import dataclass
from ...formats.file_range import range_checksum, read_file
from ...jobs.atomic_write import write_text
from ..common.arguments import check_new
from ..common.messages import note, warn
from ..common.progress import OnProgress, Stage


@dataclass(frozen=True)
class StageOutput:
    """A file as a stage left it; xxh3 is of all its bytes, in hex. A file of this size and time is not hashed again."""

    name: str
    nbytes: int
    mtime_ns: int
    xxh3: str


@dataclass(frozen=True)
class StageRecord:
    """A stage that was begun; it is finished when it has a result."""

    key: str
    seconds: float = 0.0
    result: dict[str, Any] | None = None
    files: list[StageOutput] = field(default_factory=list)


class StageCache:
    """The file at `path`: stage -> `StageRecord`.

    fresh: nothing in it counts, and these stages count as begun. seconds: stage -> how long it took when it was done.
    """

    def __init__(self, path: Path, fresh: Sequence[str] | None, report: OnProgress = lambda progress: None):
        self.path, self._report = path, report
        self.seconds: dict[str, float] = {}
        # With --force the folder belongs to this run, also for a later one that continues it.
        self._records: dict[str, StageRecord] = _read(path) if fresh is None else {name: StageRecord("") for name in fresh}

    def was_begun(self, name: str) -> bool:
        """Whether the stage was ever begun in this folder."""
        return name in self._records

    def check_own(self, name: str, key: str, file: Path) -> None:
        """Raises PlanError for a file that is there although no stage of this name has begun to write it, and as
        `check_folder` does. key: that the stage will have."""
        record = self._records.get(name)
        is_own = record is not None and (record.key == key or file.name in [output.name for output in record.files])
        check_new(file, force=is_own)

    def forget(self, name: str) -> None:
        """Has the stage done again: what it read was written again."""
        self._records.pop(name, None)

    def stage(self, name: str, key: str, files: Sequence[Path], work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The stage's result: from the cache if its key is the same and its files are as it left them, else from `work`.

        key: a digest of all that decides what the stage does (`key_of`). files: what it writes.
        """
        record = self._records.get(name)
        if record is not None and record.result is not None and record.key == key and self._intact(name, record, files):
            note(f"{name}: done before, nothing has changed")
            self.seconds[name] = record.seconds
            return record.result
        self._save(name, StageRecord(key))
        start = time.perf_counter()
        result = work()
        self.seconds[name] = time.perf_counter() - start
        self._save(name, StageRecord(key, self.seconds[name], result, [self._output(file) for file in files]))
        return result

    def drop_unfinished(self) -> None:
        """Forgets stages that were begun by an earlier recipe and are none of this one's: called at the end of a run."""
        self._records = {name: record for name, record in self._records.items() if record.result is not None}
        write_text(self.path, json.dumps({stage: asdict(r) for stage, r in self._records.items()}))

    def has(self, name: str, key: str, files: Sequence[Path]) -> bool:
        """Whether the stage is done with this key, and its files are as it left them. Changes nothing."""
        record = self._records.get(name)
        if record is None or record.result is None or record.key != key:
            return False
        return self._problem(record, files) is None

    def _intact(self, name: str, record: StageRecord, files: Sequence[Path]) -> bool:
        """Whether the files are those that the stage left; notes what is wrong with them."""
        problem = self._problem(record, files)
        if problem:
            note(f"{name}: {problem}; it is made again")
        elif problem is None:
            self._save(name, record)
        return problem is None

    def _problem(self, record: StageRecord, files: Sequence[Path]) -> str | None:
        """What is wrong with a stage's files: '' if they are others by name. Reads only files with another time, which it
        records."""
        if [output.name for output in record.files] != [file.name for file in files]:
            return ""
        for i, (output, file) in enumerate(zip(record.files, files, strict=True)):
            if not file.is_file():
                return f"{file} is gone"
            if (size := file.stat().st_size) != output.nbytes:
                return f"{file} has {size:,} bytes, not the {output.nbytes:,} that were written"
            if file.stat().st_mtime_ns != output.mtime_ns:
                record.files[i] = self._output(file)
                if record.files[i].xxh3 != output.xxh3:
                    return f"{file} has changed since it was written"
        return None

    def _save(self, name: str, record: StageRecord) -> None:
        self._records[name] = record
        write_text(self.path, json.dumps({stage: asdict(r) for stage, r in self._records.items()}))

    def _output(self, path: Path) -> StageOutput:
        """The file as it is now, with its checksum."""
        before = path.stat()
        stage = Stage(self._report, "checksum", before.st_size)
        xxh3 = range_checksum(path, 0, before.st_size, stage.advance)
        return StageOutput(path.name, before.st_size, before.st_mtime_ns, xxh3)


def unfinished_stages(path: Path) -> list[str]:
    """Names of the stages that a run has begun and not finished; [] without a file at `path`."""
    return [name for name, record in _read(path).items() if record.result is None]


def key_of(*parts: object) -> str:
    """A digest of all that decides what a stage does."""
    return hashlib.sha256(json.dumps([str(part) for part in parts]).encode()).hexdigest()


def _read(path: Path) -> dict[str, StageRecord]:
    """What earlier runs left; nothing, with a warning, if the file is not one that `run` wrote."""
    if not path.exists():
        return {}
    try:
        return {stage: _record(entry) for stage, entry in json.loads(read_file(path)).items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        warn([f"{path} is damaged and counts as absent: every stage is done again"])
        return {}


def _record(entry: dict[str, Any]) -> StageRecord:
    """Raises TypeError or KeyError for what is not a `StageRecord` as JSON."""
    files = [StageOutput(**output) for output in entry["files"]]
    fits = isinstance(entry["key"], str) and isinstance(entry["seconds"], int | float)
    if not fits or not isinstance(entry["result"], dict | None) or not all(_is_output(output) for output in files):
        raise TypeError
    return StageRecord(entry["key"], entry["seconds"], entry["result"], files)


def _is_output(output: StageOutput) -> bool:
    texts, numbers = (output.name, output.xxh3), (output.nbytes, output.mtime_ns)
    return all(isinstance(text, str) for text in texts) and all(type(number) is int for number in numbers)
