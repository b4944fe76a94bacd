"""Files of a baseline's predictions, as llama-perplexity writes and reads them (--kl-divergence-base), and what all such files
do.

All numbers are little-endian: the magic `_logits_`; uint32 n_ctx, n_vocab, windows; the windows' token ids as int32, before
any of them is replaced by BOS; then for each window the predictions of the tokens of its second half, but for the first of
these. A prediction is float32 scale and minimum, and a uint16 code per token, filled up to a whole number of pairs: the
token's log probability is scale * code + minimum. Tokens whose logit is more than 16 below the largest have code 0, and so a
log probability below -16, at which readers leave them out.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ...errors import FormatError, MillError
from ...formats.file_range import read_range
from .divergence import Logits, Predictions

MAGIC = b"_logits_"
_SIZES = struct.Struct("<III")
_RANGE = 16.0  # of the logits that are distinguished, and lower limit of log probabilities, in nats
_CODES = 65535
_TOKEN_BYTES = 4
_MASS = 0.9, 1.1  # that a distribution may have, which was rounded and lacks the least probable tokens


class StoredPredictions:
    """A file of predictions as a baseline.

    path     the file
    n_ctx    tokens per window
    n_vocab  tokens that have a probability
    tokens   int64 [windows, n_ctx], before any of them is replaced by BOS
    about    what the file says of the model they are of
    kind     what it holds, for people
    """

    kind: str

    def __init__(self, path: Path, n_ctx: int, n_vocab: int, tokens: np.ndarray, about: dict[str, Any] | None = None):
        self.path, self.n_ctx, self.n_vocab, self.tokens, self.about = str(path), n_ctx, n_vocab, tokens, about or {}

    @property
    def scored(self) -> int:
        """Predictions per window."""
        return scored(self.n_ctx)

    def predictions(self, windows: np.ndarray, first: int) -> Sequence[Predictions]:
        return [self.window(number) for number in range(first, first + len(windows))]

    def window(self, number: int) -> Predictions:
        """The predictions of a window. Raises FormatError for what cannot be predictions."""
        raise NotImplementedError

    def explain_nonfinite(self, window: np.ndarray) -> MillError:
        return FormatError(f"{self.path}: the file is damaged: a probability is not a finite number; make it again")


def scored(n_ctx: int) -> int:
    """Predictions per window."""
    return n_ctx - 1 - n_ctx // 2


def row_codes(n_vocab: int) -> int:
    """uint16 per prediction, those of scale and minimum included."""
    return 2 * ((n_vocab + 1) // 2) + 4


class LogitsFileWriter:
    """Writes a file of llama-perplexity. tokens: int64 [windows, n_ctx], as in `StoredPredictions`."""

    def __init__(self, file: BinaryIO, n_vocab: int, tokens: np.ndarray):
        self._file, self._n_vocab = file, n_vocab
        file.write(MAGIC + _SIZES.pack(tokens.shape[1], n_vocab, len(tokens)) + tokens.astype("<i4").tobytes())

    def add(self, logits: np.ndarray) -> None:
        """Writes the next predictions, float32 [n, n_vocab]."""
        with np.errstate(invalid="ignore"):  # what is not finite ends the run, and the file with it
            self._file.write(encode(logits).tobytes())


def encode(logits: np.ndarray) -> np.ndarray:
    """Logits float32 [n, n_vocab] -> uint16 [n, row_codes]."""
    n, n_vocab = logits.shape
    largest = logits.max(axis=1)
    lowest = np.maximum(logits.min(axis=1), largest - np.float32(_RANGE))
    log_total = np.log(np.exp(logits - largest[:, None]).sum(axis=1, dtype=np.float64)).astype(np.float32)
    scale = (largest - lowest) / np.float32(_CODES)
    head = np.stack([scale, lowest - largest - log_total], axis=1).astype("<f4")
    rows = np.zeros((n, row_codes(n_vocab)), "<u2")
    rows[:, :4] = head.view("<u2")
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    codes = np.rint(inverse[:, None] * (logits - lowest[:, None]))
    rows[:, 4 : 4 + n_vocab] = np.clip(codes, 0, _CODES)
    return rows


class LogitsFile(StoredPredictions):
    """A file of llama-perplexity. Raises FormatError for one that is damaged or cut short."""

    kind = "llama-perplexity's log probabilities, 16 bits per token"

    def __init__(self, path: Path):
        size = path.stat().st_size
        start = len(MAGIC) + _SIZES.size
        if size < start:
            raise FormatError(f"{path}: the file ends within its header; make it again")
        n_ctx, n_vocab, windows = _SIZES.unpack(read_range(path, len(MAGIC), _SIZES.size).tobytes())
        self._window_bytes = 2 * row_codes(n_vocab) * scored(n_ctx)
        self._start = start + _TOKEN_BYTES * windows * n_ctx
        check_size(path, size, self._start, self._window_bytes, windows, n_ctx)
        super().__init__(path, n_ctx, n_vocab, read_tokens(path, start, windows, n_ctx, n_vocab))

    def window(self, number: int) -> Predictions:
        return _Window(self, number)

    def rows(self, number: int, rows: slice) -> np.ndarray:
        """uint16 [n, row_codes] of some predictions of a window."""
        width = row_codes(self.n_vocab)
        start = self._start + number * self._window_bytes + 2 * width * rows.start
        return read_range(Path(self.path), start, 2 * width * (rows.stop - rows.start)).view("<u2").reshape(-1, width)


def check_size(path: Path, size: int, start: int, window_bytes: int, windows: int, n_ctx: int) -> None:
    """Raises FormatError for sizes that cannot be, and for a file that has not the windows that its header says."""
    if n_ctx < 4 or not windows:
        raise FormatError(f"{path}: the file is damaged: it says that it has {windows} windows of {n_ctx} tokens")
    expected = start + windows * window_bytes
    if size < expected:
        whole = max(0, (size - start) // window_bytes)
        raise FormatError(f"{path}: the file is cut short: {whole} of {windows} windows are whole; make it again")
    if size > expected:
        raise FormatError(f"{path}: the file is damaged: {size - expected} bytes follow the last of {windows} windows")


def read_tokens(path: Path, start: int, windows: int, n_ctx: int, n_vocab: int) -> np.ndarray:
    """int64 [windows, n_ctx]. Raises FormatError for ids that the vocabulary does not have."""
    tokens = read_range(path, start, _TOKEN_BYTES * windows * n_ctx).view("<i4").reshape(windows, n_ctx).astype(np.int64)
    if tokens.min() < 0 or tokens.max() >= n_vocab:
        raise FormatError(f"{path}: the file is damaged: it has token ids that its vocabulary of {n_vocab} tokens lacks")
    return tokens


class _Window:
    def __init__(self, file: LogitsFile, number: int):
        self._file, self._number = file, number

    def block(self, rows: slice) -> _CodesBlock:
        codes = self._file.rows(self._number, rows)
        head = np.ascontiguousarray(codes[:, :4]).view("<f4")
        if not np.isfinite(head).all() or (head[:, 0] < 0).any() or (head[:, 1] > 0).any():
            raise FormatError(f"{self._file.path}: the file is damaged within window {self._number + 1}; make it again")
        return _CodesBlock(head, codes[:, 4 : 4 + self._file.n_vocab], f"{self._file.path}: window {self._number + 1}")


class _CodesBlock:
    """head: float32 [n, 2], scale and minimum; codes: uint16 [n, n_vocab]."""

    def __init__(self, head: np.ndarray, codes: np.ndarray, where: str):
        self._head, self._codes, self._where = head, codes, where

    def compare(self, chunk: slice, logits: Logits, targets: np.ndarray) -> tuple[np.ndarray, ...]:
        """The divergence is the sum of p log(p / q) - p + q over tokens with a log probability above -16: of rounded p it is
        off by less than the sum of p log(p / q) alone, since its derivative by p is log(p / q)."""
        codes = self._codes[chunk]
        log_probs = codes * self._head[chunk, :1]
        log_probs += self._head[chunk, 1:]
        kept = log_probs > -_RANGE
        probs = np.exp(log_probs)
        probs *= kept
        mass = probs.sum(axis=1).astype(np.float64)
        if not ((mass > _MASS[0]) & (mass < _MASS[1])).all():
            raise FormatError(f"{self._where} is damaged: its probabilities do not add up to 1; make the file again")
        base_top = probs.max(axis=1).astype(np.float64)
        base_losses = -log_probs[np.arange(len(codes)), targets].astype(np.float64)
        log_probs -= logits.shifted
        log_probs *= probs
        model_mass = (logits.exp * kept).sum(axis=1) / logits.total
        divergences = log_probs.sum(axis=1) + mass * np.log(logits.total) - mass + model_mass
        return base_losses, divergences, logits.top == codes.argmax(axis=1), base_top
