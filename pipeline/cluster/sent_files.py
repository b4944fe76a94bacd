"""Names of small input files that are sent to the workers of a cluster, so that they need not lie under the same path there."""

from __future__ import annotations

from pathlib import Path

from ...data_classes import dataclass

FOLDERS: dict[str, Path] = {}  # in a worker: digest -> where the file of this digest lies


@dataclass(frozen=True)
class SentFile:
    """A file as workers know it: the name that it has here, and a digest of its bytes."""

    name: str
    digest: str

    def path(self) -> Path:
        """Runs on a worker: where the file lies."""
        return FOLDERS[self.digest] / self.name


def path_here(file: str | SentFile) -> Path:
    """Runs on a worker: a path of this machine."""
    return file.path() if isinstance(file, SentFile) else Path(file)
