"""The texts that the stages of a run read."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...formats import PlanError
from ...formats.file_range import read_text
from ...imatrix.texts import TABLE_SUFFIXES, calibration_tokens
from ...runtime import Model
from .cache import key_of


@dataclass(frozen=True)
class StageText:
    """A text that a stage reads: its tokens, int64 [n], by the source's own tokenizer, and the windows they are cut into.

    n_ctx, chunks  tokens per window, and windows at most (None: all)
    digest         of the tokens, of how a window begins, and of the text's name
    """

    path: Path
    tokens: np.ndarray
    n_ctx: int
    chunks: int | None
    digest: str


def read_stage_text(where: str, path: Path, n_ctx: int, chunks: int | None, model: Model) -> StageText:
    """Reads and tokenises a text, plain or a table with texts or conversations. Raises PlanError, beginning with `where`,
    unless it is UTF-8 and fills a window."""
    tokenizer = model.tokenizer
    if path.is_dir():
        raise PlanError(f"{where}: {path} is a folder; give a file")
    try:
        is_table = path.suffix in TABLE_SUFFIXES
        ids = calibration_tokens(path, tokenizer, model.metadata) if is_table else tokenizer.encode(read_text(path))
    except UnicodeDecodeError as error:
        raise PlanError(f"{where}: {path} is not UTF-8 text (byte {error.start}: {error.reason})") from None
    tokens = np.asarray(ids, np.int64)
    if len(tokens) < n_ctx:
        raise PlanError(f"{where}: {path} has {len(tokens)} tokens, a window takes {n_ctx}: give a longer one or less ctx")
    digest = key_of(hashlib.sha256(tokens.tobytes()).hexdigest(), tokenizer.bos if tokenizer.add_bos else None, path.name)
    return StageText(path, tokens, n_ctx, chunks, digest)
