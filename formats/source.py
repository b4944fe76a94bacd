"""A source of named tensors: what convert, quantize, imatrix and the runtime read from, whatever file lies behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import FormatError, PlanError
from .deleted_shards import read_released
from .types import TensorType

if TYPE_CHECKING:
    from .safetensors import LocalShard


def stamp(files: Iterable[Path]) -> bytes:
    """Name, size and time of the last change of each file: weights may change without any header changing. Raises FormatError
    if one is gone, unless it is a shard that was released: that is as it was."""
    lines = []
    for path in files:
        try:
            found = path.stat()
            size, time = found.st_size, found.st_mtime_ns
        except FileNotFoundError:
            left = read_released(path)
            size, time = left.size, left.mtime_ns
        except OSError as error:
            raise FormatError(f"{path}: {error.strerror or error}") from None
        lines.append(f"{path.name}\0{size}\0{time}\n")
    return "".join(lines).encode("utf-8", "surrogateescape")


@dataclass(frozen=True)
class SourceTensor:
    """A tensor that can be read in runs of rows.

    name, shape  as in the GGUF to come: shape in ne order, shape[0] the row length
    source_type  what lies in the source: a ggml type name, or e.g. 'f8_e4m3'
    read         (start, stop) -> float32 [stop - start, shape[0]]; rows count through shape[1:], flattened. A run never
                 crosses from one matrix (shape[1] rows) into the next.
    raw          (start, stop) -> the stored bytes uint8 [stop - start, row_bytes], when the source holds `stored` as it is
    stored       the ggml type of those bytes, else None
    mapped       all of those bytes where they lie, in a mapped file or in memory: uint8 [n_rows, row_bytes], not to be written;
                 None if there is no such place
    files        what it is read from, where that is known
    narrow       (start, stop) -> what `read` gives, rounded to bf16: uint8 [stop - start, 2 * shape[0]]; where there is a
                 shorter way to that than through `read`
    """

    name: str
    shape: tuple[int, ...]
    source_type: str
    read: Callable[[int, int], np.ndarray] = field(repr=False, compare=False)
    raw: Callable[[int, int], np.ndarray] | None = field(default=None, repr=False, compare=False)
    stored: TensorType | None = None
    mapped: np.ndarray | None = field(default=None, repr=False, compare=False)
    files: tuple[Path, ...] = field(default=(), repr=False, compare=False)
    narrow: Callable[[int, int], np.ndarray] | None = field(default=None, repr=False, compare=False)

    @property
    def n_rows(self) -> int:
        return prod(self.shape[1:])

    @property
    def n_elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class TensorSource:
    """A model: GGUF metadata, tensors in file order, and what identifies it.

    path      shown to people
    files     what it is read from: never written to
    identity  a digest of its files' headers, sizes and times: a job is resumed only over the same source
    notes     what was left out or assumed on the way, for people to read
    shards    the files of `files` that hold tensors of a checkpoint, and are still there
    """

    path: str
    metadata: dict[str, Any]
    tensors: dict[str, SourceTensor]
    identity: str
    notes: list[str] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    shards: Mapping[Path, LocalShard] = field(default_factory=dict, repr=False)

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def split(self) -> dict[str, int]:
        """tensor name -> the number of its file, counted from 0. Raises PlanError for anything but a GGUF in several files."""
        numbers = {path: number for number, path in enumerate(self.files)}
        known = all(len(t.files) == 1 and t.files[0] in numbers for t in self.tensors.values())
        if self.shards or not known or len(numbers) < 2 or any(p.suffix != ".gguf" for p in numbers):
            raise PlanError(f"{self.path} is no GGUF in several files, so there is no split to keep")
        return {t.name: numbers[t.files[0]] for t in self.tensors.values()}
