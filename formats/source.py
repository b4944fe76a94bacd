"""The interface of tensor sources: what quantize, imatrix and the runtime read models through, whatever files it comes from.

`convert.open_source` makes one of a GGUF, of a Hugging Face checkpoint folder, or of a repository on the hub.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..data_classes import dataclass
from ..errors import FormatError, PlanError
from .deleted_shards import read_record
from .tensor_groups import TensorGroups
from .types import TensorType

if TYPE_CHECKING:
    from .deleted_shards import DeletableShard

LORA_A, LORA_B = ".lora_a", ".lora_b"  # what the names of an adapter's factors end with, after the changed tensor's whole name


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
