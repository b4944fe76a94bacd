"""The journal of a job: which tensors are complete, with their checksums, so that a killed job can be resumed.

A text file next to the output, one JSON object per line: first {"fingerprint": ..., "tensors": ..., "code": ...} of the plan
and of the program, then

    {"tensor": name, "xxh3": hex}  when the last byte of a tensor has been written
    {"event": "synced"}            everything so far is on disk
    {"event": "sync failed"}       bringing it to disk failed: what was written since the last time is to be written again, even
                                   if it can be read back, since that may come from memory
    {"event": "complete"}          everything is on disk, only the files' names are missing

It is locked while a job runs and deleted when the output is complete.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import IO

from ..data_classes import dataclass
from ..errors import PlanError
from ..operating_system.files import lock_file, sync_file
from .code_digest import code_digest
from .lock import open_locked
from .plan import Plan


def journal_path(plan: Plan) -> Path:
    """Where the plan's journal is: next to its first file, NAME.journal."""
    first = plan.files[0].path
    return first.with_name(first.name + ".journal")


@dataclass(frozen=True)
class JournalRecords:
    """What a journal says.

    tensors   (name, xxh3 in hex) of the tensors that were written and not lost by a failed sync, oldest first
    complete  whether everything is on disk and only the files' names may be missing
    """

    tensors: list[tuple[str, str]]
    complete: bool


def is_complete_but_for_names(journal: Path) -> bool:
    """Whether a journal says that its job had only the names of its files left to give. False for a damaged journal."""
    try:
        return _parse(journal.read_bytes()).complete
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        return False


def _parse(data: bytes) -> JournalRecords:
    """The records after the first line; a last line without its end does not count. Raises ValueError, AttributeError,
    TypeError or RecursionError for what is not a journal."""
    lines = [json.loads(line) for line in data[: data.rfind(b"\n") + 1].decode("utf-8", "surrogateescape").splitlines()]
    tensors: list[tuple[str, str]] = []
    n_synced, event = 0, None
    for line in lines[1:]:
        event = line.get("event")
        if event in ("synced", "complete"):
            n_synced = len(tensors)
        elif event == "sync failed":
            del tensors[n_synced:]
        elif event is None and isinstance(line.get("xxh3"), str) and isinstance(line.get("tensor"), str):
            tensors.append((line["tensor"], line["xxh3"]))
        else:
            raise ValueError
    return JournalRecords(tensors, event == "complete")


def is_locked(journal: Path) -> bool:
    """Whether a running job holds the journal."""
    with journal.open("rb") as file:
        return not lock_file(file, shared=True)


class Journal:
    """The open, locked journal of a plan."""

    def __init__(self, plan: Plan):
        """Opens and locks it. Raises PlanError when another job holds it, OSError when it cannot be opened."""
        self.path = journal_path(plan)
        self._plan = plan
        fd = open_locked(self.path)
        if fd is None:
            raise PlanError(f"another job is writing {plan.files[0].path} (it holds {self.path})")
        self._file: IO[str] = os.fdopen(fd, "a+", encoding="utf-8", errors="surrogateescape", newline="\n")

    def start(self) -> None:
        """Empties the journal and writes the plan's fingerprint."""
        self._file.truncate(0)
        self._append({"fingerprint": self._plan.fingerprint, "tensors": len(self._plan.outputs), "code": code_digest()})

    def resume(self) -> JournalRecords | None:
        """The records of complete tensors; None for an empty journal. A last line that a kill cut short is removed, and what
        follows bytes that a power cut lost, which read as 0.

        Raises PlanError for a file that is not a journal, for the journal of another plan, and for one that another version of
        this program's code has begun.
        """
        data = self.path.read_bytes().partition(b"\0")[0]
        complete = data[: data.rfind(b"\n") + 1]
        try:
            first = json.loads(complete.partition(b"\n")[0] or b"{}")
            if complete and not isinstance(first.get("fingerprint"), str):
                raise ValueError
            records = _parse(complete)
        except (ValueError, AttributeError, TypeError, RecursionError):
            raise PlanError(f"{self.path} is damaged, so nothing can be resumed; start over with --force") from None
        self._file.truncate(len(complete))
        if not complete:
            return None
        if first["fingerprint"] != self._plan.fingerprint:
            raise PlanError(
                f"{self.path} belongs to a job with another source, recipe, imatrix or version; "
                "repeat the first command with --resume, or start over with --force"
            )
        if first.get("code") != code_digest():
            raise PlanError(
                f"{self.path} belongs to a job that other code of this program has begun, whose bytes may differ; "
                "finish it with that version, or start over with --force"
            )
        return records

    def add(self, tensor: str, checksum: str) -> None:
        """Records a tensor whose bytes have all been written."""
        self._append({"tensor": tensor, "xxh3": checksum})

    def sync(self) -> None:
        """Brings what was recorded to disk. Call it when the tensors themselves are there."""
        self._append({"event": "synced"})
        sync_file(self._file.fileno())

    def sync_failed(self) -> None:
        """Records that what was written since the last `sync` may not be on disk."""
        with suppress(OSError):  # the disk may be as broken for this
            self._append({"event": "sync failed"})

    def complete(self) -> None:
        """Records, on disk, that only the names of the files are missing."""
        self._append({"event": "complete"})
        sync_file(self._file.fileno())

    def delete(self) -> None:
        """Removes the file; the lock stays until `close` where the system permits that."""
        try:
            self.path.unlink(missing_ok=True)
        except PermissionError:  # Windows: not while it is open
            self._file.close()
            self.path.unlink()

    def close(self) -> None:
        """Closes the file and gives up the lock."""
        self._file.close()

    def _append(self, record: dict[str, object]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
