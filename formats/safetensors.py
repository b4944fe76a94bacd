"""Reading safetensors: one file, or a checkpoint folder of shards with or without an index file.

Layout of a file (huggingface/safetensors): 8 bytes of header length, a JSON header, the tensors' bytes. The `safetensors`
package is not used, since its numpy interface has no fp8.
"""

from __future__ import annotations

import json
import mmap
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..data_classes import dataclass
from ..errors import FormatError
from .deleted_shards import deleted_error, deleted_shard_names, read_record
from .file_range import check_file_size, check_regular, read_range, read_text
from .tensor_table import TensorTable

# safetensors dtype -> (numpy dtype of the stored words, name as a source type)
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
_LIMIT = 1 << 60  # bytes and dimensions, beyond any file
MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library
# Bytes of a tensor that is read instead of mapped: at the first touch of a mapped page the kernel reads far more than a few
# numbers, and Kimi-K2.5 has 69,120 tensors of two numbers, scattered over all shards.
_SMALL = 4096


class Shard(Protocol):
    """The bytes of a safetensors file, wherever they are."""

    def read(self, offset: int, nbytes: int) -> np.ndarray:
        """nbytes from `offset` of the file on -> uint8 [nbytes], a copy. Raises FormatError if they cannot be read."""
        ...

    def view(self, offset: int, nbytes: int) -> np.ndarray:
        """As `read`, but read-only: a view of the mapped file where there is one."""
        ...


class LocalShard:
    """A file on this machine, mapped when the first view is asked for. was_read: whether tensor data has been read."""

    def __init__(self, path: Path):
        self.path = path
        self.was_read = False
        self._map: np.ndarray | None = None

    def read(self, offset: int, nbytes: int) -> np.ndarray:
        """A copy of bytes of the file: uint8 [nbytes]. Raises FormatError if it ends before them."""
        self.was_read = True
        return read_range(self.path, offset, nbytes)

    def view(self, offset: int, nbytes: int) -> np.ndarray:
        """Bytes of the mapped file, read as they are accessed: read-only uint8 [nbytes]. Raises FormatError as `read`."""
        if nbytes <= _SMALL:
            words = self.read(offset, nbytes)
            words.flags.writeable = False
            return words
        self.was_read = True
        if self._map is None:
            try:
                with self.path.open("rb") as file:
                    self._map = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
            except (OSError, ValueError) as error:
                raise FormatError(f"{self.path}: {getattr(error, 'strerror', None) or error}") from None
        check_file_size(self.path, offset + nbytes)  # touching mapped pages beyond the file's end would kill the process
        return self._map[offset : offset + nbytes]

    def header(self) -> bytes:
        """The JSON of the header. Raises FormatError if it cannot be read."""
        length = int.from_bytes(read_range(self.path, 0, 8).tobytes(), "little")
        return read_range(self.path, 8, length).tobytes()

    def close(self) -> None:
        """Drops the mapping: while it exists, a deleted file still takes its space on disk."""
        self._map = None


class DeletedShard:
    """A shard that was deleted once its tensors were written; only its header is left (see `deleted_shards`)."""

    def __init__(self, path: Path):
        self.path = path

    def read(self, offset: int, nbytes: int) -> np.ndarray:
        """Raises FormatError, which says how the job that deleted the shard is resumed."""
        raise deleted_error(self.path)

    view = read


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a safetensors file.

    dtype   as safetensors spells it, a key of DTYPES
    shape   outermost dimension first
    offset  of its first byte in the file; nbytes: its size
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int
    shard: Shard = field(repr=False, compare=False)

    @property
    def data(self) -> np.ndarray:
        """The stored words, [*shape], read-only, a view of the mapped file where there is one; bf16 as uint16, fp8 as uint8."""
        return self.shard.view(self.offset, self.nbytes).view(DTYPES[self.dtype][0]).reshape(self.shape)

    def rows(self, start: int, stop: int) -> np.ndarray:
        """data[start:stop] along the outermost dimension, as a copy; a scalar counts as one row."""
        shape = self.shape or (1,)
        width = self.nbytes // shape[0] if shape[0] else 0
        words = self.shard.read(self.offset + start * width, (stop - start) * width).view(DTYPES[self.dtype][0])
        return words.reshape(stop - start, *shape[1:])

    @property
    def source_type(self) -> str:
        """How values are stored, in the names of `SourceTensor`: 'bf16', 'f8_e4m3', ..."""
        return DTYPES[self.dtype][1]


