"""Small files of a baseline's predictions: the most probable tokens of each, and what all the others have together.

All numbers are little-endian: the magic `_topk_1_`; uint32 n_ctx, n_vocab, windows, k and the length of a JSON text that says
which model they are of; this text; the windows' token ids as int32, before any of them is replaced by BOS; uint64 xxh3 of all
before. Then for each window the predictions of the tokens of its second half, but for the first of these, and uint64 xxh3 of
them. A prediction is four float32: the log probability of the token that came, the probability of the tokens left out, scale
and minimum; k ids, most probable first (uint16, or uint32 where the vocabulary has more tokens than that); and k uint16 codes:
a log probability is scale * code + minimum.

The divergence of two distributions in which some tokens count as one is smaller than theirs, or the same. What is missing is
estimated: the tokens left out diverge, for each unit of probability, as the less probable half of the kept ones does.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from ...errors import FormatError
from ...formats.file_range import read_range
from .divergence import Logits, Predictions
from .logits_file import StoredPredictions, check_size, read_tokens, scored

MAGIC = b"_topk_1_"
_SIZES = struct.Struct("<IIIII")
_CODES = 65535
_DIGEST_BYTES = 8
_TINY = 1e-30  # in place of a probability of 0, whose logarithm is not finite


def record_type(n_vocab: int, k: int) -> np.dtype:
    """The dtype of a stored prediction: its k most probable tokens."""
    ids = "<u2" if n_vocab <= 1 << 16 else "<u4"
    return np.dtype(
        [("target", "<f4"), ("rest", "<f4"), ("scale", "<f4"), ("minimum", "<f4"), ("ids", ids, k), ("codes", "<u2", k)]
    )


def _digest(data: bytes) -> bytes:
    return struct.pack("<Q", xxhash.xxh3_64_intdigest(data))


class TopLogitsWriter:
    """Writes such a file. tokens: int64 [windows, n_ctx], as in `StoredPredictions`; k: tokens of each prediction that are
    kept; about: what `describe_model` says of the model."""

    def __init__(self, file: BinaryIO, n_vocab: int, tokens: np.ndarray, k: int, about: dict[str, Any]):
        self._file, self._k = file, min(k, n_vocab)
        self._targets = tokens[:, tokens.shape[1] // 2 + 1 :]
        self._record, self._window, self._row, self._hash = record_type(n_vocab, self._k), 0, 0, xxhash.xxh3_64()
        text = json.dumps(about).encode()
        head = MAGIC + _SIZES.pack(tokens.shape[1], n_vocab, len(tokens), self._k, len(text)) + text
        head += tokens.astype("<i4").tobytes()
        file.write(head + _digest(head))

    def add(self, logits: np.ndarray) -> None:
        """Writes the next predictions, float32 [n, n_vocab], of one window."""
        targets = self._targets[self._window, self._row : self._row + len(logits)]
        with np.errstate(invalid="ignore"):  # what is not finite ends the run, and the file with it
            records = self._records(logits, targets).tobytes()
        self._hash.update(records)
        self._file.write(records)
        self._row += len(logits)
        if self._row == self._targets.shape[1]:
            self._file.write(struct.pack("<Q", self._hash.intdigest()))
            self._window, self._row, self._hash = self._window + 1, 0, xxhash.xxh3_64()

    def _records(self, logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
        n, k = len(logits), self._k
        shifted = logits - logits.max(axis=1, keepdims=True)
        exp = np.exp(shifted)
        total = exp.sum(axis=1, dtype=np.float64)[:, None]
        ids = np.sort(np.argpartition(-shifted, k - 1, axis=1)[:, :k], axis=1)
        order = np.argsort(-np.take_along_axis(shifted, ids, 1), axis=1, kind="stable")
        ids = np.take_along_axis(ids, order, 1)
        log_probs = (np.take_along_axis(shifted, ids, 1) - np.log(total)).astype(np.float32)
        np.put_along_axis(exp, ids, 0, 1)
        records = np.zeros(n, self._record)
        records["target"] = (shifted[np.arange(n), targets] - np.log(total[:, 0])).astype(np.float32)
        records["rest"] = exp.sum(axis=1) / total[:, 0]
        minimum = log_probs[:, -1]
        records["scale"] = scale = (log_probs[:, 0] - minimum) / np.float32(_CODES)
        records["minimum"], records["ids"] = minimum, ids
        inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
        records["codes"] = np.clip(np.rint((log_probs - minimum[:, None]) * inverse[:, None]), 0, _CODES)
        return records


class TopLogitsFile(StoredPredictions):
    """Such a file. k: tokens of each prediction that are kept. Raises FormatError for one that is damaged or cut short."""

    def __init__(self, path: Path):
        size, start = path.stat().st_size, len(MAGIC) + _SIZES.size
        if size < start:
            raise FormatError(f"{path}: the file ends within its header; make it again")
        n_ctx, n_vocab, windows, self.k, length = _SIZES.unpack(read_range(path, len(MAGIC), _SIZES.size).tobytes())
        self._record = record_type(n_vocab, min(self.k, 1 << 16))
        self._window_bytes = scored(n_ctx) * self._record.itemsize + _DIGEST_BYTES
        tokens_at = start + length
        self._start = tokens_at + 4 * windows * n_ctx + _DIGEST_BYTES
        check_size(path, size, self._start, self._window_bytes, windows, n_ctx)
        head = read_range(path, 0, self._start).tobytes()
        if _digest(head[:-_DIGEST_BYTES]) != head[-_DIGEST_BYTES:] or not 0 < self.k <= min(n_vocab, 1 << 16):
            raise FormatError(f"{path}: the file is damaged: its header's checksum differs; make it again")
        tokens = read_tokens(path, tokens_at, windows, n_ctx, n_vocab)
        try:
            about = json.loads(head[start:tokens_at])
        except (ValueError, RecursionError):
            about = None
        super().__init__(path, n_ctx, n_vocab, tokens, about if isinstance(about, dict) else None)
        self.kind = f"the {self.k} most probable tokens of each prediction"

    def window(self, number: int) -> Predictions:
        data = read_range(Path(self.path), self._start + number * self._window_bytes, self._window_bytes).tobytes()
        if _digest(data[:-_DIGEST_BYTES]) != data[-_DIGEST_BYTES:]:
            raise FormatError(f"{self.path}: the file is damaged within window {number + 1}; make it again")
        return _Window(np.frombuffer(data, self._record, self.scored))


class _Window:
    def __init__(self, records: np.ndarray):
        self._records = records

    def block(self, rows: slice) -> _TopBlock:
        return _TopBlock(self._records[rows])


class _TopBlock:
    def __init__(self, records: np.ndarray):
        self._records = records

    def compare(self, chunk: slice, logits: Logits, targets: np.ndarray) -> tuple[np.ndarray, ...]:
        records = self._records[chunk]
        ids = records["ids"].astype(np.int64)
        log_probs = (records["codes"] * records["scale"][:, None] + records["minimum"][:, None]).astype(np.float64)
        probs, rest = np.exp(log_probs), records["rest"].astype(np.float64)
        own_log_probs = np.take_along_axis(logits.shifted, ids, 1) - np.log(logits.total)[:, None]
        own_probs, others = np.exp(own_log_probs), logits.exp.copy()
        np.put_along_axis(others, ids, 0, 1)
        own_rest = others.sum(axis=1) / logits.total
        # p log(p / q) - p + q, as for the other files
        terms = probs * (log_probs - own_log_probs) - probs + own_probs
        divergences = terms.sum(axis=1) + _term(rest, own_rest)
        half = ids.shape[1] // 2
        lower, own_lower = probs[:, half:].sum(axis=1), own_probs[:, half:].sum(axis=1)
        coarse = terms[:, :half].sum(axis=1) + _term(rest + lower, own_rest + own_lower)
        missing = (divergences - coarse) * rest / np.maximum(lower, _TINY)
        base_losses = -records["target"].astype(np.float64)
        return base_losses, divergences, logits.top == ids[:, 0], probs[:, 0], missing


def _term(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return p * (np.log(np.maximum(p, _TINY)) - np.log(np.maximum(q, _TINY))) - p + q
