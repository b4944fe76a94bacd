"""Writing GGUF v3 headers: metadata and tensor directory as bytes, the tensors' places in the file."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from ..errors import FormatError
from .gguf import ARRAY, BOOL, MAGIC, NUMBERS, STRING, VERSION
from .types import TensorType

_KIND = {dtype: kind for kind, dtype in NUMBERS.items()}


def align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def header_bytes(
    metadata: dict[str, Any], tensors: list[tuple[str, tuple[int, ...], TensorType]], alignment: int
) -> tuple[bytes, list[int], int]:
    """(header padded to the alignment, offset of each tensor from the start of the file, size of the whole file).

    tensors: (name, shape in ne order, type), in file order. Raises FormatError for a value that GGUF cannot hold.
    """
    out = bytearray(MAGIC + struct.pack("<IQQ", VERSION, len(tensors), len(metadata)))
    for key, value in metadata.items():
        out += _string(key)
        kind, payload = _value(key, value)
        out += struct.pack("<I", kind) + payload
    places, at = [], 0
    for name, shape, kind in tensors:
        out += _string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind.id, at)
        places.append(at)
        at = align(at + kind.nbytes(shape), alignment)
    out += bytes(align(len(out), alignment) - len(out))
    return bytes(out), [len(out) + place for place in places], len(out) + at


def _string(text: str) -> bytes:
    encoded = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(encoded)) + encoded


def _value(key: str, value: Any) -> tuple[int, bytes]:
    if isinstance(value, (bool, np.bool_)):
        return BOOL, struct.pack("<B", bool(value))
    if isinstance(value, str):
        return STRING, _string(value)
    if not isinstance(value, np.generic):  # plain numbers take the type that llama.cpp's own keys use
        if isinstance(value, int):
            value = np.uint32(value) if 0 <= value < 1 << 32 else np.int64(value)
        elif isinstance(value, float):
            value = np.float32(value)
    if isinstance(value, np.generic) and value.dtype in _KIND:
        return _KIND[value.dtype], value.tobytes()
    if isinstance(value, np.ndarray) and value.ndim == 1:
        if value.dtype == bool:
            return ARRAY, struct.pack("<IQ", BOOL, len(value)) + value.astype("u1").tobytes()
        if value.dtype in _KIND:
            return ARRAY, struct.pack("<IQ", _KIND[value.dtype], len(value)) + value.tobytes()
    if isinstance(value, list) and all(isinstance(v, str) for v in value):
        return ARRAY, struct.pack("<IQ", STRING, len(value)) + b"".join(map(_string, value))
    if isinstance(value, list):  # an array of arrays
        items = [_value(key, v) for v in value]
        if {kind for kind, _ in items} == {ARRAY}:
            return ARRAY, struct.pack("<IQ", ARRAY, len(items)) + b"".join(payload for _, payload in items)
    raise FormatError(f"metadata key {key}: GGUF has no type for {type(value).__name__} {str(value)[:40]!r}")


_NAMES = {kind: np.dtype(dtype).name for kind, dtype in NUMBERS.items()} | {BOOL: "bool", STRING: "string", ARRAY: "array"}


def value_type(key: str, value: Any) -> str:
    """The type that a metadata value has in the file: 'uint32', 'string', 'array of int32' ... Raises FormatError."""
    kind, payload = _value(key, value[:1] if isinstance(value, (list, np.ndarray)) else value)
    return f"array of {_NAMES[int.from_bytes(payload[:4], 'little')]}" if kind == ARRAY else _NAMES[kind]
