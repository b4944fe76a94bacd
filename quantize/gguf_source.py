"""A GGUF file as a tensor source, its tensors decoded as they are read; and a plan's output as a source, without writing it.

i2_s, the type of Microsoft's BitNet files, is read too (ik_llama.cpp, dequantize_row_ms_i2s): 128 two-bit codes in 32 bytes.
Byte j of a block has the codes of elements j, j + 32, j + 64 and j + 96, the first in its highest bits; a code stands for
itself less one. The scale of all weights, a float32, follows the codes, so that no row can be decoded from its own bytes: the
type is not in the table of types.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..formats import FormatError, GGUFFile, SourceTensor, TensorInfo, TensorSource, TensorType, open_gguf
from ..formats.tensor_table import MadeOnDemand
from ..jobs.outputs import Output
from ..jobs.plan import Plan
from .encode import decode
from .tensor_scale import apply_scales, scale_outputs, scaled_tensor

TYPE_ID, NAME = 36, "i2_s"
_BLOCK, _BYTES = 128, 32
_SHIFTS = np.array([6, 4, 2, 0], np.uint8)[:, None]


def i2_s_tensor(info: TensorInfo) -> SourceTensor:
    """A tensor of a GGUF file in i2_s as a source tensor, which reads as float32.

    Raises FormatError for rows that are no whole blocks, and for a tensor without its scale.
    """
    columns, codes = info.shape[0], info.n_rows * info.shape[0] // 4
    if columns % _BLOCK or info.nbytes < codes + 4:
        raise FormatError(
            f"{info.path}: tensor {info.name} is i2_s of {columns} columns in {info.nbytes} bytes; known are rows of a multiple"
            f" of {_BLOCK} columns in {codes + 4} bytes or more"
        )

    def read(start: int, stop: int) -> np.ndarray:
        data = info.data.reshape(-1)
        scale = np.ascontiguousarray(data[codes : codes + 4]).view("<f4")[0].astype(np.float32)
        packed = data[start * columns // 4 : stop * columns // 4].reshape(-1, 1, _BYTES)
        values = (packed >> _SHIFTS & 3).astype(np.float32) - np.float32(1)
        return scale * values.reshape(stop - start, columns)

    return SourceTensor(info.name, info.shape, NAME, read, files=(info.path,))


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


def planned_source(source: TensorSource, plan: Plan) -> TensorSource:
    """The model that the plan would write, with weights that mean nothing: to say what running it takes."""
    simulated = simulate_quantization(source, plan)
    matrices = {
        t.name: planned_tensor(t, t.stored) for t in simulated.tensors.values() if len(t.shape) > 1 and t.stored is not None
    }
    return replace(simulated, tensors={**simulated.tensors, **matrices})


def planned_tensor(tensor: SourceTensor, kind: TensorType, *, is_decoded: bool = False) -> SourceTensor:
    """A tensor in a type, all bytes 0: nothing is encoded, and decoding takes what it takes. is_decoded: there are no rows of
    this type, they are read decoded."""
    columns = tensor.shape[0]
    row = np.zeros((1, kind.row_bytes(columns)), np.uint8)

    def raw(start: int, stop: int) -> np.ndarray:
        return np.broadcast_to(row, (stop - start, row.shape[1]))

    def read(start: int, stop: int) -> np.ndarray:
        return _decode_rows(lambda first, last: np.ascontiguousarray(raw(first, last)), kind, columns, start, stop)

    stored = {} if is_decoded else {"raw": raw, "stored": kind}
    return SourceTensor(tensor.name, tensor.shape, kind.name, read, **stored)


def simulated_tensor(output: Output) -> SourceTensor:
    """One tensor of a plan as a source tensor: `read` encodes and decodes, `raw` gives the encoded bytes."""

    def read(start: int, stop: int) -> np.ndarray:
        return _decode_rows(output.produce, output.type, output.shape[0], start, stop)

    tensor = SourceTensor(output.name, output.shape, output.type.name, read, output.produce, output.type)
    return scaled_tensor(tensor, output.scale)


def _source_tensor(info: TensorInfo) -> SourceTensor:
    if info.type.id == TYPE_ID:
        return i2_s_tensor(info)

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
