"""Reading safetensors: a single file or a folder sharded by an index file, memory-mapped.

Our own, since the numpy interface of the `safetensors` package has no fp8. Layout: 8 bytes of header length, a JSON header,
then the tensors' bytes.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..errors import FormatError
from .deleted_shards import is_released, read_released
from .file_range import check_reaches, read_span

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


class Shard(Protocol):
    """Where the bytes of a safetensors file are."""

    def read(self, offset: int, nbytes: int) -> np.ndarray:
        """uint8 [nbytes] from that byte of the file on, in memory of its own. Raises FormatError if they cannot be had."""
        ...

    def view(self, offset: int, nbytes: int) -> np.ndarray:
        """As `read`, but not to be written to: where it can be a part of the mapped file."""
        ...


class LocalShard:
    """A file of this machine; mapped when a view is asked for. was_read: whether anything beside its header was."""

    def __init__(self, path: Path):
        self.path = path
        self.was_read = False
        self._map: np.ndarray | None = None

    def read(self, offset: int, nbytes: int) -> np.ndarray:
        self.was_read = True
        return read_span(self.path, offset, nbytes)

    def view(self, offset: int, nbytes: int) -> np.ndarray:
        self.was_read = True
        if self._map is None:
            try:
                with self.path.open("rb") as file:
                    self._map = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
            except (OSError, ValueError) as error:
                raise FormatError(f"{self.path}: {getattr(error, 'strerror', None) or error}") from None
        check_reaches(self.path, offset + nbytes)  # touching pages of a map beyond the file's end would kill the process
        return self._map[offset : offset + nbytes]

    def close(self) -> None:
        """Lets go of the mapping, without which a deleted file would still take its space on disk."""
        self._map = None


class ReleasedShard:
    """A file that was deleted when its tensors were written; only its header is left."""

    def __init__(self, path: Path):
        self.path = path

    def read(self, offset: int, nbytes: int) -> np.ndarray:
        raise FormatError(
            f"{self.path}: was deleted when its tensors had been written (--delete-source-shards); only that job can go on, "
            "with --resume: for another, download it again"
        )

    view = read


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a safetensors file: dtype as safetensors spells it, shape outermost first, `data` a view of stored words."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int
    shard: Shard = field(repr=False, compare=False)

    @property
    def data(self) -> np.ndarray:
        """[*shape], not to be written to, with the words as numpy can name them: bf16 as uint16, fp8 as uint8. A view of the
        mapped file where there is one."""
        return self.shard.view(self.offset, self.nbytes).view(DTYPES[self.dtype][0]).reshape(self.shape)

    def rows(self, start: int, stop: int) -> np.ndarray:
        """data[start:stop] along the outermost dimension, read into memory of its own; a scalar counts as one row."""
        shape = self.shape or (1,)
        width = self.nbytes // shape[0] if shape[0] else 0
        words = self.shard.read(self.offset + start * width, (stop - start) * width).view(DTYPES[self.dtype][0])
        return words.reshape(stop - start, *shape[1:])

    @property
    def source_type(self) -> str:
        return DTYPES[self.dtype][1]


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """The directory of one file. Raises FormatError if it is truncated, overlapping or otherwise malformed."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            length = header_length(path, file.read(8), size)
            raw = file.read(length)
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None
    return directory(path, raw, size, LocalShard(path))


def header_length(path: Path, first: bytes, size: int) -> int:
    """Bytes of the JSON header, which the first 8 bytes of a file of this size tell. Raises FormatError."""
    if size < 9:
        raise FormatError(f"{path}: {size} bytes are too few for a safetensors file")
    length = int.from_bytes(first[:8], "little")
    if length > min(size - 8, MAX_HEADER):
        raise FormatError(f"{path}: a header of {length} bytes in a file of {size}: truncated, or not safetensors")
    return length


def directory(path: Path, raw: bytes, size: int, shard: Shard) -> dict[str, StoredTensor]:
    """The tensors that a JSON header announces, in a file of `size` bytes. Raises FormatError as `read_safetensors`."""
    header, base = _header(path, raw), 8 + len(raw)
    tensors = {name: _entry(path, name, entry, base, shard) for name, entry in header.items() if name != "__metadata__"}
    end = base
    for tensor in sorted(tensors.values(), key=lambda t: t.offset):
        if tensor.offset < end and tensor.nbytes:
            raise FormatError(f"{path}: tensor {tensor.name} overlaps the one before it")
        end = max(end, tensor.offset + tensor.nbytes)
    if end > size:
        raise FormatError(f"{path}: the file is {end - size} bytes shorter than its header says: truncated (download it again)")
    return tensors


def _released(path: Path) -> dict[str, StoredTensor]:
    left = read_released(path)
    return directory(path, left.header, left.size, ReleasedShard(path))


def _header(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: the header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise FormatError(f"{path}: the header is not a JSON object")
    return header


def _entry(path: Path, name: str, entry: Any, base: int, shard: Shard) -> StoredTensor:
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
    return StoredTensor(name, dtype, shape, path, base + begin, end - begin, shard)


def find_indexes(folder: Path) -> list[Path]:
    """The index files of a checkpoint folder: none or one where it is as it should be."""
    return sorted(folder.glob("*.safetensors.index.json"))


Opener = Callable[[], dict[str, StoredTensor]]  # gives the directory of a shard


def local_shards(folder: Path) -> dict[str, Opener]:
    """The *.safetensors files of a folder in order, by name, and those that were deleted after use."""
    names = {path.name for path in folder.glob("*.safetensors")} | set(is_released(folder))
    paths = {name: folder / name for name in sorted(names)}
    return {n: (lambda p=p: read_safetensors(p) if p.exists() else _released(p)) for n, p in paths.items()}


def shard_names(folder: Path) -> dict[str, str] | None:
    """Tensor name -> name of its shard, as the folder's index file says; None if it has none.

    Raises FormatError for an index that is malformed or names files elsewhere, and for several.
    """
    indexes = find_indexes(folder)
    if len(indexes) > 1:
        raise FormatError(f"{folder}: several index files ({', '.join(p.name for p in indexes)}); keep the one to use")
    if not indexes:
        return None
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
    return weight_map


def open_safetensors(folder: Path, shards: Mapping[str, Opener] | None = None) -> dict[str, StoredTensor]:
    """All tensors of a checkpoint folder: by its index file if it has one, else of every shard, in order.

    shards: by name, where they are not in the folder. Raises FormatError if there is none, a shard is missing, lies outside
    the folder by its name, or a tensor is missing or twice there.
    """
    weight_map = shard_names(folder)
    there = local_shards(folder) if shards is None else shards
    if weight_map is not None:
        names = sorted(set(weight_map.values()))
        missing = [name for name in names if name not in there]
        if missing:
            raise FormatError(f"{folder}: {len(missing)} of {len(names)} shards are missing, the first is {missing[0]}")
    else:
        names = list(there)
        if not names:
            raise FormatError(f"{folder}: no *.safetensors file in this folder")
    tensors: dict[str, StoredTensor] = {}
    for shard in names:
        for name, tensor in there[shard]().items():
            if name in tensors:
                raise FormatError(f"{folder / shard}: tensor {name} is also in {tensors[name].path.name}")
            tensors[name] = tensor
    if weight_map is not None:
        absent = [name for name in weight_map if name not in tensors]
        if absent:
            raise FormatError(f"{folder}: the index names {len(absent)} tensors that no shard holds, the first is {absent[0]}")
    return tensors
