"""From the factors of a folder of peft, by module, to changes of the GGUF's tensors, in the order of rows that these have.

Where the elements of a converted tensor come from is found by a transform of `tensor_transforms`, applied to weights whose
elements are their own row or column numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from pathlib import Path

import numpy as np

from ...data_classes import dataclass
from ...errors import FormatError
from ..model_spec import ModelSpec, TensorSpec
from ..quantization.stored_weights import Rows, StoredWeight
from .adapter import Adapter
from .low_rank import LowRank
from .peft_folder import PeftFactors, PeftFolder


@dataclass(frozen=True)
class IndexMap:
    """Where a run of rows of a converted matrix comes from.

    start       its first row
    rows        int64: of the sources' rows, counted through all sources, those that its rows (its columns, if transposed) are
    columns     int64: the sources' columns that its columns (its rows) are
    """

    start: int
    rows: np.ndarray
    columns: np.ndarray
    transposed: bool


class _Numbers(StoredWeight):
    """A weight of which each element is the number of its row, from `first` on, or of its column."""

    def __init__(self, shape: tuple[int, ...], first: int | None):
        self.shape, self.source_type, self.ggml_type = shape, "f32", None
        self.rows, self.columns = int(np.prod(shape[:-1])), shape[-1]
        self._first = first

    @property
    def has_read_bf16(self) -> bool:
        return False

    def read(self, rows: Rows) -> np.ndarray:
        numbers = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else np.asarray(rows)
        if self._first is None:
            return np.broadcast_to(np.arange(self.columns, dtype=np.float64), (len(numbers), self.columns))
        return np.broadcast_to((self._first + numbers.astype(np.float64))[:, None], (len(numbers), self.columns))


def index_maps(spec: TensorSpec) -> list[list[IndexMap]] | None:
    """For each matrix of the tensor that a spec makes of matrices, where it comes from: one run of rows, or several
    (attn_k_b of all heads, each transposed). None where its elements are not whole rows or columns of the sources'."""
    rows_per_source = int(np.prod(spec.shape[:-1]))
    by_row = spec.transform(spec.name, [_Numbers(spec.shape, i * rows_per_source) for i in range(len(spec.sources))])
    by_column = spec.transform(spec.name, [_Numbers(spec.shape, None) for _ in spec.sources])
    maps, height = [], by_row.shape[1] if len(by_row.shape) > 1 else 1  # a vector that was a matrix of one row
    for first in range(0, by_row.n_rows, height):
        rows, columns = by_row.read(first, first + height), by_column.read(first, first + height)
        whole = _map(rows, columns, 0)
        if whole is not None:
            maps.append([whole])
            continue
        starts = [0, *(np.flatnonzero(rows[1:, 0] != rows[:-1, 0]) + 1).tolist()]
        runs = [_map(rows[a:b], columns[a:b], a) for a, b in pairwise([*starts, height])]
        if None in runs:
            return None
        maps.append(runs)
    return maps


