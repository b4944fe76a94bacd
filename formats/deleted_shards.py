"""Source shards deleted once their tensors were written: the record that is left, with which the job can still be resumed.

NAME.released, next to the shard of that name, holds one line of JSON (size and modification time of the shard), then its
header: of a safetensors file its JSON, of a GGUF all bytes before the first tensor's.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Protocol

from ..data_classes import dataclass
from ..errors import FormatError
from ..operating_system.files import sync_file, sync_folder

SUFFIX = ".released"


class DeletableShard(Protocol):
    """A file with tensors of a source, which a job may delete once they are written."""

    @property
    def was_read(self) -> bool:
        """Whether tensor data has been read."""
        ...

    def header(self) -> bytes:
        """What its record keeps, from which its tensors are known. Raises FormatError."""
        ...

    def close(self) -> None:
        """Gives up what would keep the deleted file's space on disk."""
        ...


@dataclass(frozen=True)
class DeletedShardRecord:
    """What is known of a deleted shard: its size in bytes, its modification time in nanoseconds, and its header."""

    size: int
    mtime_ns: int
    header: bytes


def record_path(shard: Path) -> Path:
    """Where the record of a deleted shard is: next to it."""
    return shard.with_name(shard.name + SUFFIX)


def deleted_shard_names(folder: Path) -> list[str]:
    """File names of the shards of a folder that were deleted and left a record, in order."""
    return [p.name.removesuffix(SUFFIX) for p in sorted(folder.glob(f"*.safetensors{SUFFIX}"))]


def deleted_error(path: Path) -> FormatError:
    """What reading from a deleted shard ends with."""
    return FormatError(
        f"{path}: was deleted when its tensors had been written (--delete-source-shards); only that job can be resumed, with "
        "--resume: for another, get the file again"
    )


def delete_shard(path: Path, header: bytes) -> None:
    """Writes a shard's record and deletes the shard; for a symbolic link also the file it points to. Raises OSError."""
    stat = path.stat()
    new = record_path(path).with_name(record_path(path).name + ".new")
    with new.open("wb") as out:
        out.write(json.dumps({"size": stat.st_size, "mtime_ns": stat.st_mtime_ns}).encode() + b"\n" + header)
        out.flush()
        sync_file(out.fileno())
    os.replace(new, record_path(path))
    sync_folder(path.parent)
    target = path.resolve()
    path.unlink()
    if target != path:
        target.unlink(missing_ok=True)


def read_record(shard: Path) -> DeletedShardRecord:
    """The record of a deleted shard. Raises FormatError if there is none or it is damaged."""
    try:
        line, _, header = record_path(shard).read_bytes().partition(b"\n")
        values = json.loads(line)
        return DeletedShardRecord(int(values["size"]), int(values["mtime_ns"]), header)
    except OSError as error:
        raise FormatError(f"{shard}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise FormatError(f"{record_path(shard)}: damaged ({error!r})") from None
