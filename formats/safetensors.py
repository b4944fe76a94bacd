"""Reading safetensors: a single file or a folder sharded by an index file, memory-mapped.

Our own, since the numpy interface of the `safetensors` package has no fp8. Layout: 8 bytes of header length, a JSON header,
then the tensors' bytes.
"""

from __future__ import annotations

import json
import mmap
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from .errors import FormatError
from .span import read_span

# safetensors dtype -> (numpy dtype of the stored words, our source type name)
DTYPES: dict[str, tuple[str, str]] = {
    "F64": ("<f8", "f64"),
    "F32": ("<f4", "f32"),
    "F16": ("<f2", "f16"),
    "BF16": ("<u2", "bf16"),
    "F8_E4M3": ("u1", "f8_e4m3"),
    "F8_E5M2": ("u1", "f8_e5m2"),
    "F8_E8M0": ("u1", "f8_e8m0"),
    "I8": ("i1", "i8"),
    "U8": ("u1", "u8"),
    "I16": ("<i2", "i16"),
    "I32": ("<i4", "i32"),
    "I64": ("<i8", "i64"),
    "U16": ("<u2", "u16"),
    "U32": ("<u4", "u32"),
    "U64": ("<u8", "u64"),
    "BOOL": ("u1", "bool"),
}
_ITEM_BYTES = {name: np.dtype(words).itemsize for name, (words, _) in DTYPES.items()}
MAX_HEADER = 100_000_000  # the limit of the safetensors library itself


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a safetensors file: dtype as safetensors spells it, shape outermost first, `data` a view of stored words."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int
    _map: np.ndarray = field(repr=False, compare=False)

    @property
    def data(self) -> np.ndarray:
        """View [*shape] of the mapped file with the words as numpy can name them: bf16 as uint16, fp8 as uint8."""
        words = self._map[self.offset : self.offset + self.nbytes].view(DTYPES[self.dtype][0])
        return words.reshape(self.shape)

    def rows(self, start: int, stop: int) -> np.ndarray:
        """data[start:stop] along the outermost dimension, read into memory of its own; a scalar counts as one row."""
        shape = self.shape or (1,)
        width = self.nbytes // shape[0] if shape[0] else 0
        words = read_span(self.path, self.offset + start * width, (stop - start) * width).view(DTYPES[self.dtype][0])
        return words.reshape(stop - start, *shape[1:])

    @property
    def source_type(self) -> str:
        return DTYPES[self.dtype][1]


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """The directory of one file. Raises FormatError if it is truncated, overlapping or otherwise malformed."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < 9:
                raise FormatError(f"{path}: {size} bytes are too few for a safetensors file")
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            if length > min(size - 8, MAX_HEADER):
                raise FormatError(f"{path}: a header of {length} bytes in a file of {size}: truncated, or not safetensors")
            header = _header(path, file.read(length))
            mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None
    base = 8 + length
    tensors = {name: _entry(path, name, entry, base, mapped) for name, entry in header.items() if name != "__metadata__"}
    end = base
    for tensor in sorted(tensors.values(), key=lambda t: t.offset):
        if tensor.offset < end and tensor.nbytes:
            raise FormatError(f"{path}: tensor {tensor.name} overlaps the one before it")
        end = max(end, tensor.offset + tensor.nbytes)
    if end > size:
        raise FormatError(f"{path}: the file is {end - size} bytes shorter than its header says: truncated (download it again)")
    return tensors


def _header(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: the header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise FormatError(f"{path}: the header is not a JSON object")
    return header


def _entry(path: Path, name: str, entry: Any, base: int, mapped: np.ndarray) -> StoredTensor:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise FormatError(f"{path}: tensor {name} lacks dtype, shape or data_offsets") from None
    if not all(type(v) is int and 0 <= v < 1 << 60 for v in (*shape, begin, end)) or end < begin or len(shape) > 8:
        raise FormatError(f"{path}: tensor {name} has an impossible shape or place: {shape}, {begin} to {end}")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise FormatError(f"{path}: tensor {name} has dtype {dtype}; known are {', '.join(DTYPES)}")
    if prod(shape) * _ITEM_BYTES[dtype] != end - begin:
        raise FormatError(f"{path}: tensor {name} of shape {shape} and dtype {dtype} does not take {end - begin} bytes")
    return StoredTensor(name, dtype, shape, path, base + begin, end - begin, mapped)


def find_indexes(folder: Path) -> list[Path]:
    """The index files of a checkpoint folder: none or one where it is as it should be."""
    return sorted(folder.glob("*.safetensors.index.json"))


def open_safetensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a checkpoint folder: by its index file if it has one, else every *.safetensors in it, in order.

    Raises FormatError if there is none, a shard is missing, lies outside the folder by its name, or a tensor is missing or
    twice there.
    """
    indexes = find_indexes(folder)
    if len(indexes) > 1:
        raise FormatError(f"{folder}: several index files ({', '.join(p.name for p in indexes)}); keep the one to use")
    if indexes:
        try:
            weight_map = json.loads(indexes[0].read_text("utf-8"))["weight_map"]
            names = sorted(set(weight_map.values()), key=str)
        except OSError as error:
            raise FormatError(f"{indexes[0]}: {error.strerror or error}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise FormatError(f"{indexes[0]}: not an index of safetensors shards ({error!r})") from None
        escaping = [name for name in names if not isinstance(name, str) or Path(name).name != name or name == ".."]
        if escaping:
            raise FormatError(f"{indexes[0]}: {escaping[0]!r} is not the name of a shard in this folder")
        shards = [folder / name for name in names]
        missing = [p.name for p in shards if not p.exists()]
        if missing:
            raise FormatError(f"{folder}: {len(missing)} of {len(shards)} shards are missing, the first is {missing[0]}")
    else:
        weight_map = None
        shards = sorted(folder.glob("*.safetensors"))
        if not shards:
            raise FormatError(f"{folder}: no *.safetensors file in this folder")
    tensors: dict[str, StoredTensor] = {}
    for shard in shards:
        for name, tensor in read_safetensors(shard).items():
            if name in tensors:
                raise FormatError(f"{shard}: tensor {name} is also in {tensors[name].path.name}")
            tensors[name] = tensor
    if weight_map is not None:
        absent = [name for name in weight_map if name not in tensors]
        if absent:
            raise FormatError(f"{folder}: the index names {len(absent)} tensors that no shard holds, the first is {absent[0]}")
    return tensors
