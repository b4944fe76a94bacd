"""Shards that were deleted once their tensors were written: what is kept of them, so that the job can still be resumed.

NAME.safetensors.released holds one line of JSON (size and time of change of the shard) and then the shard's own header.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from ..errors import FormatError

SUFFIX = ".released"


@dataclass(frozen=True)
class Released:
    """Bytes and time of change (nanoseconds) of the shard that was, and its JSON header."""

    size: int
    mtime_ns: int
    header: bytes


def stub(path: Path) -> Path:
    return path.with_name(path.name + SUFFIX)


def is_released(folder: Path) -> list[str]:
    """Names of the shards of a folder that are gone, with their header left."""
    return [p.name.removesuffix(SUFFIX) for p in sorted(folder.glob(f"*.safetensors{SUFFIX}"))]


def release(path: Path) -> None:
    """Deletes a shard, of which its header, size and time stay; of a link, what it leads to. Raises OSError."""
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        header = file.read(int.from_bytes(file.read(8), "little"))
    fresh = stub(path).with_name(stub(path).name + ".new")
    with fresh.open("wb") as out:
        out.write(json.dumps({"size": found.st_size, "mtime_ns": found.st_mtime_ns}).encode() + b"\n" + header)
        out.flush()
        os.fsync(out.fileno())
    os.replace(fresh, stub(path))
    target = path.resolve()
    path.unlink()
    if target != path:
        target.unlink(missing_ok=True)


def read_released(path: Path) -> Released:
    """What is left of the shard at `path`. Raises FormatError."""
    try:
        line, _, header = stub(path).read_bytes().partition(b"\n")
        said = json.loads(line)
        return Released(int(said["size"]), int(said["mtime_ns"]), header)
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise FormatError(f"{stub(path)}: damaged ({error!r})") from None
