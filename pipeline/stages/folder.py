"""The folder of results of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ...data_classes import dataclass
from ...formats import PlanError
from ...operating_system.files import locked_folder
from ..common import checksums


@dataclass(frozen=True)
class RunFolder:
    """The files of a run, named after its recipe. stem: the recipe's name without suffix."""

    path: Path
    stem: str

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other runs out of the folder, which is made if need be, and removed again if nothing came into it.

        The lock is the system's: a killed run leaves none. Raises PlanError when another run holds it. On network file systems
        that lock no folders, the journal's lock still protects the model.
        """
        made = [path for path in (self.path, *self.path.parents) if not path.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        with locked_folder(self.path) as is_ours:
            if not is_ours:
                raise PlanError(f"another run works in {self.path}; wait for its end, or give another folder (-o)")
            try:
                yield
            finally:
                for path in made:
                    with suppress(OSError):
                        path.rmdir()

    @property
    def gguf(self) -> Path:
        """The quantised model."""
        return self.path / f"{self.stem}.gguf"

    @property
    def working(self) -> Path:
        """The copy of the model that runs in its place, if there is one."""
        return self.path / f"{self.stem}.working.gguf"

    @property
    def imatrix(self) -> Path:
        """The importance matrix, if it is computed."""
        return self.path / f"{self.stem}.imatrix"

    @property
    def covariance(self) -> Path:
        """The covariances, if they are collected."""
        return self.path / f"{self.stem}.cov"

    @property
    def curvature(self) -> Path:
        """The curvature, if it is collected."""
        return self.path / f"{self.stem}.curv"

    @property
    def state(self) -> Path:
        """The `StageCache`."""
        return self.path / "state.json"

    @property
    def recipe(self) -> Path:
        """The recipe that was searched for."""
        return self.path / f"{self.stem}.recipe.txt"

    @property
    def measurements(self) -> Path:
        """What the search has measured: where `ggufmill search MODEL RECIPE` keeps it too."""
        return self.recipe.with_name(self.recipe.name + ".state.json")

    @property
    def repacked(self) -> Path:
        """The model with interleaved rows."""
        return self.path / f"{self.stem}-repacked.gguf"

    @property
    def checksums(self) -> Path:
        """sha256 of the files of the models."""
        return self.path / checksums.NAME

    @property
    def reports(self) -> tuple[Path, Path, Path, Path]:
        """Writes the report as JSON, as Markdown and as a page, and the draft of a model card."""
        return self.path / "report.json", self.path / "report.md", self.path / "report.html", self.path / "README.md"