def _map(rows: np.ndarray, columns: np.ndarray, start: int) -> IndexMap | None:
    """Numbers of the rows and columns that the elements of a run are -> its map. A few lines of each are compared."""
    across, down = (np.array([0, n // 2, n - 1]) for n in (rows.shape[1], rows.shape[0]))
    for transposed in (False, True):
        if transposed:
            rows, columns, across, down = rows.T, columns.T, down, across
        from_rows, from_columns = rows[:, across].T, columns[down]
        if (from_rows == from_rows[0]).all() and (from_columns == from_columns[0]).all():
            return IndexMap(start, from_rows[0].astype(np.int64), from_columns[0].astype(np.int64), transposed)
    return None


EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"
# parts of modules' names in transformers 5, which peft takes, and what checkpoints of some models have instead
STORED_NAMES = (
    (".mlp.router", ".block_sparse_moe.gate"),
    (".mlp.", ".block_sparse_moe."),
    (".mlp.gate", ".mlp.router.gate"),
    (".mlp.shared_experts.", ".mlp.shared_expert."),
    (".mlp.shared_experts.", ".mlp.shared_mlp."),
    (".self_attn.forget_gate.", ".self_attn."),
)
_Factors = tuple[np.ndarray, np.ndarray]  # a [rank, columns] and b [rows, rank]
_EXPERT_PARAMETER = ".base_layer"  # what peft puts between a module and the factors of one of several of its parameters


def adapter_of_folder(folder: PeftFolder, model: ModelSpec, scale: float = 1.0) -> Adapter:
    """The adapter's changes of the tensors of a model, each times `scale`.

    Raises FormatError for modules that the model does not have, factors of another shape, and changes that the GGUF's tensors
    cannot take.
    """
    known = _modules(model)
    modules = {_renamed(name, model, known): factors for name, factors in folder.factors.items()}
    changes: dict[str, LowRank] = {}
    used: set[str] = set()
    for spec in model.tensors:
        at: TensorSpec | None = spec
        while at is not None:
            sources = [_change_of_source(folder, at, name, modules, used) for name in at.sources]
            if any(source is not None for source in sources):
                changes[spec.name] = _converted(folder.path, at, sources, scale)
                break
            at = at.alternative
    notes = _check_unused(folder.path, model, [name for name in modules if name not in used])
    check_tied(folder.path, changes, {spec.name for spec in model.tensors})
    return Adapter(str(folder.path), model.architecture, folder.alpha, changes, folder.source_type, folder.files, tuple(notes))


def check_tied(path: Path | str, changes: Mapping[str, LowRank], tensors: set[str]) -> None:
    """Raises FormatError for a change of embeddings that serve as output too: it would change both."""
    if EMBEDDING in changes and OUTPUT not in tensors:
        raise FormatError(f"{path}: changes the embeddings, which this model's output shares: a GGUF has one tensor for both")


def _modules(model: ModelSpec) -> set[str]:
    """The names of the modules that the model's tensors, or stacks of them, are parameters of."""
    names: set[str] = set()
    for spec in model.tensors:
        at: TensorSpec | None = spec
        while at is not None:
            for source in at.sources:
                names |= {source.removesuffix(".weight"), source.rpartition(".")[0]}
            at = at.alternative
    return names


def _renamed(name: str, model: ModelSpec, known: set[str]) -> str:
    """A module's name as the model's tensors begin with it."""
    prefixes = model.renamed_prefixes
    prefix = next((p for p in prefixes if f"{name}.".startswith(p)), "")
    name = (prefixes.get(prefix, "") + f"{name}.".removeprefix(prefix)).removesuffix(".")
    names = [name, *(name.replace(ours, stored) for ours, stored in STORED_NAMES if ours in name)]
    return next((n for n in names if n.replace(_EXPERT_PARAMETER, "") in known), name)


def _change_of_source(
    folder: PeftFolder, spec: TensorSpec, source: str, modules: Mapping[str, PeftFactors], used: set[str]
) -> LowRank | None:
    """The change of one stored weight (or stack of weights), None if the adapter has none. Raises FormatError for shapes that
    do not fit."""
    module = source.removesuffix(".weight")
    factors = modules.get(module)
    if factors is None and len(spec.shape) == 3:
        return _change_of_stack(folder, spec, source, modules, used)
    if factors is None:
        return None
    used.add(module)
    a, b = (factors.b.T, factors.a.T) if factors.transposed else (factors.a, factors.b)
    if len(spec.shape) != 2 or (b.shape[0], a.shape[1]) != spec.shape:
        raise FormatError(f"{folder.path}: {module} changes {b.shape[0]} x {a.shape[1]}, the model has {list(spec.shape)}")
    return LowRank(a[None], b[None], folder.scale(factors, source))


def _change_of_stack(
    folder: PeftFolder, spec: TensorSpec, source: str, modules: Mapping[str, PeftFactors], used: set[str]
) -> LowRank | None:
    """The change of a stack of experts that is one parameter of a module (target_parameters of peft). The factors of several
    parameters of a module differ in their shapes only; square matrices are taken as [outputs, inputs]. Experts beyond those
    that are stored have no matrices that count (LongCat-Flash's, which return their input)."""
    module, (n, first, second) = source.rpartition(".")[0], spec.shape
    for name, factors in modules.items():
        inputs, outputs = factors.a.shape[1], factors.b.shape[0]
        if name.replace(_EXPERT_PARAMETER, "") != module or {inputs, outputs} != {first, second}:
            continue
        experts = folder.experts(factors, source)
        if experts < n:
            raise FormatError(f"{folder.path}: {name} has {len(factors.a)} rows of lora_A, which do not fit {n} experts")
        a = factors.a.reshape(experts, -1, inputs)[:n]
        b = factors.b.reshape(outputs, -1, experts).transpose(2, 0, 1)[:n]
        used.add(name)
        if (outputs, inputs) != (first, second):  # stored as [inputs, outputs]
            a, b = b.transpose(0, 2, 1), a.transpose(0, 2, 1)
        scale = folder.scale(factors, source, experts)
        return LowRank(np.ascontiguousarray(a), np.ascontiguousarray(b), scale)
    return None


def _converted(path: Path, spec: TensorSpec, sources: Sequence[LowRank | None], scale: float) -> LowRank:
    """The change of the converted tensor: the sources' factors with rows and columns in its order."""
    maps = index_maps(spec) if len(spec.shape) > 1 else None
    if maps is None:
        raise FormatError(f"{path}: a change of {spec.sources[0]} cannot be converted to {spec.name}; merge it with peft first")
    first = max((source for source in sources if source is not None), key=lambda source: abs(source.scale))
    per_source, height = prod(spec.shape[:-2]), prod(spec.shape[-2:-1])
    blocks: dict[int, _Factors] = {}  # by the number of a matrix of the sources
    for i, source in enumerate(sources):
        if source is not None:
            scaled = source.with_scale(first.scale)
            blocks |= {i * per_source + m: (scaled.a[m], scaled.b[m]) for m in range(source.matrices)}
    parts = [_side_by_side([(run.start, *_run(run, height, blocks)) for run in runs]) for runs in maps]
    return _stacked(parts, first.scale * scale)


def _run(run: IndexMap, height: int, blocks: Mapping[int, _Factors]) -> _Factors:
    """Factors of a run of rows. height: rows of each of the sources' matrices; blocks: number of a matrix -> its factors."""
    numbers = run.rows // height
    taken = [number for number in dict.fromkeys(numbers.tolist()) if number in blocks]
    a = [blocks[number][0][:, run.columns] for number in taken]
    b = [np.where((numbers == number)[:, None], blocks[number][1][run.rows % height], 0) for number in taken]
    joined_a = np.concatenate([np.zeros((0, len(run.columns)), np.float32), *a])
    joined_b = np.concatenate([np.zeros((len(run.rows), 0), np.float32), *b], 1)
    return (joined_b.T, joined_a.T) if run.transposed else (joined_a, joined_b)


def _side_by_side(runs: Sequence[tuple[int, np.ndarray, np.ndarray]]) -> _Factors:
    """(first row, a, b) of runs of a matrix's rows -> factors of the matrix."""
    a = np.concatenate([a for _, a, _ in runs])
    b, at = np.zeros((runs[-1][0] + len(runs[-1][2]), len(a)), np.float32), 0
    for first, part_a, part_b in runs:
        b[first : first + len(part_b), at : at + len(part_a)] = part_b
        at += len(part_a)
    return a, b


def _stacked(parts: Sequence[_Factors], scale: float) -> LowRank:
    """Factors of several matrices as one change; those of a lower rank get zeros."""
    rank = max(len(a) for a, _ in parts)
    a = np.zeros((len(parts), rank, parts[0][0].shape[1]), np.float32)
    b = np.zeros((len(parts), parts[0][1].shape[0], rank), np.float32)
    for i, (part_a, part_b) in enumerate(parts):
        a[i, : len(part_a)], b[i, :, : len(part_a)] = part_a, part_b
    return LowRank(a, b, scale)


def _check_unused(path: Path, model: ModelSpec, unused: Sequence[str]) -> list[str]:
    """Notes on modules that conversion leaves out. Raises FormatError for those that the model does not have."""
    counts: dict[str, int] = {}
    unknown = []
    for name in unused:
        what = next((text for prefix, text in model.skipped_prefixes.items() if f"{name}.weight".startswith(prefix)), None)
        if what is None or name == "lm_head":
            unknown.append(name)
        else:
            counts[what] = counts.get(what, 0) + 1
    if "lm_head" in unknown and any(name.startswith("lm_head") for name in model.skipped_prefixes):
        raise FormatError(f"{path}: changes lm_head, which shares the embeddings in this model: a GGUF has one tensor for both")
    if unknown:
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        raise FormatError(f"{path}: changes what the model does not have: {', '.join(unknown[:3])}{more}")
    return [f"{path}: {n} changes left out ({what})" for what, n in counts.items()]
