"""What candidates are compared with: a model, or a file of its predictions; and writing such a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ...data_classes import dataclass
from ...errors import PlanError, UsageError
from ...jobs.atomic_write import atomic_file
from ...runtime import Model
from ...runtime.evaluate.divergence import OnLogits
from ...runtime.evaluate.logits_file import LogitsFileWriter, StoredPredictions, row_codes, scored
from ...runtime.evaluate.open_logits import open_logits
from ...runtime.evaluate.perplexity import cut_windows, with_bos
from ...runtime.evaluate.provenance import file_digest
from ...runtime.evaluate.top_logits import TopLogitsWriter, record_type
from .arguments import check_new, refuse_given, refuse_inputs
from .models import ModelLike

BaselineLike = ModelLike | bool  # True: the file that --kl-divergence-base names


@dataclass(frozen=True)
class LogitsChoice:
    """What of --kl-divergence and --kl-divergence-base stands for what.

    read   the file whose predictions are the baseline's
    model  the model that is the baseline
    write  the file that gets the baseline's predictions, or without one those of the model that is scored
    """

    read: StoredPredictions | None = None
    model: ModelLike | None = None
    write: Path | None = None


def choose_logits(
    kl_divergence: BaselineLike | None, base: str | Path | None, top_logits: int | None, force: bool, several: bool
) -> LogitsChoice:
    """several: more than one model is scored. Raises UsageError for what does not fit together, PlanError for a file that is
    there already or is no file of predictions, FormatError for a damaged one."""
    path = Path(base) if base is not None else None
    if isinstance(kl_divergence, bool) or kl_divergence is None:
        if not kl_divergence and several and path is not None:
            raise UsageError(f"which model's predictions are for {path}? Score one model, or name one with --kl-divergence")
        if kl_divergence and path is None:
            raise UsageError("--kl-divergence without a value compares with --kl-divergence-base FILE, which is missing")
        choice = LogitsChoice(write=path) if not kl_divergence else LogitsChoice(read=_opened(path))
    else:
        stored = open_logits(Path(kl_divergence)) if isinstance(kl_divergence, str | Path) else None
        if stored is not None and path is not None:
            raise UsageError(f"{stored.path} holds the predictions already: leave --kl-divergence-base out")
        choice = LogitsChoice(stored) if stored is not None else LogitsChoice(model=kl_divergence, write=path)
    if choice.write is None:
        refuse_given({"--top-logits": top_logits, "--force": force}, "a file to write (--kl-divergence-base)")
    else:
        if choice.write.exists() and not force and open_logits(choice.write) is not None:
            raise PlanError(f"{choice.write} exists; --kl-divergence compares with it, --force replaces it")
        check_new(choice.write, force)
    return choice


def _opened(path: Path | None) -> StoredPredictions:
    assert path is not None
    try:
        stored = open_logits(path)
    except FileNotFoundError:
        raise PlanError(f"{path} does not exist; without --kl-divergence it is written") from None
    if stored is None:
        raise PlanError(f"{path} is no file of predictions, as `ggufmill perplexity --kl-divergence-base` writes it")
    return stored


def stored_tokens(
    stored: StoredPredictions, model: Model, text: str | None, n_ctx: int | None, chunks: int | None
) -> np.ndarray:
    """The tokens of the windows whose predictions are stored, int64 [n]. text: checked to be the same.

    Raises PlanError for another text, context or vocabulary.
    """
    windows, path = stored.tokens, stored.path
    if n_ctx is not None and n_ctx != stored.n_ctx:
        raise PlanError(f"{path} is of windows of {stored.n_ctx} tokens: give -c {stored.n_ctx}, or none")
    if chunks is not None and chunks > len(windows):
        raise PlanError(f"{path} has {len(windows)} windows, fewer than --chunks {chunks}")
    if stored.n_vocab != model.n_vocab:
        counts = f"{stored.n_vocab} tokens in its vocabulary, {model.source.path} {model.n_vocab}"
        raise PlanError(f"{path} is of another model: it has {counts}")
    windows = windows[:chunks]
    if text is not None:
        own = cut_windows(model, text, stored.n_ctx, len(windows))
        if own.shape != windows.shape or not np.array_equal(with_bos(model, own), with_bos(model, windows)):
            raise PlanError(f"{path} is of another text than the one given, or of another vocabulary")
    return windows.ravel()


def describe_stored(stored: StoredPredictions) -> dict[str, Any]:
    """A file of predictions as an origin: path, files (name, nbytes, digest), what it holds, and the model if it says so."""
    path = Path(stored.path)
    file = {"name": path.name, "nbytes": path.stat().st_size, "digest": file_digest(path)}
    return {"path": stored.path, "files": [file], "logits": stored.kind, "windows": len(stored.tokens)} | (
        {"model": stored.about} if stored.about else {}
    )


def logits_bytes(path: Path | None, model: Model, tokens: int, n_ctx: int, top_logits: int | None) -> int:
    """Bytes of the file that `writing_logits` makes, beside its header."""
    if path is None:
        return 0
    each = 2 * row_codes(model.n_vocab) if top_logits is None else record_type(model.n_vocab, top_logits).itemsize
    return tokens // n_ctx * scored(n_ctx) * each + 4 * tokens


@contextmanager
def writing_logits(
    path: Path | None, model: Model, tokens: np.ndarray, n_ctx: int, top_logits: int | None, about: Mapping[str, Any]
) -> Iterator[OnLogits | None]:
    """What writes a model's logits into a file, which has its name when the context ends without an error; None without a path.

    tokens: int64 [n], of all windows; top_logits: the file holds only so many tokens of each prediction; about: the model.
    """
    if path is None:
        yield None
        return
    refuse_inputs([path], list(model.source.files))
    windows = tokens[: len(tokens) // n_ctx * n_ctx].reshape(-1, n_ctx)
    with atomic_file(path) as file:
        if top_logits is None:
            yield LogitsFileWriter(file, model.n_vocab, windows).add
        else:
            yield TopLogitsWriter(file, model.n_vocab, windows, top_logits, dict(about)).add
