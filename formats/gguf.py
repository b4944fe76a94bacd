"""Reading GGUF v3 files: metadata, tensor directory, memory-mapped data; a split model opens as one.

Layout: the gguf specification (ggml-org/ggml docs/gguf.md). Metadata values carry their GGUF type as their own type: numpy
scalars (np.uint32(5)) and arrays for numbers, bool, str, and list[str] for arrays of strings, so that what was read can be
written again unchanged.
"""

from __future__ import annotations

import hashlib
import mmap
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import FormatError
from .file_range import check_reaches, read_span
from .source import stamp
from .types import TYPES, TensorType

MAGIC = b"GGUF"
VERSION = 3
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
MAX_NAME = 1024  # longer than any real key or tensor name; keeps a broken length from being believed
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

    shape in ne order (shape[0] is the row length); offset in bytes from the start of its file; nbytes its exact size.
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
        """uint8 view [rows, row_bytes] of the mapped file; nothing is read until it is touched.

        Raises FormatError when the file has become shorter; it must not become so while the view is used.
        """
        check_reaches(self.path, self.offset + self.nbytes)
        flat = self._map[self.offset : self.offset + self.nbytes]
        return flat.reshape(self.n_rows, -1) if self.type.is_known else flat.reshape(1, -1)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows start ... stop of `data`, read into memory of their own."""
        width = self.type.row_bytes(self.shape[0])
        return read_span(self.path, self.offset + start * width, (stop - start) * width).reshape(stop - start, width)


@dataclass(frozen=True)
class GGUFFile:
    """An open GGUF model: one file, or all shards of a split one.

    metadata is the first shard's, without the split.* keys of a split model (`n_splits` tells how many there were).
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    paths: list[Path]
    alignment: int

    @property
    def n_splits(self) -> int:
        return len(self.paths)

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    @property
    def identity(self) -> str:
        """Digest of every tensor's name, shape, type, shard and place, and of every shard's size and time of change: what a
        resumed job has to find again. Raises FormatError if a shard is gone."""
        digest = hashlib.sha256(stamp(self.paths))
        for info in self.tensors.values():
            line = f"{info.name} {info.shape} {info.type.name} {info.offset} {info.path.name}\n"
            digest.update(line.encode("utf-8", "surrogateescape"))
        return digest.hexdigest()


