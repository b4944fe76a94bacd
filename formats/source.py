"""A source of named tensors: what convert, quantize, imatrix and the runtime read from, whatever file lies behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from .errors import FormatError
from .types import TensorType


def stamp(files: Iterable[Path]) -> bytes:
    """Name, size and time of the last change of each file: weights may change without any header changing. Raises FormatError
    if one is gone."""
    lines = []
    for path in files:
        try:
            found = path.stat()
        except OSError as error:
            raise FormatError(f"{path}: {error.strerror or error}") from None
        lines.append(f"{path.name}\0{found.st_size}\0{found.st_mtime_ns}\n")
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
    """

    name: str
    shape: tuple[int, ...]
    source_type: str
    read: Callable[[int, int], np.ndarray] = field(repr=False, compare=False)
    raw: Callable[[int, int], np.ndarray] | None = field(default=None, repr=False, compare=False)
    stored: TensorType | None = None
    mapped: np.ndarray | None = field(default=None, repr=False, compare=False)

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
    """

    path: str
    metadata: dict[str, Any]
    tensors: dict[str, SourceTensor]
    identity: str
    notes: list[str] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))