class StoredKind(NamedTuple):
    """What many tensors have in common."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class ShardTensors:
    """The tensors of one file in the header's order: names, kinds, and offsets from the start of the file (int64)."""

    path: Path
    shard: Shard
    names: Sequence[str]
    kinds: Sequence[StoredKind]
    offsets: np.ndarray

    def check_places(self, start: int, size: int) -> None:
        """Raises FormatError if tensors overlap, or reach beyond a file of `size` bytes with data from `start` on."""
        nbytes = np.fromiter((kind.nbytes for kind in self.kinds), np.int64, len(self.kinds))
        order = np.argsort(self.offsets, kind="stable")
        begins, ends = self.offsets[order], np.maximum.accumulate((self.offsets + nbytes)[order])
        overlaps = (begins[1:] < ends[:-1]) & (nbytes[order][1:] > 0)
        if overlaps.any():
            name = self.names[order[1 + int(np.argmax(overlaps))]]
            raise FormatError(f"{self.path}: tensor {name} overlaps the one before it")
        excess = int(ends[-1]) - size if len(ends) else start - size
        if excess > 0:
            raise FormatError(
                f"{self.path}: the file is {excess} bytes shorter than its header says: truncated (download it again)"
            )


StoredTensors = TensorTable[ShardTensors, StoredTensor]  # name -> tensor


def _stored_tensor(file: ShardTensors, at: int) -> StoredTensor:
    kind = file.kinds[at]
    return StoredTensor(file.names[at], kind.dtype, kind.shape, file.path, file.offsets.item(at), kind.nbytes, file.shard)


def read_safetensors(path: Path) -> StoredTensors:
    """The tensors of one file, name -> tensor; no data is read. Raises FormatError if the file is truncated or malformed."""
    check_regular(path)
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            length = header_length(path, file.read(8), size)
            header = file.read(length)
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None
    return parse_header(path, header, size, LocalShard(path))


def header_length(path: Path, prefix: bytes, size: int) -> int:
    """The first 8 bytes of a file and its size -> size of its JSON header in bytes. Raises FormatError."""
    if size < 9:
        raise FormatError(f"{path}: {size} bytes are too few for a safetensors file")
    length = int.from_bytes(prefix[:8], "little")
    if length > min(size - 8, MAX_HEADER):
        raise FormatError(f"{path}: a header of {length} bytes in a file of {size}: truncated, or not safetensors")
    return length


def parse_header(path: Path, header: bytes, size: int, shard: Shard) -> StoredTensors:
    """A JSON header of a file of `size` bytes -> its tensors. Raises FormatError as `read_safetensors` does."""
    entries = _Entries()
    try:
        rows = json.loads(header, object_hook=entries.add)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: the header is not JSON ({error})") from None
    if not isinstance(rows, dict):
        raise FormatError(f"{path}: the header is not a JSON object")
    rows.pop("__metadata__", None)
    for name, row in rows.items():
        if type(row) is not _Row:
            raise _refused(path, name, row)
    if len(rows) != len(entries.begins):
        raise FormatError(f"{path}: the header names a tensor twice")
    data_start = 8 + len(header)
    offsets = np.array(entries.begins, np.int64) + data_start
    file = ShardTensors(path, shard, list(rows), entries.kinds, offsets)
    file.check_places(data_start, size)
    return StoredTensors([file], _stored_tensor)


def _open_deleted(path: Path) -> StoredTensors:
    record = read_record(path)
    return parse_header(path, record.header, record.size, DeletedShard(path))


class _Row(int):
    """The number of a tensor's entry, to be distinguished from a number that the file has in place of an entry."""


class _Entries:
    """What a header says of its tensors, in columns, filled while the JSON is decoded.

    begins: of each tensor's bytes, from the end of the header
    """

    def __init__(self) -> None:
        self.kinds: list[StoredKind] = []
        self.begins = array("q")
        self._known: dict[tuple[str, tuple[int, ...]], StoredKind] = {}

    def add(self, entry: dict[str, Any]) -> Any:
        """The number of a tensor's entry; an object that is none, or one that is not sound, as it is."""
        try:
            begin, end = entry["data_offsets"]
            spelt = entry["dtype"], tuple(entry["shape"])
            kind = self._known.get(spelt) or _kind(*spelt)
        except (TypeError, KeyError, ValueError):
            return entry
        if type(begin) is not int or type(end) is not int or not 0 <= begin < _LIMIT or end - begin != kind.nbytes:
            return entry
        self._known[spelt] = kind
        self.kinds.append(kind)
        self.begins.append(begin)
        return _Row(len(self.begins) - 1)


