"""A GGUF file's header with other metadata: the directory of tensors stays as it is, since its offsets count from the data."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..data_classes import dataclass
from ..errors import FormatError, PlanError
from .file_range import read_range
from .gguf import open_file
from .gguf_header import align, metadata_bytes, value_type
from .gguf_parser import MAGIC, NUMBERS, VERSION

_COUNTS = 24  # bytes: magic, version, number of tensors, number of keys
_SCALARS = {np.dtype(dtype).name: np.dtype(dtype) for dtype in NUMBERS.values()}
_BOOLS = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True)
class Header:
    """What precedes the tensors' data in one GGUF file.

    metadata   all keys of this file, those of a split included
    directory  the tensors' entries, as they are in the file
    n_tensors  how many; alignment: of the data, in bytes
    nbytes     the header's size, padding included: where the data begins
    """

    path: Path
    metadata: dict[str, Any]
    directory: bytes
    n_tensors: int
    alignment: int
    nbytes: int

    def with_metadata(self, metadata: Mapping[str, Any]) -> bytes:
        """The header with these metadata, padded to the alignment. Raises FormatError for a value that GGUF cannot hold."""
        counts = MAGIC + struct.pack("<IQQ", VERSION, self.n_tensors, len(metadata))
        keys = metadata_bytes(metadata)
        used = len(counts) + len(keys) + len(self.directory)
        return b"".join((counts, keys, self.directory, bytes(align(used, self.alignment) - used)))


def read_header(path: Path) -> Header:
    """The header of one file of a model. Raises FormatError as `open_gguf`, and for metadata that would not be written again
    as they are."""
    metadata, tensors, alignment = open_file(path)
    entries = sum(
        8 + len(name.encode()) + 4 + 8 * len(kind.shape) + 4 + 8
        for name, kind in zip(tensors.names, tensors.kinds, strict=True)
    )
    n_tensors = len(tensors.names)
    del tensors  # the directory of a million is large, too
    encoded = metadata_bytes(metadata)
    used = _COUNTS + len(encoded) + entries
    if read_range(path, _COUNTS, len(encoded)).tobytes() != encoded:
        raise FormatError(f"{path}: its metadata are stored in a way that this program would not write; it is left as it is")
    directory = read_range(path, used - entries, entries).tobytes()
    return Header(path, metadata, directory, n_tensors, alignment, align(used, alignment))


def type_name(key: str, value: Any) -> str:
    """The type of a metadata value as users write it: 'uint32', 'string', 'int32[]'. Raises FormatError."""
    name = value_type(key, value)
    return f"{name.removeprefix('array of ')}[]" if name.startswith("array of ") else name


def metadata_value(value: Any, type: str | None, key: str) -> Any:
    """A value as it goes into a header.

    value: a number, bool, text or list; a text stands for a number or bool too, and for a list if it is JSON.
    type: as `type_name` gives it; None: that of the value, where a text that looks like something else is refused.
    Raises PlanError, which names the key.
    """
    if type is None:
        type = _type_of(value, key)
    try:
        if type.endswith("[]") and isinstance(value, str):
            value = json.loads(value)
        return _convert(value, type)
    except (ValueError, TypeError, OverflowError, KeyError, RecursionError):
        raise PlanError(f"{key}: {value!r:.60} is no value of type {type}") from None


def _type_of(value: Any, key: str) -> str:
    """The type that llama.cpp's own keys have for such a value. Raises PlanError for a text that could be meant otherwise."""
    if isinstance(value, str):
        looks = _looks_like(value)
        if looks is not None:
            raise PlanError(f"{key} is a new key: write {key}:{looks}={value:.40} or {key}:string={value:.40}")
        return "string"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, np.generic | np.ndarray):
        return type_name(key, value)
    if isinstance(value, int):
        return "uint32" if 0 <= value < 1 << 32 else "int32" if -(1 << 31) <= value < 0 else "int64"
    if isinstance(value, float):
        return "float32"
    if isinstance(value, Sequence) and value:
        return ("string" if isinstance(value[0], str) else _type_of(value[0], key)) + "[]"
    raise PlanError(f"{key}: {value!r:.60} has no type in a GGUF; write {key}:TYPE, for example {key}:int32[]")


def _looks_like(text: str) -> str | None:
    """The type of a text that is JSON other than a string."""
    try:
        value = json.loads(text)
        return _type_of(value, "") if isinstance(value, bool | int | float | list) else None
    except (ValueError, PlanError, RecursionError):
        return None


def _convert(value: Any, type: str) -> Any:
    """Raises ValueError, TypeError, OverflowError or KeyError."""
    item = type.removesuffix("[]")
    if type.endswith("[]"):
        if isinstance(value, str | Mapping):
            raise TypeError
        values = [_convert(v, item) for v in value]
        return values if item == "string" else np.array(values, bool if item == "bool" else _SCALARS[item])
    if item == "string":
        if not isinstance(value, str):
            raise TypeError
        return value
    if item == "bool":
        return value if isinstance(value, bool) else _BOOLS[value.lower()]
    dtype = _SCALARS[item]
    if isinstance(value, bool):
        raise TypeError
    if dtype.kind == "f":
        return dtype.type(float(value))
    if isinstance(value, float) and not value.is_integer():
        raise ValueError
    return dtype.type(int(value))


TYPE_NAMES = (*_SCALARS, "bool", "string")  # each may have [] after it
