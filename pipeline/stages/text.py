"""The texts that the stages of a run read."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ...data_classes import dataclass
from ...formats import PlanError
from ...formats.file_range import read_text
from ...imatrix.calibration import TextSegment
from ...imatrix.texts import TABLE_SUFFIXES, CalibrationText, read_segments
from ...runtime import Model
from .cache import key_of


@dataclass(frozen=True)
class StageText:
    """A text that a stage reads, or several as one: the tokens, by the source's own tokenizer, and the windows they are cut
    into.

    segments       tokens int64 [n], one for each weight
    n_ctx, chunks  tokens per window, and windows at most (None: all)
    digest         of the tokens, of how a window begins, and of the texts' names
    """

    paths: Sequence[Path]
    segments: Sequence[TextSegment]
    n_ctx: int
    chunks: int | None
    digest: str

    @property
    def tokens(self) -> np.ndarray:
        """int64 [n], of all segments."""
        return np.concatenate([np.asarray(segment.tokens, np.int64) for segment in self.segments])

    @property
    def name(self) -> str:
        """The files' names."""
        return ", ".join(path.name for path in self.paths)


def read_stage_text(
    where: str,
    texts: Sequence[CalibrationText],
    n_ctx: int,
    chunks: int | None,
    model: Model,
    from_chunk: int = 0,
) -> StageText:
    """Reads and tokenises texts: plain ones, JSONL and parquet.

    from_chunk: windows that are left out at the beginning. Raises PlanError, beginning with `where`, unless they are UTF-8 and
    fill a window.
    """
    for path in (text.path for text in texts):
        if path.is_dir():
            raise PlanError(f"{where}: {path} is a folder; give a file")
        if path.suffix not in TABLE_SUFFIXES:
            _check_utf8(where, path)
    segments = [
        replace(segment, tokens=np.asarray(segment.tokens, np.int64)[from_chunk * n_ctx :])
        for segment in read_segments(model, texts)
    ]
    names = ", ".join(str(text.path) for text in texts)
    if (shortest := min(len(segment.tokens) for segment in segments)) < n_ctx:
        behind = f" behind the first {from_chunk} windows" if from_chunk else ""
        raise PlanError(
            f"{where}: {names} has {shortest} tokens{behind}, a window takes {n_ctx}: give a longer one or less ctx"
        )
    tokenizer = model.tokenizer
    digests = [hashlib.sha256(np.asarray(segment.tokens).tobytes()).hexdigest() for segment in segments]
    weights = [str(text.weight) for text in texts if text.weight != 1]
    begins = tokenizer.bos if tokenizer.add_bos else None
    digest = key_of(*digests, begins, *(text.path.name for text in texts), *weights)
    return StageText([text.path for text in texts], segments, n_ctx, chunks, digest)


def _check_utf8(where: str, path: Path) -> None:
    try:
        read_text(path)
    except UnicodeDecodeError as error:
        raise PlanError(f"{where}: {path} is not UTF-8 text (byte {error.start}: {error.reason})") from None