def _kind(dtype: str, shape: tuple[int, ...]) -> StoredKind:
    """Raises KeyError for an unknown dtype, ValueError for an impossible shape."""
    nbytes = prod(shape) * _ITEM_BYTES[dtype]
    if len(shape) > 8 or not all(type(v) is int and 0 <= v < _LIMIT for v in shape) or nbytes >= _LIMIT:
        raise ValueError
    return StoredKind(dtype, shape, nbytes)


def _refused(path: Path, name: str, entry: Any) -> FormatError:
    """What is wrong with an entry that `_Entries` does not take."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        return FormatError(f"{path}: tensor {name} lacks dtype, shape or data_offsets")
    if not all(type(v) is int and 0 <= v < _LIMIT for v in (*shape, begin, end)) or end < begin or len(shape) > 8:
        return FormatError(f"{path}: tensor {name} has an impossible shape or place: {shape}, {begin} to {end}")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        return FormatError(f"{path}: tensor {name} has dtype {dtype}; known are {', '.join(DTYPES)}")
    return FormatError(f"{path}: tensor {name} of shape {shape} and dtype {dtype} does not take {end - begin} bytes")


def find_indexes(folder: Path) -> list[Path]:
    """The index files (*.safetensors.index.json) of a checkpoint folder: none or one, unless it is damaged."""
    return sorted(folder.glob("*.safetensors.index.json"))


ShardOpener = Callable[[], StoredTensors]  # reads a shard's header: tensor name -> tensor


def local_shards(folder: Path) -> dict[str, ShardOpener]:
    """File name -> opener of the *.safetensors files of a folder, sorted, including those deleted after use."""
    names = {path.name for path in folder.glob("*.safetensors")} | set(deleted_shard_names(folder))
    paths = {name: folder / name for name in sorted(names)}
    return {n: (lambda p=p: read_safetensors(p) if p.exists() else _open_deleted(p)) for n, p in paths.items()}


def shard_names(folder: Path) -> dict[str, str] | None:
    """Tensor name -> file name of its shard, from the folder's index file; None if it has no index file.

    Raises FormatError for an index that is malformed or names files in other folders, and for several index files.
    """
    indexes = find_indexes(folder)
    if len(indexes) > 1:
        raise FormatError(f"{folder}: several index files ({', '.join(p.name for p in indexes)}); keep the one to use")
    if not indexes:
        return None
    try:
        weight_map = json.loads(read_text(indexes[0]))["weight_map"]
        shards = {name: name for name in weight_map.values()}
        weight_map = {name: shards[shard] for name, shard in weight_map.items()}  # one text for each shard, not for each tensor
        names = sorted(shards, key=str)
    except OSError as error:
        raise FormatError(f"{indexes[0]}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"{indexes[0]}: not an index of safetensors shards ({error!r})") from None
    outside = [name for name in names if not isinstance(name, str) or Path(name).name != name or name == ".."]
    if outside:
        raise FormatError(f"{indexes[0]}: {outside[0]!r} is not the name of a shard in this folder")
    return weight_map


def open_safetensors(folder: Path, shards: Mapping[str, ShardOpener] | None = None) -> StoredTensors:
    """All tensors of a checkpoint folder, name -> tensor: those of the shards that its index file names, else of all shards.

    shards: file name -> opener, for shards that are not in the folder. Raises FormatError if there is no shard, one is missing
    or is named outside of the folder, or a tensor is missing or in two shards.
    """
    weight_map = shard_names(folder)
    openers = local_shards(folder) if shards is None else shards
    if weight_map is not None:
        names = sorted(set(weight_map.values()))
        missing = [name for name in names if name not in openers]
        if missing:
            raise FormatError(f"{folder}: {len(missing)} of {len(names)} shards are missing, the first is {missing[0]}")
    else:
        names = list(openers)
        if not names:
            pickled = sorted(path.name for pattern in ("*.bin", "*.pth", "*.pt") for path in folder.glob(pattern))
            if pickled:
                raise FormatError(
                    f"{folder}: the weights are in {pickled[0]}, a torch file, which can run code and is not read; save them as"
                    " safetensors first, with transformers: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW)"
                )
            raise FormatError(f"{folder}: no *.safetensors file in this folder")
    files, absent = [], weight_map or {}
    for shard in names:
        for file in openers[shard]().files:
            files.append(file)
            for name in file.names:
                absent.pop(name, None)  # a million names are held once
    if absent:
        raise FormatError(
            f"{folder}: the index names {len(absent)} tensors that no shard holds, the first is {next(iter(absent))}"
        )
    return StoredTensors(files, _stored_tensor)
