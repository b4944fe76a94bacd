"""Importance matrices: for each tensor the sum of squared activations per column, and the number of tokens in the sum.

An entry has a row per matrix: one for a 2-D weight, one per expert for a stack of experts.

Few tokens say little about an expert. So for an expert with n < MIN_TOKENS tokens, quantisation gets the mean over its own
tokens and MIN_TOKENS - n more, whose squared activations are the tensor's mean over its other experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from pathlib import Path
from typing import Any

import numpy as np

from ..data_classes import dataclass
from ..formats import FormatError, MillError, TensorSource, dims
from ..jobs.atomic_write import atomic_file, write_bytes
from .files import LEGACY_CHUNK, Entry, dat_bytes, gguf_pieces, read_imatrix_file

MIN_TOKENS = 32
_PER_HEAD = ("attn_k_b.weight", "attn_v_b.weight", "attn_output_a.weight")  # one matrix, or one per head or group of heads
EMBEDDINGS = "token_embd.weight"

# Gate and up may be separate or fused; each takes the other's data (docs/formats/mixes.md, imatrix lookup): entry -> tensor.
_SUBSTITUTES = {"ffn_up_exps.weight": "ffn_gate_up_exps.weight", "ffn_gate_up_exps.weight": "ffn_up_exps.weight"}


@dataclass
class Imatrix:
    """An importance matrix.

    entries      tensor name -> (sums float32 [matrices, columns], counts int64 [matrices])
    datasets     names of the calibration texts
    chunk_count  windows read; chunk_size: tokens per window
    """

    entries: dict[str, Entry] = field(default_factory=dict)
    datasets: list[str] = field(default_factory=list)
    chunk_count: int = 0
    chunk_size: int = 512

    def save(self, path: str | Path) -> None:
        """Writes a file atomically, in the legacy format for a name that ends in .dat, else as GGUF. Raises MillError."""
        path = Path(path)
        if path.suffix == ".dat":
            write_bytes(path, dat_bytes(self.means(), self.datasets, self.chunk_count))
            return
        with atomic_file(path) as file:
            file.writelines(gguf_pieces(self.entries, self.datasets, self.chunk_count, self.chunk_size))

    def means(self) -> dict[str, np.ndarray]:
        """Tensor name -> mean squared activation per column, float32 [matrices, columns].

        Experts with fewer than MIN_TOKENS tokens are filled up with the mean over the tensor's other experts; entries without
        data are left out.
        """
        return {name: entry_means(*entry) for name, entry in self.entries.items() if has_data(*entry)}

    def unseen_experts(self) -> dict[str, list[int]]:
        """Tensor name -> numbers of the experts that saw no token, for entries with such experts."""
        return self._experts(lambda counts: counts == 0)

    def undersampled_experts(self) -> dict[str, list[int]]:
        """Tensor name -> numbers of the experts that saw at least one token, but fewer than MIN_TOKENS."""
        return self._experts(lambda counts: (counts > 0) & (counts < MIN_TOKENS))

    def _experts(self, condition: Callable[[np.ndarray], np.ndarray]) -> dict[str, list[int]]:
        stacks = ((name, counts) for name, (_, counts) in self.entries.items() if len(counts) > 1 or not counts.any())
        selected = {name: np.flatnonzero(condition(counts)).tolist() for name, counts in stacks}
        return {name: experts for name, experts in selected.items() if experts}

    def merge(self, *others: Imatrix) -> Imatrix:
        """The sums and counts of all added up, rounded to float32 once at the end.

        Raises MillError if entries of one name have different shapes, or one of the others has no entry in common.
        """
        by_name: dict[str, list[Entry]] = {name: [entry] for name, entry in self.entries.items()}
        for other in others:
            if by_name and other.entries and not by_name.keys() & other.entries.keys():
                mine, theirs = next(iter(by_name)), next(iter(other.entries))
                raise MillError(f"imatrix files without an entry in common ({mine}, ...; {theirs}, ...): not of one model")
            for name, entry in other.entries.items():
                by_name.setdefault(name, []).append(entry)
        chunk_count = sum(imatrix.chunk_count for imatrix in (self, *others))
        datasets = list(dict.fromkeys(name for imatrix in (self, *others) for name in imatrix.datasets))
        merged = {name: _merged(name, entries) for name, entries in by_name.items()}
        return Imatrix(merged, datasets, chunk_count, self.chunk_size)

    def not_stored(self, suffix: str) -> list[str]:
        """What is lost in a file with this suffix ('.dat'; GGUF loses nothing), for the user."""
        if suffix != ".dat":
            return []
        stacks = [name for name, (_, counts) in self.entries.items() if len(counts) > 1]
        lost = [f"how many tokens each expert of {len(stacks)} stacks saw: a later merge weighs all alike"] if stacks else []
        filled = sum(map(len, [*self.unseen_experts().values(), *self.undersampled_experts().values()]))
        if filled:
            lost.append(f"that {filled} experts with fewer than {MIN_TOKENS} tokens were filled up with the mean of the others")
        without = [name for name, (sums, counts) in self.entries.items() if not has_data(sums, counts)]
        if without:
            lost.append(f"{len(without)} entries without data, such as {without[0]}")
        if self.chunk_size != LEGACY_CHUNK:
            lost.append(f"the window of {self.chunk_size} tokens: readers assume {LEGACY_CHUNK}")
        if len(self.datasets) > 1:
            lost.append(f"that its {len(self.datasets)} texts are several: their names become one")
        return lost

    def metadata(self, file: str) -> dict[str, Any]:
        """The quantize.imatrix.* metadata that llama-quantize writes (docs/formats/mixes.md)."""
        keys: dict[str, Any] = {"quantize.imatrix.file": file}
        if self.datasets:
            keys["quantize.imatrix.dataset"] = ", ".join(self.datasets)
        keys["quantize.imatrix.entries_count"] = np.int32(len(self.entries))
        if self.chunk_count:
            keys["quantize.imatrix.chunks_count"] = np.int32(self.chunk_count)
        return keys

    def fit(self, source: TensorSource, where: str) -> Imatrix:
        """This imatrix with entries in the shapes that a model's tensors need.

        A legacy file has all experts of a stack in one row. attn_k_b and attn_v_b are one matrix or one per head, depending
        on the MLA layout: data collected for one is pooled, or repeated, for the other.

        where: name of the file for messages. Raises MillError if it cannot be of this model (no common tensor, other widths),
        and for a `problem`.
        """
        tensors = {name: source.tensors.get(name) or source.tensors.get(_substitute_name(name)) for name in self.entries}
        if not any(tensors.values()):
            raise MillError(
                f"{where}: none of its {len(self.entries)} entries ({next(iter(self.entries), '')}, ...) names a tensor of "
                f"{source.path}: of another model, or of a program with other names"
            )
        fitted = dict(self.entries)
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            columns, _, matrices = dims(tensor.shape)
            sums, counts = self.entries[name]
            if sums.shape != (1, columns):
                sums, counts = _split_row((sums, counts), matrices)
            if sums.shape == (1, columns):
                sums, counts = np.repeat(sums, matrices, axis=0), np.repeat(counts, matrices)
            elif matrices == 1 and name.endswith(_PER_HEAD) and sums.shape[1] % columns == 0:
                sums, counts = _pooled((sums, counts), columns)
            elif matrices == 1 and sums.shape[1] == columns:
                sums, counts = sums.sum(axis=0, keepdims=True), counts.sum(keepdims=True)
            if sums.shape != (matrices, columns):
                if name == EMBEDDINGS:  # some tools write the output matrix's data under this name
                    del fitted[name]
                    continue
                raise MillError(
                    f"{where}: entry {name} is {sums.shape[0]} x {sums.shape[1]}, the tensor needs {matrices} x {columns}: "
                    "of another model"
                )
            fitted[name] = (sums, counts)
        result = Imatrix(fitted, self.datasets, self.chunk_count, self.chunk_size)
        problem = result.problem()
        if problem is not None:
            raise MillError(f"{where}: {problem}")
        return result

    def problem(self) -> str | None:
        """What makes it unusable (NaN, infinite or negative sums, negative counts, no positive count); None if it is usable."""
        for name, (sums, counts) in self.entries.items():
            if not (np.isfinite(sums).all() and (sums >= 0).all()):
                return f"entry {name} holds NaN, infinite or negative sums; compute it again"
            if (counts < 0).any():
                return f"entry {name} holds negative counts; compute it again"
        if self.entries and not any(counts.any() for _, counts in self.entries.values()):
            return "every count is zero: it was written before any text was read; compute it again"
        return None


def load(path: str | Path, is_mapped: bool = False) -> Imatrix:
    """Reads a file in either format. Raises FormatError for one that is no importance matrix, truncated, or unusable.
    is_mapped: see `read_imatrix_file`."""
    path = Path(path)
    file = read_imatrix_file(path, is_mapped)
    imatrix = Imatrix(file.entries, file.datasets, file.chunk_count, file.chunk_size)
    if not imatrix.entries:
        raise FormatError(f"{path}: an imatrix without entries")
    problem = imatrix.problem()
    if problem is not None:
        raise FormatError(f"{path}: {problem}")
    return imatrix


def has_data(sums: np.ndarray, counts: np.ndarray) -> bool:
    """Whether any token was seen, and any activation was not zero."""
    return bool(counts.any() and sums.any())


def _substitute_name(name: str) -> str:
    """The tensor that may take an entry's data, other than the one of its name."""
    for part, other in _SUBSTITUTES.items():
        if name.endswith("." + part):
            return name.removesuffix(part) + other
    return name


