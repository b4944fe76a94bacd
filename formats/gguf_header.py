"""Writing GGUF v3 headers: metadata and tensor directory as bytes, and the offsets of the tensors in the file."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping
from io import BytesIO
from typing import Any

import numpy as np

from ..errors import FormatError
from .gguf_parser import ARRAY, BOOL, MAGIC, NUMBERS, STRING, VERSION
from .string_array import LENGTH, StringArray
from .types import TensorType

Tensors = Iterable[tuple[str, tuple[int, ...], TensorType]]  # names, shapes in ne order, types

_VALUE_TYPE = {dtype: value_type for value_type, dtype in NUMBERS.items()}


def align(offset: int, alignment: int) -> int:
    """The offset rounded up to a multiple of the alignment."""
    return -(-offset // alignment) * alignment


class _Length:
    """Keeps how many bytes were written to it, and nothing else."""

    def __init__(self) -> None:
        self.nbytes = 0

    def write(self, data: bytes) -> None:
        self.nbytes += len(data)

    def tell(self) -> int:
        return self.nbytes


def header_bytes(metadata: dict[str, Any], tensors: Tensors, alignment: int) -> tuple[bytes, array[int], int]:
    """Metadata and tensors -> (header padded to the alignment, offset of each tensor from the start of the file, file size).

    tensors: (name, shape in ne order, type), in file order; offsets and sizes are in bytes. Raises FormatError for a metadata
    value that GGUF cannot hold.
    """
    out = BytesIO()  # whose bytes can be had without a copy: a header with a million tensors is large
    offsets, nbytes = _write(out, metadata, tensors, alignment)
    out.seek(len(MAGIC) + 4)
    out.write(struct.pack("<Q", len(offsets)))
    return out.getvalue(), offsets, nbytes


def header_layout(metadata: dict[str, Any], tensors: Tensors, alignment: int) -> tuple[int, array[int], int]:
    """As `header_bytes`, but of the header only its length, without making it."""
    out = _Length()
    offsets, nbytes = _write(out, metadata, tensors, alignment)
    return out.nbytes, offsets, nbytes


def _write(out: BytesIO | _Length, metadata: dict[str, Any], tensors: Tensors, alignment: int) -> tuple[array[int], int]:
    """Writes a header that says 0 tensors. Returns the offsets and the size of the file."""
    out.write(MAGIC + struct.pack("<IQQ", VERSION, 0, len(metadata)))
    for part in _metadata_parts(metadata):
        out.write(part)
    offsets, end = array("Q"), 0  # relative to the end of the header
    known: dict[tuple[tuple[int, ...], int], tuple[bytes, int]] = {}  # shape and type -> as it is spelt, aligned size
    for name, shape, tensor_type in tensors:
        kind = known.get((shape, tensor_type.id))
        if kind is None:
            spelt = struct.pack(f"<I{len(shape)}QI", len(shape), *shape, tensor_type.id)
            kind = known[shape, tensor_type.id] = spelt, align(tensor_type.nbytes(shape), alignment)
        out.write(_string(name) + kind[0] + end.to_bytes(8, "little"))
        offsets.append(end)
        end += kind[1]
    nbytes = align(out.tell(), alignment)
    out.write(bytes(nbytes - out.tell()))
    if offsets:
        np.frombuffer(offsets, np.uint64)[:] += np.uint64(nbytes)
    return offsets, nbytes + end


def metadata_bytes(metadata: Mapping[str, Any]) -> bytes:
    """Keys and values as they stand in a header. Raises FormatError for a value that GGUF cannot hold."""
    return b"".join(_metadata_parts(metadata))


def _metadata_parts(metadata: Mapping[str, Any]) -> Iterator[bytes]:
    for key, value in metadata.items():
        type_id, payload = _value(key, value)
        yield _string(key) + struct.pack("<I", type_id)
        yield from payload


def _string(text: str) -> bytes:
    encoded = text.encode("utf-8", "surrogateescape")
    return len(encoded).to_bytes(LENGTH, "little") + encoded


def _value(key: str, value: Any) -> tuple[int, tuple[bytes, ...]]:
    """(GGUF value type id, encoded value in parts: a vocabulary's strings are not copied). Raises FormatError."""
    if isinstance(value, (bool, np.bool_)):
        return BOOL, (struct.pack("<B", bool(value)),)
    if isinstance(value, str):
        return STRING, (_string(value),)
    if not isinstance(value, np.generic):  # Python numbers take the type of llama.cpp's own keys
        if isinstance(value, int):
            value = np.uint32(value) if 0 <= value < 1 << 32 else np.int64(value)
        elif isinstance(value, float):
            value = np.float32(value)
    if isinstance(value, np.generic) and value.dtype in _VALUE_TYPE:
        return _VALUE_TYPE[value.dtype], (value.tobytes(),)
    if isinstance(value, np.ndarray) and value.ndim == 1:
        if value.dtype == bool:
            return ARRAY, (_array_head(BOOL, len(value)), value.astype("u1").tobytes())
        if value.dtype in _VALUE_TYPE:
            return ARRAY, (_array_head(_VALUE_TYPE[value.dtype], len(value)), value.tobytes())
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        value = StringArray.of(value)
    if isinstance(value, StringArray):
        return ARRAY, (_array_head(STRING, len(value)), value.payload)
    if isinstance(value, list):  # an array of arrays
        items = [_value(key, v) for v in value]
        if {type_id for type_id, _ in items} == {ARRAY}:
            return ARRAY, (_array_head(ARRAY, len(items)), *(part for _, payload in items for part in payload))
    raise FormatError(f"metadata key {key}: GGUF has no type for {type(value).__name__} {str(value)[:40]!r}")


def _array_head(type_id: int, length: int) -> bytes:
    return struct.pack("<IQ", type_id, length)


_NAMES = {type_id: np.dtype(dtype).name for type_id, dtype in NUMBERS.items()} | {
    BOOL: "bool",
    STRING: "string",
    ARRAY: "array",
}


def value_type(key: str, value: Any) -> str:
    """The name of a metadata value's type in the file: 'uint32', 'string', 'array of int32' ... Raises FormatError."""
    type_id, payload = _value(key, value[:1] if isinstance(value, list | StringArray | np.ndarray) else value)
    return f"array of {_NAMES[int.from_bytes(payload[0][:4], 'little')]}" if type_id == ARRAY else _NAMES[type_id]
