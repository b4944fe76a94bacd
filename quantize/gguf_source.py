"""A GGUF file as a tensor source, its tensors decoded as they are read; and a plan's output as a source, without writing it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..formats import GGUFFile, SourceTensor, TensorInfo, TensorSource, TensorType, open_gguf
from ..formats.tensor_table import MadeOnDemand
from ..jobs.outputs import Output
from ..jobs.plan import Plan
from . import i2_s
from .encode import decode
from .tensor_scale import apply_scales, scale_outputs, scaled_tensor


def gguf_source(path: str | Path | GGUFFile) -> TensorSource:
    """Opens a GGUF model, single file or split, as a source whose tensors read as float32 whatever type they are stored in.

    Raises FormatError as `open_gguf` does.
    """
    source = stored_source(path if isinstance(path, GGUFFile) else open_gguf(path))
    return replace(source, tensors=apply_scales(source.tensors, source.architecture))


def stored_source(file: GGUFFile) -> TensorSource:
    """As `gguf_source`, each tensor as the file has it: the factors that belong to one are not part of it."""
    tensors = MadeOnDemand(file.tensors, _source_tensor)
    return TensorSource(str(file.path), file.metadata, tensors, file.identity, files=file.paths, shards=file.shards)


def simulate_quantization(source: TensorSource, plan: Plan) -> TensorSource:
    """The model that the plan would write, as a source: every read encodes the rows as planned and decodes them again.

    Nothing is written, so that perplexity and KL divergence of a quant can be measured before there is a file.
    """
    scales = {part.name for o in plan.outputs.with_own() for part in scale_outputs(o)}
    tensors = {o.name: simulated_tensor(o) for o in plan.outputs if o.name not in scales}
    return replace(source, metadata=plan.metadata, tensors=tensors, identity=plan.fingerprint)


def simulated_tensor(output: Output) -> SourceTensor:
    """One tensor of a plan as a source tensor: `read` encodes and decodes, `raw` gives the encoded bytes."""

    def read(start: int, stop: int) -> np.ndarray:
        return _decode_rows(output.produce, output.type, output.shape[0], start, stop)

    tensor = SourceTensor(output.name, output.shape, output.type.name, read, output.produce, output.type)
    return scaled_tensor(tensor, output.scale)


def _source_tensor(info: TensorInfo) -> SourceTensor:
    if info.type.id == i2_s.TYPE_ID:
        return i2_s.i2_s_tensor(info)

    def read(start: int, stop: int) -> np.ndarray:
        return _decode_rows(info.read, info.type, info.shape[0], start, stop)

    return SourceTensor(info.name, info.shape, info.type.name, read, info.read, info.type, info.mapped, (info.path,))


def _decode_rows(
    read_bytes: Callable[[int, int], np.ndarray], tensor_type: TensorType, n: int, start: int, stop: int
) -> np.ndarray:
    """Rows start ... stop - 1, float32 [stop - start, n].

    Interleaved rows only decode in whole groups: the range is widened to group boundaries and the result cut.
    """
    first = start // tensor_type.rows * tensor_type.rows
    last = -(-stop // tensor_type.rows) * tensor_type.rows
    return decode(read_bytes(first, last), tensor_type.name, n)[start - first : stop - first]
