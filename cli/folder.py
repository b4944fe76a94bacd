"""Where a run keeps what it makes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Folder:
    """The files of a run, named after its recipe."""

    path: Path
    stem: str

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