def open_gguf(path: str | Path) -> GGUFFile:
    """Opens a GGUF file, or the whole split model when given any of its shards.

    Raises FormatError for anything that is not a whole, well-formed GGUF v3 file, naming the file and the place.
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
    metadata, tensors, alignment = _read_file(paths[0])
    if _whole(paths[0], metadata, "split.count", count) != count:
        raise FormatError(f"{paths[0]}: its name says {count} shards, its metadata {metadata['split.count']}")
    merged = {t.name: t for t in tensors}
    for number, shard in enumerate(paths[1:], 1):
        shard_metadata, shard_tensors, _ = _read_file(shard)
        if _whole(shard, shard_metadata, "split.no", number) != number:
            raise FormatError(f"{shard}: its metadata says that it is shard {shard_metadata['split.no']}, counted from 0")
        for tensor in shard_tensors:
            if tensor.name in merged:
                raise FormatError(f"{shard}: tensor {tensor.name} is also in {merged[tensor.name].path.name}")
            merged[tensor.name] = tensor
    declared = _whole(paths[0], metadata, "split.tensors.count", len(merged))
    if declared != len(merged):
        raise FormatError(f"{paths[0]}: {declared} tensors are declared for the whole model, its shards hold {len(merged)}")
    metadata = {k: v for k, v in metadata.items() if not k.startswith("split.")}
    return GGUFFile(paths[0], metadata, merged, paths, alignment)


def _whole(path: Path, metadata: dict[str, Any], key: str, default: int) -> int:
    """The value of a key that has to be one whole number, of whatever width."""
    value = metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise FormatError(f"{path}: {key} is {value!r:.60}; a whole number is needed")
    return int(value)


def _read_file(path: Path) -> tuple[dict[str, Any], list[TensorInfo], int]:
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
    """One pass over the header. Every count is checked against the bytes that are left before anything is allocated for it."""

    def __init__(self, path: Path, mapped: mmap.mmap):
        self.path, self.buffer, self.at, self.size = path, mapped, 0, len(mapped)

    def fail(self, problem: str) -> FormatError:
        return FormatError(f"{self.path}: {problem} (at byte {self.at})")

    def parse(self) -> tuple[dict[str, Any], list[TensorInfo], int]:
        if self.buffer[:4] != MAGIC:
            raise FormatError(f"{self.path}: not a GGUF file (it begins with {bytes(self.buffer[:4])!r})")
        self.at = 4
        version = self.unpack("<I", 4)
        if version != VERSION:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            note = "it is big-endian" if swapped == VERSION else f"only version {VERSION} can be read"
            raise self.fail(f"GGUF version {version}: {note}")
        n_tensors, n_keys = self.unpack("<Q", 8), self.unpack("<Q", 8)
        self.expect(n_tensors, 24, "tensors")
        self.expect(n_keys, 13, "metadata entries")
        metadata = self.metadata(n_keys)
        alignment = _whole(self.path, metadata, "general.alignment", DEFAULT_ALIGNMENT)
        if alignment <= 0 or alignment & (alignment - 1) or alignment > 1 << 20:
            raise self.fail(f"general.alignment is {alignment}; it has to be a power of two")
        return metadata, self.tensors(n_tensors, alignment), alignment

    def expect(self, count: int, smallest: int, what: str) -> None:
        if count * smallest > self.size - self.at:
            raise self.fail(f"{count} {what} are announced, but only {self.size - self.at} bytes follow: truncated or damaged")

    def unpack(self, form: str, width: int) -> Any:
        if self.at + width > self.size:
            raise self.fail("the file ends inside its header: truncated")
        (value,) = struct.unpack_from(form, self.buffer, self.at)
        self.at += width
        return value

    def string(self, limit: int | None = None) -> str:
        length = self.unpack("<Q", 8)
        if length > self.size - self.at or (limit is not None and length > limit):
            raise self.fail(f"a string of {length} bytes: truncated or damaged")
        text = self.buffer[self.at : self.at + length]
        self.at += length
        return text.decode("utf-8", "surrogateescape")

    def metadata(self, count: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for _ in range(count):
            key = self.string(MAX_NAME)
            if key in values:
                raise self.fail(f"metadata key {key} appears twice")
            values[key] = self.value(self.unpack("<I", 4), key, 0)
        return values

    def value(self, kind: int, key: str, depth: int) -> Any:
        if kind in NUMBERS:
            dtype = NUMBERS[kind]
            self.expect(1, dtype.itemsize, f"value of {key}")
            self.at += dtype.itemsize
            return np.frombuffer(self.buffer, dtype, 1, self.at - dtype.itemsize)[0]
        if kind == BOOL:
            return bool(self.unpack("<B", 1))
        if kind == STRING:
            return self.string()
        if kind != ARRAY or depth > 2:
            raise self.fail(
                f"metadata key {key} has unknown value type {kind}" if kind != ARRAY else f"{key} is nested too deep"
            )
        item, count = self.unpack("<I", 4), self.unpack("<Q", 8)
        if item in NUMBERS or item == BOOL:
            dtype = NUMBERS.get(item, np.dtype("u1"))
            self.expect(count, dtype.itemsize, f"values of {key}")
            array = np.frombuffer(self.buffer, dtype, count, self.at).copy()
            self.at += count * dtype.itemsize
            return array.astype(bool) if item == BOOL else array
        if item == STRING:
            self.expect(count, 8, f"strings of {key}")
            return self.strings(count)
        self.expect(count, 12, f"arrays of {key}")
        return [self.value(item, key, depth + 1) for _ in range(count)]

    def strings(self, count: int) -> list[str]:
        # A vocabulary has 100,000 of these: one loop over local names instead of a call per string.
        buffer, at, size, unpack = self.buffer, self.at, self.size, struct.Struct("<Q").unpack_from
        out: list[str] = []
        append: Callable[[str], None] = out.append
        for _ in range(count):
            if at + 8 > size:
                break
            length = unpack(buffer, at)[0]
            at += 8
            if length > size - at:
                break
            append(buffer[at : at + length].decode("utf-8", "surrogateescape"))
            at += length
        self.at = at
        if len(out) < count:
            raise self.fail(f"string {len(out)} of {count} reaches beyond the end: truncated or damaged")
        return out

    def tensors(self, count: int, alignment: int) -> list[TensorInfo]:
        directory: list[tuple[str, tuple[int, ...], TensorType, int]] = []
        names: set[str] = set()
        for _ in range(count):
            name = self.string(MAX_NAME)
            if name in names:
                raise self.fail(f"tensor {name} appears twice")
            names.add(name)
            n_dims = self.unpack("<I", 4)
            if not 1 <= n_dims <= MAX_DIMS:
                raise self.fail(f"tensor {name} has {n_dims} dimensions; 1 to {MAX_DIMS} are possible")
            shape = tuple(self.unpack("<Q", 8) for _ in range(n_dims))
            kind = TYPES.by_id(self.unpack("<I", 4))
            offset = self.unpack("<Q", 8)
            if 0 in shape or prod(shape) >= 1 << 62:
                raise self.fail(f"tensor {name} has the impossible shape {shape}")
            if kind.is_known and not kind.fits(shape[0]):
                raise self.fail(f"tensor {name} is {kind.name}, which cannot hold rows of {shape[0]} elements")
            if offset % alignment:
                raise self.fail(f"tensor {name} lies at offset {offset}, not a multiple of the alignment {alignment}")
            directory.append((name, shape, kind, offset))
        base = -(-self.at // alignment) * alignment
        return self.place(directory, base)

    def place(self, directory: list[tuple[str, tuple[int, ...], TensorType, int]], base: int) -> list[TensorInfo]:
        """Checks that the tensors lie in the file side by side; a tensor of unknown type reaches to its neighbour."""
        data = np.frombuffer(self.buffer, np.uint8)
        order = sorted(range(len(directory)), key=lambda i: directory[i][3])
        placed: dict[int, TensorInfo] = {}
        for rank, index in enumerate(order):
            name, shape, kind, offset = directory[index]
            following = directory[order[rank + 1]][3] if rank + 1 < len(order) else self.size - base
            nbytes = kind.nbytes(shape) if kind.is_known else following - offset
            if nbytes < 0 or base + offset + nbytes > self.size:
                short = base + offset + nbytes - self.size
                raise FormatError(f"{self.path}: tensor {name} reaches {short} bytes beyond the end of the file: truncated")
            if rank + 1 < len(order) and offset + nbytes > following:
                raise FormatError(f"{self.path}: tensors {name} and {directory[order[rank + 1]][0]} overlap")
            placed[index] = TensorInfo(name, shape, kind, base + offset, nbytes, self.path, data)
        return [placed[i] for i in range(len(directory))]
