"""A GGUF file as a tensor source: quantised tensors are decoded as they are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..formats import GGUFFile, SourceTensor, TensorInfo, TensorSource, TensorType, open_gguf
from ..jobs.plan import Output, Plan
from .codecs.registry import decode


def gguf_source(path: str | Path | GGUFFile) -> TensorSource:
    """Opens a GGUF model, single or split, as a source. Raises FormatError as `open_gguf` does."""
    file = path if isinstance(path, GGUFFile) else open_gguf(path)
    tensors = {name: _source_tensor(info) for name, info in file.tensors.items()}
    return TensorSource(str(file.path), file.metadata, tensors, file.identity, files=file.paths)


def rounded(source: TensorSource, plan: Plan) -> TensorSource:
    """The model that the plan's file would hold, without writing it: every read is encoded as planned and decoded again."""
    tensors = {o.name: as_planned(o) for o in plan.outputs}
    return replace(source, metadata=plan.metadata, tensors=tensors, identity=plan.fingerprint)


def as_planned(output: Output) -> SourceTensor:
    """A tensor as the plan would write it: every read encodes and decodes."""

    def read(start: int, stop: int) -> np.ndarray:
        return _decoded(output.produce, output.type, output.shape[0], start, stop)

    return SourceTensor(output.name, output.shape, output.type.name, read, output.produce, output.type)


def _source_tensor(info: TensorInfo) -> SourceTensor:
    def read(start: int, stop: int) -> np.ndarray:
        return _decoded(info.read, info.type, info.shape[0], start, stop)

    return SourceTensor(info.name, info.shape, info.type.name, read, info.read, info.type, info.data, (info.path,))


def _decoded(rows: Callable[[int, int], np.ndarray], kind: TensorType, n: int, start: int, stop: int) -> np.ndarray:
    """float32 [stop - start, n]. Interleaved rows only decode in whole groups: the run is widened to them, then cut."""
    low, high = start // kind.rows * kind.rows, -(-stop // kind.rows) * kind.rows
    return decode(rows(low, high), kind.name, n)[start - low : stop - low]
