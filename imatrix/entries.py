"""An importance matrix: for each tensor the sum of squared activations per column, and how many were summed.

An entry holds a row per matrix: one for a plain weight, one per expert for an expert stack.

A few tokens say little about an expert, and none nothing. So the mean that quantisation gets is, for an expert with n < FEW
tokens, that of its own tokens and FEW - n more that are as the tensor's mean over its other experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..formats import MillError, TensorSource, dims
from ..jobs.atomic_write import write_bytes
from .write import dat_bytes, gguf_bytes

Entry = tuple[np.ndarray, np.ndarray]

FEW = 32  # tokens
_PER_HEAD = ("attn_k_b.weight", "attn_v_b.weight")  # one matrix in one layout, one per head in another
LEGACY_CHUNK = 512  # tokens of a window, where a file does not say
EMBEDDINGS = "token_embd.weight"

# Expert stacks that are stored apart or as one take each other's data (FORMATS E.5): entry -> the tensor it may be for.
_STANDS_FOR = {"ffn_up_exps.weight": "ffn_gate_up_exps.weight", "ffn_gate_up_exps.weight": "ffn_up_exps.weight"}


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
        path = Path(path)
        if path.suffix == ".dat":
            data = dat_bytes(self.means(), self.datasets, self.chunk_count)
        else:
            data = gguf_bytes(self.entries, self.datasets, self.chunk_count, self.chunk_size)
        write_bytes(path, data)

    def means(self) -> dict[str, np.ndarray]:
        """name -> float32 [n_mat, n]: mean squared activation of each column.

        An expert that saw few tokens or none is filled up with the mean over the tensor's other experts; an entry without any
        data is left out.
        """
        return {name: _means(sums, counts) for name, (sums, counts) in self.entries.items() if has_data(sums, counts)}

    def starved(self) -> dict[str, list[int]]:
        """name -> experts that saw no token, for the entries that have such."""
        return self._experts(lambda counts: counts == 0)

    def sparse(self) -> dict[str, list[int]]:
        """name -> experts that saw some tokens, but fewer than FEW."""
        return self._experts(lambda counts: (counts > 0) & (counts < FEW))

    def _experts(self, which: Callable[[np.ndarray], np.ndarray]) -> dict[str, list[int]]:
        stacks = ((name, counts) for name, (_, counts) in self.entries.items() if len(counts) > 1 or not counts.any())
        found = {name: np.flatnonzero(which(counts)).tolist() for name, counts in stacks}
        return {name: experts for name, experts in found.items() if experts}

    def merge(self, *others: Imatrix) -> Imatrix:
        """Sums and counts of all added up, rounded once at the end.

        Raises MillError when an entry of the same name has another shape, or a file has no entry of the others' names.
        """
        parts: dict[str, list[Entry]] = {name: [entry] for name, entry in self.entries.items()}
        for other in others:
            if parts and other.entries and not parts.keys() & other.entries.keys():
                mine, theirs = next(iter(parts)), next(iter(other.entries))
                raise MillError(f"imatrix files without an entry in common ({mine}, ...; {theirs}, ...): not of one model")
            for name, entry in other.entries.items():
                parts.setdefault(name, []).append(entry)
        chunks = sum(part.chunk_count for part in (self, *others))
        datasets = list(dict.fromkeys(name for part in (self, *others) for name in part.datasets))
        return Imatrix({name: _added(name, entries) for name, entries in parts.items()}, datasets, chunks, self.chunk_size)

    def losses(self, suffix: str) -> list[str]:
        """What a file of that kind ('.dat', or any other for GGUF) does not keep of this, for people to read."""
        if suffix != ".dat":
            return []
        stacks = [name for name, (_, counts) in self.entries.items() if len(counts) > 1]
        lost = [f"how many tokens each expert of {len(stacks)} stacks saw: a later merge weighs all alike"] if stacks else []
        filled = sum(map(len, [*self.starved().values(), *self.sparse().values()]))
        if filled:
            lost.append(f"that {filled} experts with fewer than {FEW} tokens were filled up with the mean of the others")
        without = [name for name, (sums, counts) in self.entries.items() if not has_data(sums, counts)]
        if without:
            lost.append(f"{len(without)} entries without data, such as {without[0]}")
        if self.chunk_size != LEGACY_CHUNK:
            lost.append(f"the window of {self.chunk_size} tokens: readers assume {LEGACY_CHUNK}")
        if len(self.datasets) > 1:
            lost.append(f"that its {len(self.datasets)} texts are several: their names become one")
        return lost

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

        Raises MillError if it cannot be of that model: no common tensor, wrong widths; or for a `problem`.
        """
        wanted = {name: source.tensors.get(name) or source.tensors.get(_other_name(name)) for name in self.entries}
        if not any(wanted.values()):
            raise MillError(
                f"{where}: none of its {len(self.entries)} entries ({next(iter(self.entries), '')}, ...) names a tensor of "
                f"{source.path}: of another model, or of a program with other names"
            )
        fitted = dict(self.entries)
        for name, tensor in wanted.items():
            if tensor is None:
                continue
            columns, _, matrices = dims(tensor.shape)
            sums, counts = self.entries[name]
            if sums.shape != (1, columns):
                sums, counts = _unstacked((sums, counts), matrices)
            if sums.shape == (1, columns):
                sums, counts = np.repeat(sums, matrices, axis=0), np.repeat(counts, matrices)
            elif matrices == 1 and name.endswith(_PER_HEAD) and sums.shape[1] % columns == 0:
                sums, counts = _pooled((sums, counts), columns)
            elif matrices == 1 and sums.shape[1] == columns:
                sums, counts = sums.sum(axis=0, keepdims=True), counts.sum(keepdims=True)
            if sums.shape != (matrices, columns):
                if name == EMBEDDINGS:  # some tools wrote data of the output matrix under this name
                    del fitted[name]
                    continue
                raise MillError(
                    f"{where}: entry {name} is {sums.shape[0]} x {sums.shape[1]}, the tensor needs {matrices} x {columns}: "
                    "of another model"
                )
            fitted[name] = (sums, counts)
        fit = Imatrix(fitted, self.datasets, self.chunk_count, self.chunk_size)
        problem = fit.problem()
        if problem is not None:
            raise MillError(f"{where}: {problem}")
        return fit

    def problem(self) -> str | None:
        """What makes this useless: NaN, infinite or negative sums, negative counts, no count above zero; or None."""
        for name, (sums, counts) in self.entries.items():
            if not (np.isfinite(sums).all() and (sums >= 0).all()):
                return f"entry {name} holds NaN, infinite or negative sums; compute it again"
            if (counts < 0).any():
                return f"entry {name} holds negative counts; compute it again"
        if self.entries and not any(counts.any() for _, counts in self.entries.values()):
            return "every count is zero: it was written before any text was read; compute it again"
        return None


