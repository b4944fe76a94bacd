"""The interface of tensor sources: what quantize, imatrix and the runtime read models through, whatever files it comes from.

`convert.open_source` makes one of a GGUF, of a Hugging Face checkpoint folder, or of a repository on the hub.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from functools import cached_property, lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..data_classes import dataclass
from ..errors import FormatError, PlanError
from .deleted_shards import read_record
from .types import TensorType

if TYPE_CHECKING:
    from .deleted_shards import DeletableShard

LORA_A, LORA_B = ".lora_a", ".lora_b"  # what the names of an adapter's factors end with, after the changed tensor's whole name
_NUMBER = re.compile(r"\.\d+(?=\.)")


@lru_cache(1024)  # a group's first is looked at by many plans
def form_of(name: str) -> str:
    """The name with 0 for each number between dots: 'blk.3.ffn_up.12.weight' -> 'blk.0.ffn_up.0.weight'. A model may have a
    million names, and has few forms."""
    return _NUMBER.sub(".0", name)


def files_stamp(files: Iterable[Path]) -> bytes:
    """Name, size and modification time of each file, as bytes to hash: weights may change without a change of any header.

    A deleted source shard counts with the size and time of its record (see `deleted_shards`). Raises FormatError if another
    file is missing.
    """
    lines = []
    for path in files:
        try:
            stat = path.stat()
            size, mtime_ns = stat.st_size, stat.st_mtime_ns
        except FileNotFoundError:
            record = read_record(path)
            size, mtime_ns = record.size, record.mtime_ns
        except OSError as error:
            raise FormatError(f"{path}: {error.strerror or error}") from None
        lines.append(f"{path.name}\0{size}\0{mtime_ns}\n")
    return "".join(lines).encode("utf-8", "surrogateescape")


LOST_CONFIG = "ggufmill.lost_config"  # metadata key: what of config.json converting left out, a line each


@dataclass(frozen=True)
class TensorScale:
    """Factors of a tensor's matrices, kept apart from its encoded rows: in a GGUF as tensors NAME.scale and NAME.input_scale.

    factors  () -> float32 [matrices]: weights are the decoded rows times their matrix's factor
    inputs   () -> float32 [matrices]: with which llama.cpp may quantise the inputs of the matrices; None if there are none
    """

    factors: Callable[[], np.ndarray]
    inputs: Callable[[], np.ndarray] | None = None


@dataclass(frozen=True)
class SourceTensor:
    """A tensor that can be read in runs of rows.

    name, shape  as in a GGUF: shape in ne order, shape[0] the row length
    source_type  how the source stores it: a ggml type name, or for example 'f8_e4m3'
    read         (start, stop) -> float32 [stop - start, shape[0]]; rows count through shape[1:], flattened. A run never
                 crosses from one matrix (shape[1] rows) into the next
    raw          (start, stop) -> uint8 [stop - start, row_bytes], the encoded rows as stored; None if the source does not
                 store the tensor in a ggml type
    stored       that ggml type, else None
    mapped       all encoded rows in a mapped file or in memory, uint8 [n_rows, row_bytes], read-only; None if they are not
                 contiguous anywhere
    files        the files that it is read from, where that is known
    read_bf16    (start, stop) -> uint8 [stop - start, 2 * shape[0]], what `read` gives rounded to bf16; only where that is
                 faster than `read` and rounding
    scale        factors that `read` applies, but that `raw` and `mapped` do not contain; None if there are none
    """

    name: str
    shape: tuple[int, ...]
    source_type: str
    read: Callable[[int, int], np.ndarray] = field(repr=False, compare=False)
    raw: Callable[[int, int], np.ndarray] | None = field(default=None, repr=False, compare=False)
    stored: TensorType | None = None
    mapped: np.ndarray | None = field(default=None, repr=False, compare=False)
    files: tuple[Path, ...] = field(default=(), repr=False, compare=False)
    read_bf16: Callable[[int, int], np.ndarray] | None = field(default=None, repr=False, compare=False)
    scale: TensorScale | None = field(default=None, repr=False, compare=False)

    @property
    def n_rows(self) -> int:
        """Rows of all matrices."""
        return prod(self.shape[1:])

    @property
    def n_elements(self) -> int:
        """Elements of all rows."""
        return prod(self.shape)


class TensorGroups:
    """Tensors of a group have names of one form, and the same shape, source type and stored type; all or none of them have
    stored bytes, and factors.

    names    of all tensors, in order
    first    the first tensor of each group, in order
    """

    def __init__(self, tensors: Iterable[SourceTensor]):
        self.names: list[str] = []
        self.first: list[SourceTensor] = []
        numbers: dict[tuple[object, ...], int] = {}
        group_of: list[int] = []
        for tensor in tensors:
            stored = tensor.stored.name if tensor.stored is not None else None
            what = tensor.shape, tensor.source_type, stored, tensor.raw is None, tensor.scale is None
            number = numbers.setdefault((form_of(tensor.name), *what), len(self.first))
            if number == len(self.first):
                self.first.append(tensor)
            self.names.append(tensor.name)
            group_of.append(number)
        self._group_of = np.array(group_of, np.int32)
        self._first_at = np.unique(self._group_of, return_index=True)[1]

    def to_look_at(self, apart: Sequence[bool]) -> tuple[np.ndarray, np.ndarray]:
        """(places of tensors, ascending, int64 [m]; for each tensor the index there of the one that it is like, int64 [n]).

        apart: of each group, whether each tensor of it has to be looked at; else its first one stands for all.
        """
        alone = np.array(apart, bool)[self._group_of]
        is_looked_at = alone.copy()
        is_looked_at[self._first_at] = True
        index = np.cumsum(is_looked_at) - 1
        return np.flatnonzero(is_looked_at), np.where(alone, index, index[self._first_at[self._group_of]])

    def first_at(self, place: int) -> SourceTensor | None:
        """The tensor at a place if it is the first of its group."""
        group = self._group_of[place]
        return self.first[group] if self._first_at[group] == place else None


@dataclass(frozen=True)
class TensorSource:
    """A model: GGUF metadata, tensors in file order, and what identifies it.

    path      as the user knows it, for messages
    metadata  GGUF keys -> values
    tensors   name -> tensor
    identity  a digest of its files' headers, sizes and modification times: a job is resumed only with the same source
    notes     what was left out or assumed in reading it, one line each for the user
    files     the files that it is read from, none of which is ever written to
    shards    those of `files` that hold tensors, can be deleted once these are written and have not been: of a checkpoint, and
              of a GGUF that was opened for that
    read_as   for a checkpoint: the architecture that it was read as instead of what config.json names
    """

    path: str
    metadata: dict[str, Any]
    tensors: Mapping[str, SourceTensor]
    identity: str
    notes: list[str] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    shards: Mapping[Path, DeletableShard] = field(default_factory=dict, repr=False)
    read_as: str | None = None

    @property
    def architecture(self) -> str:
        """general.architecture; '' if the metadata do not say."""
        return str(self.metadata.get("general.architecture", ""))

    @cached_property
    def groups(self) -> TensorGroups:
        """Its tensors in groups of alike ones."""
        return TensorGroups(self.tensors.values())

    def split(self) -> dict[str, int]:
        """Tensor name -> number of its shard, counted from 0. Raises PlanError unless this is a GGUF in several files."""
        numbers = {path: number for number, path in enumerate(self.files)}
        is_known = all(len(t.files) == 1 and t.files[0] in numbers for t in self.tensors.values())
        if self.shards or not is_known or len(numbers) < 2 or any(p.suffix != ".gguf" for p in numbers):
            raise PlanError(f"{self.path} is no GGUF in several files, so there is no split to keep")
        return {t.name: numbers[t.files[0]] for t in self.tensors.values()}
