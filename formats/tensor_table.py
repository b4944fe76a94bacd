"""The tensors of files in columns: a file may have a million, and an object for each would take gigabytes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence, ValuesView
from dataclasses import field
from math import prod
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from ..data_classes import dataclass
from ..errors import FormatError
from .file_range import check_file_size, read_range
from .types import TensorType

Known = TypeVar("Known")
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of a GGUF file.

    shape   in ne order: shape[0] is the row length
    offset  of its first byte from the start of its file; nbytes: its exact size
    path    the file, for a split model its shard
    """

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int
    nbytes: int
    path: Path
    _map: np.ndarray | None = field(repr=False, compare=False)

    @property
    def n_rows(self) -> int:
        """Rows of all matrices."""
        return prod(self.shape[1:])

    @property
    def data(self) -> np.ndarray:
        """uint8 view [rows, row_bytes] of the mapped file, read as it is accessed; a copy if the file is not mapped.

        Raises FormatError if the file has become shorter; it must not become shorter while the view is in use.
        """
        check_file_size(self.path, self.offset + self.nbytes)
        mapped = self.mapped
        return self.read(0, self.n_rows) if mapped is None else mapped

    @property
    def mapped(self) -> np.ndarray | None:
        """The view that `data` is, without a look at the file's size now; None where the file is not mapped."""
        if self._map is None:
            return None
        flat = self._map[self.offset : self.offset + self.nbytes]
        return flat.reshape(self.n_rows, -1) if self.type.is_known else flat.reshape(1, -1)

    def read(self, start: int, stop: int) -> np.ndarray:
        """data[start:stop] as a copy: uint8 [stop - start, row_bytes]. Raises FormatError."""
        row_bytes = self.type.row_bytes(self.shape[0])
        data = read_range(self.path, self.offset + start * row_bytes, (stop - start) * row_bytes)
        return data.reshape(stop - start, row_bytes)


class TensorKind(NamedTuple):
    """What many tensors have in common; nbytes: -1 for an unknown type, whose tensors end where the next ones begin."""

    shape: tuple[int, ...]
    type: TensorType
    nbytes: int


@dataclass(frozen=True)
class FileTensors:
    """The tensors of one GGUF file: names, kinds, offsets and sizes in bytes (int64); the file, if it is mapped; the
    number of bytes before the first tensor."""

    path: Path
    mapped: np.ndarray | None
    header_bytes: int
    names: Sequence[str]
    kinds: Sequence[TensorKind]
    offsets: np.ndarray
    nbytes: np.ndarray


class MadeOnDemand(Mapping[str, Made], Generic[Known, Made]):
    """Name -> what `make` makes of the entry of that name, each time that it is asked for; `|` makes a dict of all.

    Values and items are made in their order without looking each name up.
    """

    def __init__(self, known: Mapping[str, Known], make: Callable[[Known], Made]):
        self._known, self._make = known, make

    def __getitem__(self, name: str) -> Made:
        return self._make(self._known[name])

    def values(self) -> ValuesView[Made]:
        return _Values(self)

    def items(self) -> ItemsView[str, Made]:
        return _Items(self)

    def make_all(self) -> Iterator[Made]:
        """All values, one after another."""
        return map(self._make, self._known.values())

    def __contains__(self, name: object) -> bool:
        return name in self._known

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __or__(self, other: Mapping[str, Made]) -> dict[str, Made]:
        return {**self, **other}

    def __len__(self) -> int:
        return len(self._known)


class _Values(ValuesView[Made]):
    _mapping: MadeOnDemand[Any, Made]

    def __iter__(self) -> Iterator[Made]:
        return self._mapping.make_all()


class _Items(ItemsView[str, Made]):
    _mapping: MadeOnDemand[Any, Made]

    def __iter__(self) -> Iterator[tuple[str, Made]]:
        return zip(self._mapping, self._mapping.make_all(), strict=True)


class TensorColumns(Protocol):
    """The tensors of a file in columns; names: all of them, in its order."""

    @property
    def path(self) -> Path: ...

    @property
    def names(self) -> Sequence[str]: ...


File = TypeVar("File", bound=TensorColumns)


class TensorTable(MadeOnDemand[int, Made], Generic[File, Made]):
    """Name -> tensor of one or several files, in their order; made of its file and its place there when it is asked for.

    Raises FormatError for a tensor that is in two files.
    """

    def __init__(self, files: Sequence[File], make: Callable[[File, int], Made]):
        self.files, self._make_at = files, make
        self._starts = [0]
        rows: dict[str, int] = {}
        for file in files:
            first = self._starts[-1]
            self._starts.append(first + len(file.names))
            rows.update(zip(file.names, range(first, self._starts[-1]), strict=True))
            if len(rows) < self._starts[-1]:
                raise self._duplicate()
        super().__init__(rows, self._made)

    def make_all(self) -> Iterator[Made]:
        return (tensor for file in self.files for tensor in self.make_file(file.path))

    def make_file(self, path: Path) -> Iterator[Made]:
        """The tensors of one of the files."""
        return (self._make_at(file, at) for file in self.files if file.path == path for at in range(len(file.names)))

    def _made(self, row: int) -> Made:
        number = bisect_right(self._starts, row) - 1
        return self._make_at(self.files[number], row - self._starts[number])

    def _duplicate(self) -> FormatError:
        first: dict[str, Path] = {}
        for file in self.files:
            for name in file.names:
                if name in first:
                    return FormatError(f"{file.path}: tensor {name} is also in {first[name].name}")
                first[name] = file.path
        raise AssertionError("each name occurs once")


def tensor_table(files: Sequence[FileTensors]) -> TensorTable[FileTensors, TensorInfo]:
    """The tensors of GGUF files, name -> tensor. Raises FormatError for a tensor that is in two files."""
    return TensorTable(files, _tensor_info)


def _tensor_info(file: FileTensors, at: int) -> TensorInfo:
    kind = file.kinds[at]
    offset, nbytes = file.offsets.item(at), file.nbytes.item(at)
    return TensorInfo(file.names[at], kind.shape, kind.type, offset, nbytes, file.path, file.mapped)
