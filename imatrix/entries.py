"""An importance matrix: for each tensor the sum of squared activations per column, and how many were summed.

An entry holds a row per matrix: one for a plain weight, one per expert for an expert stack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..formats import MillError, TensorSource, dims

Entry = tuple[np.ndarray, np.ndarray]


@dataclass
class Imatrix:
    """entries: name -> (sums float32 [n_mat, n], counts int64 [n_mat]).

    datasets: names of the calibration texts; chunk_count and chunk_size: windows read, and tokens in each.
    """

    entries: dict[str, Entry] = field(default_factory=dict)
    datasets: list[str] = field(default_factory=list)
    chunk_count: int = 0
    chunk_size: int = 512

    def save(self, path: str | Path) -> None:
        """Writes the file whole or not at all: the legacy format for a name ending in .dat, GGUF for any other."""
        from .files import save

        save(self, Path(path))

    def means(self) -> dict[str, np.ndarray]:
        """name -> float32 [n_mat, n]: mean squared activation of each column.

        An expert that saw no token gets the mean over the tensor's other experts; an entry without any data is left out.
        """
        return {name: _means(sums, counts) for name, (sums, counts) in self.entries.items() if counts.any()}

    def starved(self) -> dict[str, list[int]]:
        """name -> experts that saw no token, for the entries that have such."""
        idle = {name: np.flatnonzero(counts == 0).tolist() for name, (_, counts) in self.entries.items()}
        return {name: experts for name, experts in idle.items() if experts}

    def merge(self, other: Imatrix) -> Imatrix:
        """Sums and counts of both added up. Raises MillError when an entry of the same name has another shape."""
        merged = dict(self.entries)
        for name, (sums, counts) in other.entries.items():
            if name not in merged:
                merged[name] = (sums, counts)
                continue
            matrices = max(len(merged[name][1]), len(counts))
            mine, seen = _unstacked(merged[name], matrices)
            theirs, their_seen = _unstacked((sums, counts), matrices)
            if mine.shape != theirs.shape:
                shapes = f"{mine.shape} in one file and {theirs.shape} in the other"
                raise MillError(f"imatrix entry {name} is {shapes}: not one model")
            merged[name] = (mine + theirs, seen + their_seen)
        datasets = list(dict.fromkeys([*self.datasets, *other.datasets]))
        return Imatrix(merged, datasets, self.chunk_count + other.chunk_count, self.chunk_size)

    def metadata(self, file: str) -> dict[str, Any]:
        """The quantize.imatrix.* keys that llama-quantize writes (FORMATS E.8)."""
        keys: dict[str, Any] = {"quantize.imatrix.file": file}
        if self.datasets:
            keys["quantize.imatrix.dataset"] = ", ".join(self.datasets)
        keys["quantize.imatrix.entries_count"] = np.int32(len(self.entries))
        if self.chunk_count:
            keys["quantize.imatrix.chunks_count"] = np.int32(self.chunk_count)
        return keys

    def fit(self, source: TensorSource, where: str) -> Imatrix:
        """This imatrix with its entries shaped for that model.

        A legacy file keeps all experts of a stack in one row. attn_k_b and attn_v_b are one matrix or one per head, by the
        model's layout: what was collected for one is pooled, or shared, for the other.

        Raises MillError if it cannot be of that model: no common tensor, wrong widths, NaN, or negative sums.
        """
        common = [name for name in self.entries if name in source.tensors]
        if not common:
            raise MillError(
                f"{where}: none of its {len(self.entries)} entries names a tensor of {source.path}: of another model"
            )
        fitted = dict(self.entries)
        for name in common:
            columns, _, matrices = dims(source.tensors[name].shape)
            sums, counts = _unstacked(self.entries[name], matrices)
            if sums.shape == (1, columns):
                sums, counts = np.repeat(sums, matrices, axis=0), np.repeat(counts, matrices)
            elif matrices == 1 and sums.shape[1] == columns:
                sums, counts = sums.sum(axis=0, keepdims=True), counts.sum(keepdims=True)
            fitted[name] = (sums, counts)
            if sums.shape != (matrices, columns):
                raise MillError(
                    f"{where}: entry {name} is {sums.shape[0]} x {sums.shape[1]}, the tensor needs {matrices} x {columns}: "
                    "of another model"
                )
            if not (np.isfinite(sums).all() and (sums >= 0).all()):
                raise MillError(f"{where}: entry {name} holds NaN, infinite or negative sums; compute it again")
        return Imatrix(fitted, self.datasets, self.chunk_count, self.chunk_size)


def _unstacked(entry: Entry, matrices: int) -> Entry:
    """An entry of one row that holds `matrices` matrices side by side as a row per matrix; any other as it is."""
    sums, counts = entry
    if len(counts) > 1 or matrices == 1 or sums.shape[1] % matrices:
        return entry
    return sums.reshape(matrices, -1), np.repeat(counts, matrices)


def _means(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    seen = counts > 0
    means = np.zeros(sums.shape, np.float32)
    means[seen] = sums[seen] / counts[seen, None]
    means[~seen] = means[seen].mean(axis=0)
    return means


def coverage(imatrix: Imatrix, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """(tensors of `names` with data, those without)."""
    have = {name for name, (_, counts) in imatrix.entries.items() if counts.any()}
    return [n for n in names if n in have], [n for n in names if n not in have]
