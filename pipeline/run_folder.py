"""Where a run keeps what it makes."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ..formats import PlanError


@dataclass(frozen=True)
class Folder:
    """The files of a run, named after its recipe."""

    path: Path
    stem: str

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keeps other runs out; the lock is the kernel's, so a killed run leaves none. The folder is made if need be, and taken
        away again if nothing came into it. Raises PlanError when another run is at work in it."""
        made = [path for path in (self.path, *self.path.parents) if not path.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                other = f"another run is at work in {self.path}; wait for its end, or give another folder (-o)"
                raise PlanError(other) from None
            except OSError:  # some network file systems lock no folders: there the journal's lock keeps the model whole
                pass
            try:
                yield
            finally:
                for path in made:
                    with suppress(OSError):
                        path.rmdir()
        finally:
            os.close(handle)

    @property
    def gguf(self) -> Path:
        return self.path / f"{self.stem}.gguf"

    @property
    def imatrix(self) -> Path:
        return self.path / f"{self.stem}.imatrix"

    @property
    def state(self) -> Path:
        """Stage -> `Done`."""
        return self.path / "state.json"

    @property
    def found(self) -> Path:
        """The recipe that was searched for."""
        return self.path / f"{self.stem}.recipe.txt"

    @property
    def measured(self) -> Path:
        """What the search has measured: where `ggufmill search MODEL FOUND` keeps it too."""
        return self.found.with_name(self.found.name + ".state.json")

    @property
    def repacked(self) -> Path:
        return self.path / f"{self.stem}-repacked.gguf"

    @property
    def reports(self) -> tuple[Path, Path, Path, Path]:
        """For programs, for people as Markdown and as a page, and the draft of a model card."""
        return self.path / "report.json", self.path / "report.md", self.path / "report.html", self.path / "README.md"
