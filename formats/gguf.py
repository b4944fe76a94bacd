"""Reading GGUF v3 files: metadata, tensor directory, memory-mapped data; a split model opens as one.

Format: ggml-org/ggml docs/gguf.md. A metadata value's Python type tells its GGUF type: numpy scalars (np.uint32(5)) and arrays
for numbers, bool, str, and list[str] for arrays of strings, so that metadata can be written again unchanged.
"""

from __future__ import annotations

import hashlib
import mmap
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import FormatError
from .file_range import check_file_size, check_regular, read_range
from .source import files_stamp
from .types import TYPES, TensorType

MAGIC = b"GGUF"
VERSION = 3
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
MAX_NAME = 1024  # bytes; longer than any real key or tensor name, so a larger length means damage
PLAN_KEY = "split.plan"  # of a shard: a digest of the plan that it was written by
SPLIT_NAME = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")

# GGUF value type id -> numpy dtype; 7 is bool, 8 string, 9 array
NUMBERS = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
BOOL, STRING, ARRAY = 7, 8, 9


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a GGUF file.

    shape   in ne order: shape[0] is the row length
    offset  of its first byte from the start of its file; nbytes: its exact size
    path    the file, for a split model its shard
    """

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int
    nbytes: int
    path: Path
    _map: np.ndarray = field(repr=False, compare=False)

    @property
    def n_rows(self) -> int:
        return prod(self.shape[1:])

    @property
    def data(self) -> np.ndarray:
        """uint8 view [rows, row_bytes] of the mapped file; nothing is read until it is accessed.

        Raises FormatError if the file has become shorter; it must not become shorter while the view is in use.
        """
        check_file_size(self.path, self.offset + self.nbytes)
        flat = self._map[self.offset : self.offset + self.nbytes]
        return flat.reshape(self.n_rows, -1) if self.type.is_known else flat.reshape(1, -1)

    def read(self, start: int, stop: int) -> np.ndarray:
        """data[start:stop] as a copy: uint8 [stop - start, row_bytes]. Raises FormatError."""
        row_bytes = self.type.row_bytes(self.shape[0])
        data = read_range(self.path, self.offset + start * row_bytes, (stop - start) * row_bytes)
        return data.reshape(stop - start, row_bytes)


@dataclass(frozen=True)
class GGUFFile:
    """An open GGUF model: one file, or all shards of a split one.

    path      the file, or the first shard; paths: all shards
    metadata  of the first shard, without the split.* keys of a split model
    tensors   name -> tensor, in file order
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    paths: list[Path]
    alignment: int

    @property
    def n_splits(self) -> int:
        """The number of files."""
        return len(self.paths)

    @property
    def architecture(self) -> str:
        """general.architecture; '' if the metadata do not say."""
        return str(self.metadata.get("general.architecture", ""))

    @property
    def identity(self) -> str:
        """Digest of every tensor's name, shape, type, shard and offset and of every shard's size and modification time, which a
        resumed job compares. Raises FormatError if a shard is gone."""
        digest = hashlib.sha256(files_stamp(self.paths))
        for info in self.tensors.values():
            line = f"{info.name} {info.shape} {info.type.name} {info.offset} {info.path.name}\n"
            digest.update(line.encode("utf-8", "surrogateescape"))
        return digest.hexdigest()


