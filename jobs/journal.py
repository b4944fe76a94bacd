"""The journal of a job: which tensors are complete, with their checksums, so that a killed job can go on.

A text file beside the output, one JSON object per line: {"fingerprint": ..., "tensors": ...} of the plan first, then
{"tensor": name, "xxh3": hex} for each tensor when its last byte has been written. It is locked while a job runs and deleted
when the output is complete.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import IO

from ..errors import PlanError
from ..operating_system.files import BINARY, NO_FOLLOW, lock_file, sync_file
from .plan import Plan


def journal_path(plan: Plan) -> Path:
    """Where the plan's journal is: beside its first file, NAME.journal."""
    first = plan.files[0].path
    return first.with_name(first.name + ".journal")


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
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | NO_FOLLOW | BINARY, 0o644)
        self._file: IO[str] = os.fdopen(fd, "a+", encoding="utf-8", errors="surrogateescape", newline="\n")
        if not lock_file(self._file):
            self._file.close()
            raise PlanError(f"another job is writing {plan.files[0].path} (it holds {self.path})")

    def start(self) -> None:
        """Empties the journal and writes the plan's fingerprint."""
        self._file.truncate(0)
        self._append({"fingerprint": self._plan.fingerprint, "tensors": len(self._plan.outputs)})

    def resume(self) -> list[dict[str, str]] | None:
        """The records of complete tensors, oldest first; None for an empty journal. A last line that a kill cut short is
        removed from the file.

        Raises PlanError for a file that is not a journal, and for the journal of another plan.
        """
        self._file.seek(0)
        text = self._file.read()
        complete = text[: text.rfind("\n") + 1]
        try:
            lines = [json.loads(line) for line in complete.splitlines()]
            is_valid = all(isinstance(line.get("xxh3"), str) and isinstance(line.get("tensor"), str) for line in lines[1:])
            if not is_valid or (lines and not isinstance(lines[0].get("fingerprint"), str)):
                raise ValueError
        except (ValueError, AttributeError, TypeError, RecursionError):
            raise PlanError(f"{self.path} is damaged, so nothing can be resumed; start afresh with --force") from None
        self._file.truncate(len(complete.encode("utf-8", "surrogateescape")))
        if not lines:
            return None
        if lines[0]["fingerprint"] != self._plan.fingerprint:
            raise PlanError(
                f"{self.path} belongs to a job with another source, recipe, imatrix or version; "
                "repeat the first command with --resume, or start afresh with --force"
            )
        return lines[1:]

    def add(self, tensor: str, checksum: str) -> None:
        """Records a tensor whose bytes have all been written."""
        self._append({"tensor": tensor, "xxh3": checksum})

    def sync(self) -> None:
        """Brings what was recorded to disk."""
        sync_file(self._file.fileno())

    def delete(self) -> None:
        """Removes the file; the lock stays until `close` where the system permits that."""
        try:
            self.path.unlink()
        except PermissionError:  # Windows: not while it is open
            self._file.close()
            self.path.unlink()

    def close(self) -> None:
        """Closes the file and gives up the lock."""
        self._file.close()

    def _append(self, record: dict[str, object]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
