"""Reading the header of a GGUF v3 file: metadata and tensor directory.

Format: ggml-org/ggml docs/gguf.md. A metadata value's Python type gives its GGUF type: numpy scalars (np.uint32(5)) and arrays
for numbers, bool, str, and list[str] for arrays of strings (StringArray for many), so that metadata can be written again
unchanged.
"""

from __future__ import annotations

import mmap
import struct
from array import array
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import FormatError
from ..operating_system.memory import release_pages
from .string_array import StringArray, string_starts
from .tensor_table import FileTensors, TensorKind
from .types import TYPES

MAGIC = b"GGUF"
VERSION = 3
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
_FEW_STRINGS = 64  # of an array, which are decoded at once
_RELEASED = 1 << 14  # entries of a header, after which the pages with them are not kept in memory
MAX_NAME = 1024  # bytes; longer than any real key or tensor name, so a larger length means damage

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


def whole_number(path: Path, metadata: dict[str, Any], key: str, default: int) -> int:
    """The value of an integer key of any width. Raises FormatError for another type."""
    value = metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise FormatError(f"{path}: {key} is {value!r:.60}; a whole number is needed")
    return int(value)


class HeaderParser:
    """One pass over a header. Every count is checked against the remaining bytes before anything is allocated for it.

    buffer: the mapped file, or its header alone. size: of the file, in bytes
    """

    def __init__(self, path: Path, buffer: mmap.mmap | bytes, size: int):
        self.path, self.buffer, self.position, self.size = path, buffer, 0, size

    def error(self, problem: str) -> FormatError:
        return FormatError(f"{self.path}: {problem} (at byte {self.position})")

    def parse(self) -> tuple[dict[str, Any], FileTensors, int]:
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
        alignment = whole_number(self.path, metadata, "general.alignment", DEFAULT_ALIGNMENT)
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

    def strings(self, count: int) -> list[str] | StringArray:
        begin = self.position
        starts, is_whole = string_starts(self.buffer, begin, count)
        self.position = int(starts[-1])
        if not is_whole:
            raise self.error(f"string {len(starts) - 1} of {count} reaches beyond the end: truncated or damaged")
        strings = StringArray(self.buffer[begin : self.position], starts - begin)
        return strings if count > _FEW_STRINGS else list(strings)

    def tensors(self, count: int, alignment: int) -> FileTensors:
        # There may be a million: one loop over local variables, and each kind of tensor is checked once.
        buffer, position, size = self.buffer, self.position, self.size
        number_at, dims_at = struct.Struct("<Q").unpack_from, struct.Struct("<I").unpack_from
        names: dict[str, None] = {}
        known: dict[bytes, TensorKind] = {}
        kinds: list[TensorKind] = []
        offsets = array("Q")
        for number in range(count):
            name_end = position + 8 + (number_at(buffer, position)[0] if position + 8 <= size else 0)
            if name_end + 4 > size or name_end - position - 8 > MAX_NAME:
                self.position = position
                raise self.error(f"the name of tensor {number} is too long, or the file ends in it: truncated or damaged")
            raw = buffer[position + 8 : name_end]
            try:
                name = raw.decode()
            except UnicodeDecodeError:
                raise self.error(f"the name of tensor {number} is not UTF-8: {raw!r:.80}") from None
            self.position = position = name_end
            if name in names:
                raise self.error(f"tensor {name} appears twice")
            names[name] = None
            n_dims = dims_at(buffer, position)[0]
            if not 1 <= n_dims <= MAX_DIMS:
                raise self.error(f"tensor {name} has {n_dims} dimensions; 1 to {MAX_DIMS} are possible")
            end = position + 8 + 8 * n_dims
            if end + 8 > size:
                raise self.error("the file ends inside its header: truncated")
            spelt = buffer[position + 4 : end]
            kind = known.get(spelt)
            if kind is None:
                kind = known[spelt] = self.kind(name, *struct.unpack(f"<{n_dims}QI", spelt))
            offset = number_at(buffer, end)[0]
            if offset % alignment:
                raise self.error(f"tensor {name} lies at offset {offset}, not a multiple of the alignment {alignment}")
            kinds.append(kind)
            offsets.append(offset)
            position = end + 8
            if number % _RELEASED == 0 and isinstance(buffer, mmap.mmap):
                release_pages(buffer, position)
        self.position = position
        return self.locate(list(names), kinds, offsets, -(-position // alignment) * alignment, alignment)

    def kind(self, name: str, *shape_and_type: int) -> TensorKind:
        """Shape and type of a tensor, checked."""
        *dimensions, type_id = shape_and_type
        shape, tensor_type = tuple(dimensions), TYPES.by_id(type_id)
        if 0 in shape or prod(shape) >= 1 << 62:
            raise self.error(f"tensor {name} has the impossible shape {shape}")
        if tensor_type.is_known and not tensor_type.fits(shape[0]):
            raise self.error(f"tensor {name} is {tensor_type.name}, which cannot hold rows of {shape[0]} elements")
        return TensorKind(shape, tensor_type, tensor_type.nbytes(shape) if tensor_type.is_known else -1)

    def locate(
        self, names: list[str], kinds: list[TensorKind], offsets: array[int], data_start: int, alignment: int
    ) -> FileTensors:
        """Checks that the tensors are inside the file and do not overlap; one of unknown type ends where the next begins."""
        limit = 1 << 61  # beyond any file, and sums of three such numbers are still int64
        starts = np.minimum(np.frombuffer(offsets, np.uint64) if names else np.empty(0, np.uint64), limit).astype(np.int64)
        nbytes = np.fromiter((min(kind.nbytes, limit) for kind in kinds), np.int64, len(kinds))
        order = np.argsort(starts, kind="stable")
        following = np.append(starts[order][1:], self.size - data_start)
        lengths = nbytes[order]
        lengths = np.where(lengths < 0, following - starts[order], lengths)
        ends = starts[order] + lengths
        is_beyond = (lengths < 0) | (ends > self.size - data_start)
        overlaps = ends[:-1] > following[:-1]
        if is_beyond.any() or overlaps.any():
            rank = int(np.argmax(is_beyond | np.append(overlaps, False)))
            name = names[order[rank]]
            if is_beyond[rank]:
                excess = data_start + offsets[order[rank]] + max(kinds[order[rank]].nbytes, 0) - self.size
                raise FormatError(f"{self.path}: tensor {name} reaches {excess} bytes beyond the end of the file: truncated")
            raise FormatError(f"{self.path}: tensors {name} and {names[order[rank + 1]]} overlap")
        unknown = np.flatnonzero(nbytes < 0).tolist()
        nbytes[order] = lengths
        for at in unknown:
            kind = kinds[at]
            kinds[at] = kind._replace(type=TYPES.of_size(kind.type, prod(kind.shape), int(nbytes[at]), alignment))
        mapped = np.frombuffer(self.buffer, np.uint8)
        return FileTensors(self.path, mapped, min(data_start, self.size), names, kinds, starts + data_start, nbytes)
