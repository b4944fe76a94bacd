"""The state of an interrupted collection of covariances: the sums of the pass that was running, in a file."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from ...data_classes import dataclass
from ...errors import FormatError, PlanError
from ...jobs.atomic_write import atomic_file
from .collector import CovarianceCollector
from .sums import Sums

_MAGIC = b"GGUFMILL covariance sums 2\n"
_CHUNK = 1 << 24  # bytes that are hashed and written at a time


@dataclass(frozen=True)
class CollectionProgress:
    """How far a collection is.

    fingerprint  of the job
    finished     names of the inputs that the covariance file has
    current      names of those that have sums here, of the first `windows` windows; none: no pass has been begun
    """

    fingerprint: str
    finished: list[str]
    current: list[str]
    windows: int

    def check(self, fingerprint: str) -> None:
        """Raises PlanError if this is the progress of another job."""
        if fingerprint != self.fingerprint:
            raise PlanError(
                "the interrupted run summed the covariance of another job (model, texts, windows or settings differ): "
                "give the same arguments, or --force to start over"
            )


def save_state(path: Path, progress: CollectionProgress, collector: CovarianceCollector | None) -> None:
    """Writes progress and all sums, if there are any, atomically. Raises MillError if they cannot be written."""
    sums = list(_each(collector)) if collector is not None else []
    fields = [{"tokens": one.tokens, "weight": one.weight, "waiting": one.n_waiting} for one in sums]
    header = json.dumps({"progress": asdict(progress), "sums": fields}).encode()
    digest = xxhash.xxh3_64()
    with atomic_file(path, path.with_name(path.name + ".part")) as file:

        def write(data: np.ndarray) -> None:
            view = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
            for start in range(0, len(view), _CHUNK):
                digest.update(view[start : start + _CHUNK].data)
                file.write(view[start : start + _CHUNK].data)

        write(np.frombuffer(_MAGIC + struct.pack("<Q", len(header)) + header, np.uint8))
        for one in sums:
            write(one.totals)
            write(one.waiting[: one.n_waiting])
        file.write(struct.pack("<Q", digest.intdigest()))


def load_progress(path: Path) -> CollectionProgress:
    """Reads how far the collection was, without the sums. Raises FormatError for a damaged file, or one of another kind."""
    try:
        with path.open("rb") as file:
            return CollectionProgress(**_read_header(file, xxhash.xxh3_64())["progress"])
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None
    except (ValueError, TypeError, KeyError, struct.error):
        raise _damaged(path) from None


def restore_sums(path: Path, collector: CovarianceCollector) -> None:
    """Reads the sums of a collector with the same inputs. Raises FormatError for a damaged file."""
    digest = xxhash.xxh3_64()
    try:
        with path.open("rb") as file:
            header = _read_header(file, digest)
            for one, values in zip(_each(collector), header["sums"], strict=True):
                one.tokens, one.weight, one.n_waiting = (int(values[key]) for key in ("tokens", "weight", "waiting"))
                if not 0 <= one.n_waiting <= one.block:
                    raise ValueError
                _read_into(file, one.totals, digest)
                if one.n_waiting:
                    one.waiting = np.empty((one.block, one.columns), np.float32)
                    _read_into(file, one.waiting[: one.n_waiting], digest)
            if struct.unpack("<Q", file.read(8))[0] != digest.intdigest() or file.read(1):
                raise ValueError
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None
    except (ValueError, TypeError, KeyError, struct.error):
        raise _damaged(path) from None


def _each(collector: CovarianceCollector) -> Iterator[Sums]:
    for one in collector.inputs:
        yield from collector.sums[one.name]


def _read_header(file: BinaryIO, digest: Any) -> dict[str, Any]:
    start = file.read(len(_MAGIC) + 8)
    if not start.startswith(_MAGIC):
        raise ValueError
    header = file.read(min(struct.unpack("<Q", start[len(_MAGIC) :])[0], 1 << 30))
    digest.update(start + header)
    return json.loads(header)


def _read_into(file: BinaryIO, array: np.ndarray, digest: Any) -> None:
    view = array.reshape(-1).view(np.uint8).data
    if file.readinto(view) != len(view):  # type: ignore[attr-defined]
        raise ValueError
    digest.update(view)


def _damaged(path: Path) -> FormatError:
    return FormatError(f"{path}: not the state of a collection, or damaged: remove it, or give --force")