def open_gguf(path: str | Path) -> GGUFFile:
    """Opens a GGUF file, or all shards of a split model when given any of them; no tensor data is read.

    Raises FormatError for anything but complete, well-formed GGUF v3 files, naming the file and the byte.
    """
    path = Path(path)
    match = SPLIT_NAME.match(path.name)
    if match is None or int(match["count"]) < 1:
        metadata, tensors, alignment = _read_file(path)
        return GGUFFile(path, metadata, {t.name: t for t in tensors}, [path], alignment)

    count = int(match["count"])
    paths = [path.with_name(f"{match['stem']}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    missing = [p.name for p in paths if not p.exists()]
    if missing:
        raise FormatError(f"{path}: {len(missing)} of {count} shards are missing, the first is {missing[0]}")
    opened = [_read_file(shard) for shard in paths]
    metadata = opened[0][0]
    if _integer(paths[0], metadata, "split.count", count) != count:
        raise FormatError(f"{paths[0]}: its name says {count} shards, its metadata {metadata['split.count']}")
    for number, (shard, (shard_metadata, _, _)) in enumerate(zip(paths, opened, strict=True)):
        if number and _integer(shard, shard_metadata, "split.no", number) != number:
            raise FormatError(f"{shard}: its metadata says that it is shard {shard_metadata['split.no']}, counted from 0")
    _check_plans(paths, [shard_metadata.get(PLAN_KEY) for shard_metadata, _, _ in opened])
    merged = _merged(opened)
    declared = _integer(paths[0], metadata, "split.tensors.count", len(merged))
    if declared != len(merged):
        raise FormatError(f"{paths[0]}: {declared} tensors are declared for the model, its shards hold {len(merged)}")
    return GGUFFile(paths[0], _without_split(metadata), merged, paths, opened[0][2])


def open_shards(paths: Sequence[Path]) -> GGUFFile:
    """Opens some files of a split, or a whole model's, as they are; the metadata are the first's. Raises FormatError."""
    opened = [_read_file(path) for path in paths]
    return GGUFFile(paths[0], _without_split(opened[0][0]), _merged(opened), list(paths), opened[0][2])


def _merged(opened: Sequence[tuple[dict[str, Any], list[TensorInfo], int]]) -> dict[str, TensorInfo]:
    """The tensors of all shards by name. Raises FormatError for one that is there twice."""
    merged: dict[str, TensorInfo] = {}
    for _, tensors, _ in opened:
        for tensor in tensors:
            if tensor.name in merged:
                raise FormatError(f"{tensor.path}: tensor {tensor.name} is also in {merged[tensor.name].path.name}")
            merged[tensor.name] = tensor
    return merged


def _check_plans(paths: Sequence[Path], plans: Sequence[Any]) -> None:
    """Raises FormatError for a shard that was written by another plan than most of them."""
    usual = max(plans, key=plans.count)
    foreign = [path for path, plan in zip(paths, plans, strict=True) if plan != usual]
    if foreign:
        other = next(path for path, plan in zip(paths, plans, strict=True) if plan == usual)
        more = f" (and {len(foreign) - 1} more)" if len(foreign) > 1 else ""
        raise FormatError(
            f"{foreign[0]}{more} was written by another plan than {other.name}: with other types, importance data, metadata or "
            "another version; make it again with the options of the others"
        )


def _without_split(metadata: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in metadata.items() if not k.startswith("split.")}


def _integer(path: Path, metadata: dict[str, Any], key: str, default: int) -> int:
    """The value of an integer key of any width. Raises FormatError for another type."""
    value = metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise FormatError(f"{path}: {key} is {value!r:.60}; a whole number is needed")
    return int(value)


def _read_file(path: Path) -> tuple[dict[str, Any], list[TensorInfo], int]:
    check_regular(path)
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < 24:
                raise FormatError(f"{path}: {size} bytes are too few for a GGUF file")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None
    return _Parser(path, mapped).parse()


class _Parser:
    """One pass over a header. Every count is checked against the remaining bytes before anything is allocated for it."""

    def __init__(self, path: Path, mapped: mmap.mmap):
        self.path, self.buffer, self.position, self.size = path, mapped, 0, len(mapped)

    def error(self, problem: str) -> FormatError:
        return FormatError(f"{self.path}: {problem} (at byte {self.position})")

    def parse(self) -> tuple[dict[str, Any], list[TensorInfo], int]:
        if self.buffer[:4] != MAGIC:
            raise FormatError(f"{self.path}: not a GGUF file (it begins with {bytes(self.buffer[:4])!r})")
        self.position = 4
        version = self.unpack("<I", 4)
        if version != VERSION:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            note = "it is big-endian" if swapped == VERSION else f"only version {VERSION} can be read"
            raise self.error(f"GGUF version {version}: {note}")
        n_tensors, n_keys = self.unpack("<Q", 8), self.unpack("<Q", 8)
        self.check_count(n_tensors, 24, "tensors")
        self.check_count(n_keys, 13, "metadata entries")
        metadata = self.metadata(n_keys)
        alignment = _integer(self.path, metadata, "general.alignment", DEFAULT_ALIGNMENT)
        if alignment <= 0 or alignment & (alignment - 1) or alignment > 1 << 20:
            raise self.error(f"general.alignment is {alignment}; it has to be a power of two")
        return metadata, self.tensors(n_tensors, alignment), alignment

    def check_count(self, count: int, min_bytes: int, what: str) -> None:
        """Raises FormatError if `count` items of at least min_bytes each cannot be in the rest of the file."""
        if count * min_bytes > self.size - self.position:
            raise self.error(
                f"{count} {what} are announced, but only {self.size - self.position} bytes follow: truncated or damaged"
            )

    def unpack(self, format: str, nbytes: int) -> Any:
        if self.position + nbytes > self.size:
            raise self.error("the file ends inside its header: truncated")
        (value,) = struct.unpack_from(format, self.buffer, self.position)
        self.position += nbytes
        return value

    def string(self, limit: int | None = None) -> str:
        length = self.unpack("<Q", 8)
        if length > self.size - self.position or (limit is not None and length > limit):
            raise self.error(f"a string of {length} bytes: truncated or damaged")
        text = self.buffer[self.position : self.position + length]
        self.position += length
        return text.decode("utf-8", "surrogateescape")

    def metadata(self, count: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for _ in range(count):
            key = self.string(MAX_NAME)
            if key in values:
                raise self.error(f"metadata key {key} appears twice")
            values[key] = self.value(self.unpack("<I", 4), key, 0)
        return values

    def value(self, type_id: int, key: str, depth: int) -> Any:
        if type_id in NUMBERS:
            dtype = NUMBERS[type_id]
            self.check_count(1, dtype.itemsize, f"value of {key}")
            self.position += dtype.itemsize
            return np.frombuffer(self.buffer, dtype, 1, self.position - dtype.itemsize)[0]
        if type_id == BOOL:
            return bool(self.unpack("<B", 1))
        if type_id == STRING:
            return self.string()
        if type_id != ARRAY:
            raise self.error(f"metadata key {key} has unknown value type {type_id}")
        if depth > 2:
            raise self.error(f"{key} is nested too deep")
        item_type, count = self.unpack("<I", 4), self.unpack("<Q", 8)
        if item_type in NUMBERS or item_type == BOOL:
            dtype = NUMBERS.get(item_type, np.dtype("u1"))
            self.check_count(count, dtype.itemsize, f"values of {key}")
            array = np.frombuffer(self.buffer, dtype, count, self.position).copy()
            self.position += count * dtype.itemsize
            return array.astype(bool) if item_type == BOOL else array
        if item_type == STRING:
            self.check_count(count, 8, f"strings of {key}")
            return self.strings(count)
        self.check_count(count, 12, f"arrays of {key}")
        return [self.value(item_type, key, depth + 1) for _ in range(count)]

    def strings(self, count: int) -> list[str]:
        # A vocabulary has 100,000 of these: one loop over local variables instead of a call per string.
        buffer, position, size, unpack = self.buffer, self.position, self.size, struct.Struct("<Q").unpack_from
        out: list[str] = []
        append: Callable[[str], None] = out.append
        for _ in range(count):
            if position + 8 > size:
                break
            length = unpack(buffer, position)[0]
            position += 8
            if length > size - position:
                break
            append(buffer[position : position + length].decode("utf-8", "surrogateescape"))
            position += length
        self.position = position
        if len(out) < count:
            raise self.error(f"string {len(out)} of {count} reaches beyond the end: truncated or damaged")
        return out

    def tensors(self, count: int, alignment: int) -> list[TensorInfo]:
        directory: list[tuple[str, tuple[int, ...], TensorType, int]] = []
        names: set[str] = set()
        for _ in range(count):
            name = self.string(MAX_NAME)
            if any("\ud800" <= c <= "\udfff" for c in name):
                raise self.error(
                    f"the name of tensor {len(names)} is not UTF-8: {name.encode('utf-8', 'surrogateescape')!r:.80}"
                )
            if name in names:
                raise self.error(f"tensor {name} appears twice")
            names.add(name)
            n_dims = self.unpack("<I", 4)
            if not 1 <= n_dims <= MAX_DIMS:
                raise self.error(f"tensor {name} has {n_dims} dimensions; 1 to {MAX_DIMS} are possible")
            shape = tuple(self.unpack("<Q", 8) for _ in range(n_dims))
            tensor_type = TYPES.by_id(self.unpack("<I", 4))
            offset = self.unpack("<Q", 8)
            if 0 in shape or prod(shape) >= 1 << 62:
                raise self.error(f"tensor {name} has the impossible shape {shape}")
            if tensor_type.is_known and not tensor_type.fits(shape[0]):
                raise self.error(f"tensor {name} is {tensor_type.name}, which cannot hold rows of {shape[0]} elements")
            if offset % alignment:
                raise self.error(f"tensor {name} lies at offset {offset}, not a multiple of the alignment {alignment}")
            directory.append((name, shape, tensor_type, offset))
        data_start = -(-self.position // alignment) * alignment
        return self.locate(directory, data_start)

    def locate(self, directory: list[tuple[str, tuple[int, ...], TensorType, int]], data_start: int) -> list[TensorInfo]:
        """Checks that the tensors are inside the file and do not overlap; one of unknown type ends where the next begins."""
        data = np.frombuffer(self.buffer, np.uint8)
        order = sorted(range(len(directory)), key=lambda i: directory[i][3])
        located: dict[int, TensorInfo] = {}
        for rank, index in enumerate(order):
            name, shape, tensor_type, offset = directory[index]
            next_offset = directory[order[rank + 1]][3] if rank + 1 < len(order) else self.size - data_start
            nbytes = tensor_type.nbytes(shape) if tensor_type.is_known else next_offset - offset
            if nbytes < 0 or data_start + offset + nbytes > self.size:
                excess = data_start + offset + nbytes - self.size
                raise FormatError(f"{self.path}: tensor {name} reaches {excess} bytes beyond the end of the file: truncated")
            if rank + 1 < len(order) and offset + nbytes > next_offset:
                raise FormatError(f"{self.path}: tensors {name} and {directory[order[rank + 1]][0]} overlap")
            located[index] = TensorInfo(name, shape, tensor_type, data_start + offset, nbytes, self.path, data)
        return [located[i] for i in range(len(directory))]