def has_data(sums: np.ndarray, counts: np.ndarray) -> bool:
    """Whether anything was seen, and was not zero throughout."""
    return bool(counts.any() and sums.any())


def _other_name(name: str) -> str:
    for part, other in _STANDS_FOR.items():
        if name.endswith("." + part):
            return name.removesuffix(part) + other
    return name


def _added(name: str, entries: list[Entry]) -> Entry:
    if len(entries) == 1:
        return entries[0]
    matrices = max(len(counts) for _, counts in entries)
    rows = [_unstacked(entry, matrices) for entry in entries]
    shapes = {sums.shape for sums, _ in rows}
    columns = min(sums.shape[1] for sums, _ in entries)
    if len(shapes) > 1 and name.endswith(_PER_HEAD) and all(sums.shape[1] % columns == 0 for sums, _ in entries):
        rows = [_pooled(entry, columns) for entry in entries]  # of models in different layouts
    elif len(shapes) > 1:
        raise MillError(
            f"imatrix entry {name} is {' in one file and '.join(map(str, sorted(shapes)))} in another: not one model"
        )
    sums = np.sum([sums.astype(np.float64) for sums, _ in rows], axis=0)
    return sums.astype(np.float32), np.sum([counts for _, counts in rows], axis=0)


def _unstacked(entry: Entry, matrices: int) -> Entry:
    """An entry of one row that holds `matrices` matrices side by side as a row per matrix; any other as it is."""
    sums, counts = entry
    if len(counts) > 1 or matrices == 1 or sums.shape[1] % matrices:
        return entry
    return sums.reshape(matrices, -1), np.repeat(counts, matrices)


def _pooled(entry: Entry, columns: int) -> Entry:
    """An entry of heads that lie beside or below each other as one of the matrix that they share."""
    sums, counts = entry
    rows = sums.reshape(-1, columns)
    return rows.sum(axis=0, keepdims=True), np.repeat(counts, len(rows) // len(counts)).sum(keepdims=True)


def _means(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    total, seen = sums.sum(axis=0, dtype=np.float64), int(counts.sum())
    means = sums / np.maximum(counts, 1)[:, None]
    for expert in np.flatnonzero(counts < FEW):
        n = int(counts[expert])
        if seen > n:
            others = np.maximum(total - sums[expert], 0) / (seen - n)
            means[expert] = (sums[expert] + (FEW - n) * others) / FEW
    return means.astype(np.float32)
