"""Files that weights are read from through a memory map."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

from ..formats import MillError
from ..simd.sigbus_handler import install_sigbus_handler


class MappedFiles:
    """Notices files that have become shorter: reading what is gone from a mapped one ends the whole process, with one line.

    A file that has another one in its place, or no longer a name, is no problem: what is mapped stays readable.
    wait: seconds between two looks (a model may have hundreds of files, and a look costs some microseconds for each).
    """

    def __init__(self, paths: Iterable[Path], wait: float = 0.2):
        self.wait, self._looked = wait, time.monotonic()
        self._known = [(path, *found) for path in paths if (found := _found(path)) is not None]

    def check(self) -> None:
        """Raises MillError, naming the first file that is shorter than it was. To be called before the weights are read."""
        install_sigbus_handler()
        now = time.monotonic()
        if now - self._looked < self.wait:
            return
        self._looked = now
        for path, identity, size in self._known:
            found = _found(path)
            if found is not None and found[0] == identity and found[1] < size:
                raise MillError(f"{path}: the file is shorter than it was ({found[1]} bytes, not {size}): load the model again")


def _found(path: Path) -> tuple[tuple[int, int], int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return (status.st_dev, status.st_ino), status.st_size
