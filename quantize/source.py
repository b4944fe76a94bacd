"""A GGUF file as a tensor source: quantised tensors are decoded as they are read."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ..formats import GGUFFile, SourceTensor, TensorInfo, TensorSource, open_gguf
from .codec import decode


def gguf_source(path: str | Path | GGUFFile) -> TensorSource:
    """Opens a GGUF model, single or split, as a source. Raises FormatError as `open_gguf` does."""
    file = path if isinstance(path, GGUFFile) else open_gguf(path)
    digest = hashlib.sha256()
    for info in file.tensors.values():
        digest.update(f"{info.name} {info.shape} {info.type.name} {info.offset} {info.path.name}\n".encode())
    tensors = {name: _source_tensor(info) for name, info in file.tensors.items()}
    return TensorSource(str(file.path), file.metadata, tensors, digest.hexdigest())


def _source_tensor(info: TensorInfo) -> SourceTensor:
    def raw(start: int, stop: int) -> np.ndarray:
        return info.data[start:stop]

    return SourceTensor(info.name, info.shape, info.type.name, _reader(info), raw, info.type)


def _reader(info: TensorInfo) -> Callable[[int, int], np.ndarray]:
    group = info.type.rows

    def read(start: int, stop: int) -> np.ndarray:
        # Interleaved rows only decode in whole groups: widen the run, then cut it.
        low, high = start // group * group, -(-stop // group) * group
        return decode(info.data[low:high], info.type.name, info.shape[0])[start - low : stop - low]

    return read
