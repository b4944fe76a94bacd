"""The tensors of a plan, and where they go, in columns."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import field
from itertools import compress
from math import prod
from typing import NamedTuple

import numpy as np

from ..data_classes import dataclass
from ..formats.lazy_sequence import LazySequence
from ..formats.source import TensorScale
from ..formats.types import TensorType

Produce = Callable[[int, int], np.ndarray]


class OutputKind(NamedTuple):
    """What many outputs have in common, as `Output` has it."""

    shape: tuple[int, ...]
    source_type: str
    type: TensorType
    rule: str
    note: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of the encoded tensor."""
        return self.type.nbytes(self.shape)

    @property
    def n_elements(self) -> int:
        """Weights of the tensor."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Output:
    """One tensor to be written: what it becomes, why, and how its bytes are made.

    name         in the GGUF
    shape        in ne order: shape[0] is the row length
    source_type  what it is made from: a ggml type name, or a float format such as 'f8_e4m3'
    type         what it becomes
    rule         what chose the type: a recipe line, a flag, 'kept', ...
    produce      (start, stop) -> uint8 [stop - start, row_bytes], the encoded rows; rows count through shape[1:], flattened.
                 It is called for runs that cross no matrix and, for an interleaved type, hold complete groups of rows
    note         the fallback that was taken, or why there is no importance; '' if there is nothing to say
    scale        factors that the encoded rows lack; they are outputs of their own (see quantize.tensor_scale)
    cuts         the rows of a matrix where runs begin that are made together; (): any run of rows
    """

    name: str
    shape: tuple[int, ...]
    source_type: str
    type: TensorType
    rule: str
    produce: Produce = field(repr=False, compare=False)
    note: str = ""
    scale: TensorScale | None = field(default=None, repr=False, compare=False)
    cuts: tuple[int, ...] = field(default=(), repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the encoded tensor."""
        return self.type.nbytes(self.shape)

    @property
    def n_elements(self) -> int:
        """Weights of the tensor."""
        return prod(self.shape)


class Outputs(LazySequence[Output]):
    """Tensors to be written, in file order.

    names   of all
    kinds   in the order of their first tensors
    """

    def __init__(self, produce: Callable[[str, OutputKind], Produce] | None = None):
        """produce: makes what the tensors that are added without one are made by, when they are asked for."""
        self.names: list[str] = []
        self.kinds: list[OutputKind] = []
        self._produce = produce
        self._kind_of = array("I")  # index into kinds
        self._numbers: dict[tuple[object, ...], int] = {}  # of kinds
        self._own: dict[int, Output] = {}  # those with a `produce` of their own

    @classmethod
    def of(cls, outputs: Iterable[Output]) -> Outputs:
        """The same outputs in columns."""
        if isinstance(outputs, cls):
            return outputs
        columns = cls()
        for output in outputs:
            columns.append(output)
        return columns

    def add(self, name: str, kind: OutputKind) -> None:
        """A tensor whose rows are made by what `produce` gives."""
        self.names.append(name)
        self._kind_of.append(self.number(kind))

    def extend(self, names: Sequence[str], numbers: np.ndarray) -> None:
        """Tensors as `add` takes them. numbers: of their kinds, uint32 [n]."""
        self.names += names
        self._kind_of.frombytes(numbers.tobytes())

    def number(self, kind: OutputKind) -> int:
        """The index of a kind in `kinds`, at whose end it comes if it is not there yet."""
        key = (kind.shape, kind.source_type, kind.type.name, kind.rule, kind.note)
        number = self._numbers.setdefault(key, len(self.kinds))
        if number == len(self.kinds):
            self.kinds.append(kind)
        return number

    def append(self, output: Output) -> None:
        """A tensor with a `produce` of its own."""
        self._own[len(self.names)] = output
        self.add(output.name, OutputKind(output.shape, output.source_type, output.type, output.rule, output.note))

    def entries(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[str, OutputKind]]:
        """Name and kind of each."""
        return zip(self.names[start:stop], map(self.kinds.__getitem__, self._kind_of[start:stop]), strict=True)

    def counts(self) -> list[tuple[OutputKind, int]]:
        """Each kind with its number of tensors."""
        counts = np.bincount(np.frombuffer(self._kind_of, np.uint32), minlength=len(self.kinds)) if self.names else ()
        return list(zip(self.kinds, map(int, counts), strict=True))

    @property
    def total_bytes(self) -> int:
        """Bytes of tensor data, without padding."""
        return sum(kind.nbytes * n for kind, n in self.counts())

    @property
    def bits_per_weight(self) -> float:
        """Average over all elements, without padding."""
        elements = sum(kind.n_elements * n for kind, n in self.counts())
        return self.total_bytes * 8 / elements if elements else 0.0

    def first_of_kinds(self) -> list[int]:
        """The number of the first tensor of each kind."""
        return np.unique(np.frombuffer(self._kind_of, np.uint32), return_index=True)[1].tolist() if self.names else []

    def of_kinds(self, holds: Callable[[OutputKind], object]) -> Iterator[tuple[str, OutputKind]]:
        """Name and kind of the tensors whose kind `holds` is true of."""
        holding = [bool(holds(kind)) for kind in self.kinds]
        if any(holding):
            yield from compress(self.entries(), map(holding.__getitem__, self._kind_of))

    def each(self, value: Callable[[OutputKind], int]) -> np.ndarray:
        """A number of each tensor's kind, int64 [n]."""
        if not self.names:
            return np.empty(0, np.int64)
        return np.array([value(kind) for kind in self.kinds], np.int64)[np.frombuffer(self._kind_of, np.uint32)]

    def with_own(self) -> Iterator[Output]:
        """Those that were given with a `produce` of their own, such as all that have factors."""
        return iter(self._own.values())

    def take(self, indexes: np.ndarray) -> Outputs:
        """The outputs at these places, int64 [n], ascending."""
        taken = Outputs(self._produce)
        for i in indexes.tolist():
            if i in self._own:
                taken.append(self._own[i])
            else:
                taken.add(self.names[i], self.kinds[self._kind_of[i]])
        return taken

    def item(self, number: int) -> Output:
        own = self._own.get(number)
        if own is not None:
            return own
        assert self._produce is not None, "every output has a `produce`"
        name, kind = self.names[number], self.kinds[self._kind_of[number]]
        return Output(name, kind.shape, kind.source_type, kind.type, kind.rule, self._produce(name, kind), kind.note)

    def __len__(self) -> int:
        return len(self.names)

    def __eq__(self, other: object) -> bool:
        """As lists of outputs: equal in all but how their bytes are made."""
        if not isinstance(other, Sequence) or len(other) != len(self):
            return NotImplemented
        return all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # pyright: ignore[reportAssignmentType]


@dataclass(frozen=True, slots=True)
class Location:
    """Where a tensor goes: the index of its file in the plan, and the byte offset from that file's start."""

    file: int
    offset: int


class Locations(LazySequence[Location]):
    """Where the outputs of a plan lie. files: index of each one's file, int64 [n]; offsets: bytes from its start, int64 [n]."""

    def __init__(self, files: np.ndarray, offsets: np.ndarray):
        self.files, self.offsets = files, offsets

    def item(self, number: int) -> Location:
        return Location(self.files.item(number), self.offsets.item(number))

    def __len__(self) -> int:
        return len(self.files)