def _merged(name: str, entries: list[Entry]) -> Entry:
    if len(entries) == 1:
        return entries[0]
    matrices = max(len(counts) for _, counts in entries)
    rows = [_split_row(entry, matrices) for entry in entries]
    shapes = {sums.shape for sums, _ in rows}
    columns = min(sums.shape[1] for sums, _ in entries)
    if len(shapes) > 1 and name.endswith(_PER_HEAD) and all(sums.shape[1] % columns == 0 for sums, _ in entries):
        rows = [_pooled(entry, columns) for entry in entries]  # of different MLA layouts
    elif len(shapes) > 1:
        raise MillError(
            f"imatrix entry {name} is {' in one file and '.join(map(str, sorted(shapes)))} in another: not one model"
        )
    sums = np.zeros(rows[0][0].shape)
    for one, _ in rows:
        sums += one
    return sums.astype(np.float32), np.sum([counts for _, counts in rows], axis=0)


def _split_row(entry: Entry, matrices: int) -> Entry:
    """An entry with all matrices in one row -> one row per matrix; any other entry unchanged."""
    sums, counts = entry
    if len(counts) > 1 or matrices == 1 or sums.shape[1] % matrices:
        return entry
    return sums.reshape(matrices, -1), np.repeat(counts, matrices)


def _pooled(entry: Entry, columns: int) -> Entry:
    """An entry of several heads, in one row or one row each -> one row for the matrix that they share."""
    sums, counts = entry
    rows = sums.reshape(-1, columns)
    return rows.sum(axis=0, keepdims=True), np.repeat(counts, len(rows) // len(counts)).sum(keepdims=True)


def entry_means(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """What `Imatrix.means` has of an entry."""
    total, n_total = sums.sum(axis=0, dtype=np.float64), int(counts.sum())
    means = sums / np.maximum(counts, 1)[:, None]
    for expert in np.flatnonzero(counts < MIN_TOKENS):
        n = int(counts[expert])
        if n_total > n:
            others = np.maximum(total - sums[expert], 0) / (n_total - n)
            means[expert] = (sums[expert] + (MIN_TOKENS - n) * others) / MIN_TOKENS
    return means.astype(np.float32)
