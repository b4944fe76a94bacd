"""Opens a file of a baseline's predictions, of whichever kind it is."""

from __future__ import annotations

from pathlib import Path

from ...formats.file_range import check_regular
from . import logits_file, top_logits
from .logits_file import LogitsFile, StoredPredictions
from .top_logits import TopLogitsFile

_KINDS = {logits_file.MAGIC: LogitsFile, top_logits.MAGIC: TopLogitsFile}


def open_logits(path: Path) -> StoredPredictions | None:
    """A file of predictions, of either kind by its magic; None for any other file. Raises FormatError for a damaged one."""
    check_regular(path)
    if path.is_dir():
        return None
    with path.open("rb") as file:
        magic = file.read(len(logits_file.MAGIC))
    kind = _KINDS.get(magic)
    return kind(path) if kind is not None else None
