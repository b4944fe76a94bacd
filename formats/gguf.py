"""Opening GGUF v3 files: metadata, tensors, memory-mapped data; a split model opens as one."""

from __future__ import annotations

import hashlib
import mmap
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..data_classes import dataclass
from ..errors import FormatError
from .deleted_shards import DeletableShard, read_record, record_path
from .file_range import check_regular, read_range
from .gguf_parser import HeaderParser, whole_number
from .source import files_stamp
from .tensor_table import FileTensors, TensorInfo, TensorTable, tensor_table

PLAN_KEY = "split.plan"  # of a shard: a digest of the plan that it was written by
SPLIT_NAME = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")


@dataclass(frozen=True)
class GGUFFile:
    """An open GGUF model: one file, or all shards of a split one.

    path      the file, or the first shard; paths: all shards
    metadata  of the first shard, without the split.* keys of a split model
    tensors   name -> tensor, in file order
    shards    of a model that was opened as `deletable`: its files that have not been deleted
    """

    path: Path
    metadata: dict[str, Any]
    tensors: TensorTable[FileTensors, TensorInfo]
    paths: list[Path]
    alignment: int
    shards: Mapping[Path, DeletableShard] = field(default_factory=dict, repr=False)

    @property
    def architecture(self) -> str:
        """general.architecture; '' if the metadata do not say."""
        return str(self.metadata.get("general.architecture", ""))

    @cached_property
    def identity(self) -> str:
        """Digest of every tensor's name, shape, type, shard and offset and of every shard's size and modification time, which a
        resumed job compares. Raises FormatError if a shard is gone."""
        digest = hashlib.sha256(files_stamp(self.paths))
        for file in self.tensors.files:
            for name, (shape, kind, _), offset in zip(file.names, file.kinds, file.offsets.data, strict=True):
                line = f"{name} {shape} {kind.name} {offset} {file.path.name}\n"
                digest.update(line.encode("utf-8", "surrogateescape"))
        return digest.hexdigest()


@dataclass(frozen=True)
class GGUFShard:
    """A file of a split model that a job may delete: its tensors are read as ranges, so that nothing keeps its space."""

    path: Path
    header_bytes: int
    was_read: bool = False

    def header(self) -> bytes:
        """The bytes before the first tensor's. Raises FormatError if they cannot be read."""
        return read_range(self.path, 0, self.header_bytes).tobytes()

    def close(self) -> None:
        pass


def split_paths(path: Path) -> list[Path]:
    """All shards of the split model that a file belongs to by its name; the file alone if it is none."""
    match = SPLIT_NAME.match(path.name)
    count = int(match["count"]) if match is not None else 0
    return [path.with_name(f"{match['stem']}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)] if match else [path]


def open_gguf(path: str | Path, *, deletable: bool = False) -> GGUFFile:
    """Opens a GGUF file, or all shards of a split model when given any of them; no tensor data is read.

    deletable: for a job that deletes shards as it proceeds. Nothing is mapped, and shards that it has deleted before are known
    from their records (see `deleted_shards`).

    Raises FormatError for anything but complete, well-formed GGUF v3 files, naming the file and the byte.
    """
    path = Path(path)
    paths = split_paths(path)
    count = len(paths)
    if SPLIT_NAME.match(path.name) is None or not paths:
        metadata, tensors, alignment = open_file(path)
        return GGUFFile(path, metadata, tensor_table([tensors]), [path], alignment)

    missing = [p for p in paths if not p.exists() and not (deletable and record_path(p).exists())]
    if missing:
        deleted = record_path(missing[0]).exists()
        reason = ": deleted by `merge --delete-splits`, which --resume continues" if deleted else ""
        raise FormatError(f"{path}: {len(missing)} of {count} shards are missing, the first is {missing[0].name}{reason}")
    opened = [_open_unmapped(shard) if deletable else open_file(shard) for shard in paths]
    metadata = opened[0][0]
    if whole_number(paths[0], metadata, "split.count", count) != count:
        raise FormatError(f"{paths[0]}: its name says {count} shards, its metadata {metadata['split.count']}")
    for number, (shard, (shard_metadata, _, _)) in enumerate(zip(paths, opened, strict=True)):
        if number and whole_number(shard, shard_metadata, "split.no", number) != number:
            raise FormatError(f"{shard}: its metadata says that it is shard {shard_metadata['split.no']}, counted from 0")
    _check_plans(paths, [repr(shard_metadata.get(PLAN_KEY)) for shard_metadata, _, _ in opened])
    merged = tensor_table([tensors for _, tensors, _ in opened])
    declared = whole_number(paths[0], metadata, "split.tensors.count", len(merged))
    if declared != len(merged):
        raise FormatError(f"{paths[0]}: {declared} tensors are declared for the model, its shards hold {len(merged)}")
    shards = {t.path: GGUFShard(t.path, t.header_bytes) for _, t, _ in opened if t.path.exists()} if deletable else {}
    return GGUFFile(paths[0], _without_split(metadata), merged, paths, opened[0][2], shards)


def open_shards(paths: Sequence[Path]) -> GGUFFile:
    """Opens some files of a split, or a whole model's, as they are; the metadata are the first's. Raises FormatError."""
    opened = [open_file(path) for path in paths]
    tensors = tensor_table([tensors for _, tensors, _ in opened])
    return GGUFFile(paths[0], _without_split(opened[0][0]), tensors, list(paths), opened[0][2])


def _check_plans(paths: Sequence[Path], plans: Sequence[str]) -> None:
    """Raises FormatError for a shard that was written by another plan than most of them. plans: values of any type, as text."""
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


def header_record(path: Path) -> Path:
    """Where the new header of a file is while it is replaced in place (jobs/header_update.py)."""
    return path.with_name(path.name + ".header.journal")


def open_file(path: Path) -> tuple[dict[str, Any], FileTensors, int]:
    """(metadata, tensors, alignment) of one file, the keys of a split included. Raises FormatError as `open_gguf`."""
    check_regular(path)
    if header_record(path).exists():
        raise FormatError(f"{path}: changing its metadata was interrupted; `ggufmill metadata {path}` completes it")
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < 24:
                raise FormatError(f"{path}: {size} bytes are too few for a GGUF file")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None
    return HeaderParser(path, mapped, size).parse()


def _open_unmapped(path: Path) -> tuple[dict[str, Any], FileTensors, int]:
    """As `open_file`, also of a shard that was deleted and left its record; the file is not mapped."""
    if path.exists():
        metadata, tensors, alignment = open_file(path)
    else:
        record = read_record(path)
        try:
            metadata, tensors, alignment = HeaderParser(path, record.header, record.size).parse()
        except (struct.error, ValueError) as error:
            raise FormatError(f"{record_path(path)}: damaged ({error})") from None
    return metadata, replace(tensors, mapped=None), alignment
