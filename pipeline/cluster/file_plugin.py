"""What sends a small input file to the workers of a cluster. Needs the extra `cluster`."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import field
from pathlib import Path
from typing import Any

from distributed import WorkerPlugin

from ...data_classes import dataclass
from .sent_files import FOLDERS, SentFile

MAX_SENT_BYTES = 64 << 20  # of a file; larger ones lie under the same path on all machines


@dataclass
class FilePlugin(WorkerPlugin):
    """Brings a file to each worker that is there, and to those that come later, until it is unregistered."""

    file: SentFile
    data: bytes = field(repr=False)

    def setup(self, worker: Any) -> None:
        """Runs on a worker."""
        folder = Path(worker.local_directory) / f"ggufmill-{self.file.digest}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / self.file.name).write_bytes(self.data)
        FOLDERS[self.file.digest] = folder

    def teardown(self, worker: Any) -> None:
        """Runs on a worker, when the job or the worker ends."""
        folder = FOLDERS.pop(self.file.digest, None)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def plugin_of(path: Path) -> FilePlugin | None:
    """What brings a file to the workers; None for one that is too large, and for a folder."""
    if not path.is_file() or path.stat().st_size > MAX_SENT_BYTES:
        return None
    data = path.read_bytes()
    return FilePlugin(SentFile(path.name, hashlib.sha256(data).hexdigest()[:32]), data)
